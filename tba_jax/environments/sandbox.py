# SPDX-License-Identifier: Apache-2.0
"""Sandbox for Python code that a model wrote: each call has a process, which the kernel confines.

Landlock refuses all files but those of Python, which may be read. A seccomp filter allows a list of
system calls, without those for sockets, processes, threads, programs and signals. Resource limits
bound processor time and memory; the parent bounds output and elapsed time. docs/security.md lists
what the sandbox does not prevent.

Invariant: the code runs only after every restriction is in force.
"""

import ast
import contextlib
import ctypes
import errno
import os
import resource
import signal
import struct
import subprocess
import sys
import sysconfig
import threading
import traceback

MAX_OUTPUT_BYTES = 2**14
MAX_CODE_BYTES = 2**18
_REFUSED = 120  # exit status of a process that could not be confined
_START_S = 5.0  # time to start the interpreter, in addition to the deadline of the code

# No system call of this list names a file to write, another process or the network.
_ALLOWED = """
    access arch_prctl brk clock_getres clock_gettime clock_nanosleep close close_range dup dup2 dup3
    epoll_create1 epoll_ctl epoll_pwait epoll_wait eventfd2 exit exit_group faccessat faccessat2
    fstat fstatfs futex get_robust_list getcwd getdents64 getegid geteuid getgid getgroups getitimer
    getpgrp getpid getppid getrandom getresgid getresuid getrlimit getrusage gettid gettimeofday
    getuid lseek lstat madvise membarrier mincore mmap mprotect mremap munmap nanosleep newfstatat
    open openat pipe pipe2 poll ppoll pread64 preadv pselect6 pwrite64 read readlink readlinkat
    readv restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask rt_sigreturn
    sched_getaffinity sched_getparam sched_getscheduler sched_yield select set_robust_list
    set_tid_address setitimer sigaltstack stat statx sysinfo time times uname write writev
""".split()


def run_python(code: str, *, timeout_s: float, max_memory_bytes: int) -> str:
    """Return what Python code prints, and the value of its last line if that is an expression.

    Args:
        code: Python code.
        timeout_s: limit of processor time in seconds; elapsed time may be 5 s longer.
        max_memory_bytes: limit of the address space.

    Raises:
        OSError: this machine cannot confine a process.
    """
    if len(code.encode(errors="replace")) > MAX_CODE_BYTES:
        return f"error: the code has more than {MAX_CODE_BYTES:,} bytes"
    limits = [str(max_memory_bytes), str(max(1, round(timeout_s))), str(os.getpid())]
    process = subprocess.Popen(
        [sys.executable, "-I", __file__, *limits],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        env={"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"},
        cwd="/",
        start_new_session=True,
    )
    assert process.stdin is not None and process.stdout is not None
    timer = threading.Timer(timeout_s + _START_S, process.kill)
    timer.start()
    try:
        with contextlib.suppress(BrokenPipeError), process.stdin:
            process.stdin.write(code.encode(errors="replace"))
        with process.stdout:
            output = process.stdout.read(MAX_OUTPUT_BYTES + 1)
    finally:
        is_late = timer.finished.is_set()
        timer.cancel()
        process.kill()
        status = process.wait()
    text, end = output[:MAX_OUTPUT_BYTES].decode(errors="replace"), ""
    if status == _REFUSED:
        raise OSError(text.strip())
    if status == -signal.SIGXCPU or is_late:
        end = f"error: the code ran longer than {timeout_s:g} s"
    elif len(output) > MAX_OUTPUT_BYTES:
        end = f"error: more than {MAX_OUTPUT_BYTES:,} bytes were printed"
    elif status < 0:
        end = f"error: the process was ended by {signal.Signals(-status).name}"
    return text + ("\n" if text and end else "") + end


# The functions below run in the process of the sandbox.


def _confine(max_memory_bytes: int, cpu_s: int) -> None:
    """Restrict this process until it ends, or raise OSError if the kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _deny_files(libc)
    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: 0, resource.RLIMIT_NOFILE: 64}
    for kind, limit in {**limits, resource.RLIMIT_AS: max_memory_bytes}.items():
        resource.setrlimit(kind, (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    _deny_calls()


def _deny_files(libc: ctypes.CDLL) -> None:
    """Refuse all access to files, except reading those of Python (Landlock, Linux 5.13)."""
    version = libc.syscall(444, None, ctypes.c_size_t(0), 1)
    _checked(version, "Landlock (Linux 5.13 or newer, and enabled in the kernel)")
    # Rights over files: 13 in version 1; then REFER, TRUNCATE and, in version 5, IOCTL_DEV.
    num_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    rights = ctypes.c_uint64(2**num_rights - 1)
    rules = libc.syscall(444, ctypes.byref(rights), ctypes.c_size_t(8), 0)
    _checked(rules, "Landlock")
    paths = {*sysconfig.get_paths().values(), sys.base_prefix, sys.prefix}
    paths |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/dev/urandom"}
    for path in filter(os.path.exists, paths):
        opened = os.open(path, os.O_PATH)
        # READ_FILE, and READ_DIR for a folder.
        allowed = 2**2 | 2**3 if os.path.isdir(path) else 2**2
        rule = allowed.to_bytes(8, sys.byteorder) + opened.to_bytes(4, sys.byteorder)
        _checked(libc.syscall(445, rules, 1, rule, 0), f"a Landlock rule for {path}")
        os.close(opened)
    _checked(libc.syscall(446, rules, 0), "Landlock")
    os.close(rules)


def _deny_calls() -> None:
    """Refuse every system call that is not on the list (seccomp, by libseccomp)."""
    try:
        library = ctypes.CDLL("libseccomp.so.2")
    except OSError as error:
        raise OSError(f"no libseccomp ({error}). Install it: apt install libseccomp2") from error
    library.seccomp_init.restype = ctypes.c_void_p
    context = ctypes.c_void_p(library.seccomp_init(0x50000 | errno.EPERM))

    # Name of a call, and the argument that must equal a value (`struct scmp_arg_cmp`) if any.
    rules = [(name, b"") for name in _ALLOWED]
    rules += [("prlimit64", struct.pack("IiQQ", 2, 4, 0, 0))]  # reads limits, and changes none
    # F_DUPFD, F_GETFD, F_SETFD, F_GETFL, F_SETFL, F_DUPFD_CLOEXEC. Other commands (F_SETOWN,
    # F_SETSIG) can send any signal to any process.
    rules += [("fcntl", struct.pack("IiQQ", 1, 4, x, 0)) for x in (0, 1, 2, 3, 4, 1030)]
    for name, argument in rules:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else this architecture has no call of this name
            row = (context, 0x7FFF0000, number, bool(argument), argument)
            _checked(library.seccomp_rule_add_array(*row), f"a seccomp rule for {name}")
    _checked(library.seccomp_load(context), "seccomp")


def _checked(result: int, what: str) -> None:
    if result < 0:
        text = os.strerror(ctypes.get_errno() or -result)
        raise OSError(f"this machine cannot confine a process: no {what} ({text})")


def _main() -> None:
    max_memory_bytes, cpu_s, parent = map(int, sys.argv[1:])
    code = sys.stdin.buffer.read().decode()
    sys.argv = [""]
    try:
        ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # when the parent ends
        if os.getppid() != parent:
            return
        _confine(max_memory_bytes, cpu_s)
    except (OSError, ValueError) as error:
        print(error, flush=True)
        os._exit(_REFUSED)
    # With Python's handlers, the exit status would not show the signal of a limit.
    signal.signal(signal.SIGXCPU, signal.SIG_DFL)
    names = {"__name__": "__main__"}
    try:
        body = ast.parse(code, "<code>").body
        is_value = bool(body) and isinstance(body[-1], ast.Expr)
        size = len(body) - is_value
        exec(compile(ast.Module(body[:size], []), "<code>", "exec"), names)
        # As in an interactive session, the value is printed unless it is None.
        exec(compile(ast.Interactive(body[size:]), "<code>", "single"), names)
    except SystemExit:
        pass
    except BaseException as error:
        *_, line = traceback.format_exception_only(error)
        frames = traceback.extract_tb(error.__traceback__)
        numbers = [frame.lineno for frame in frames if frame.filename == "<code>"]
        if isinstance(error, SyntaxError):
            numbers = [error.lineno]
        print(*[f"line {number}:" for number in numbers[:1]], line.strip())
    with contextlib.suppress(OSError):
        sys.stdout.flush()
    os._exit(0)


if __name__ == "__main__":
    _main()
