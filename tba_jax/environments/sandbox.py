# SPDX-License-Identifier: Apache-2.0
"""Sandbox for Python code that a model wrote: each call has a process, which the kernel confines.

Landlock allows reading Python's own files and no other access to files. A seccomp filter allows a
list of system calls, without those for sockets, processes, threads, programs and signals. Resource
limits bound processor time, memory and output; the parent bounds elapsed time. docs/security.md
lists what the sandbox does not prevent. Invariant: no code runs before all restrictions hold.
"""

import ast
import contextlib
import ctypes
import errno
import os
import resource
import signal
import subprocess
import sys
import sysconfig
import tempfile
import traceback

MAX_OUTPUT_BYTES = 2**14
_REFUSED = 120  # exit status of a process that could not be confined
_VARIABLES = {"PYTHONDONTWRITEBYTECODE": "1", "OPENBLAS_NUM_THREADS": "1", "LANG": "C.UTF-8"}
_START_S = 5.0  # time to start the interpreter, in addition to the deadline of the code

# No system call of this list names a file to write, another process or the network.
_ALLOWED = """
    access arch_prctl brk clock_getres clock_gettime clock_nanosleep close close_range dup dup2 dup3
    exit exit_group faccessat faccessat2 fstat fstatfs futex get_robust_list getcwd getdents64
    getegid geteuid getgid getgroups getpgrp getpid getppid getrandom getresgid getresuid getrlimit
    getrusage gettid gettimeofday getuid lseek lstat madvise membarrier mmap mprotect mremap munmap
    nanosleep newfstatat open openat pipe pipe2 poll ppoll pread64 preadv pselect6 pwrite64 read
    readlink readlinkat readv restart_syscall rseq rt_sigaction rt_sigpending rt_sigprocmask
    rt_sigreturn sched_getaffinity sched_getparam sched_getscheduler sched_yield select
    set_robust_list set_tid_address sigaltstack stat statx sysinfo time times uname write writev
""".split()


def run_python(code: str, *, timeout_s: float, max_memory_bytes: int) -> str:
    """Return what Python code prints, and the value of its last line if that is an expression.

    The code may use `timeout_s` seconds of processor time (5 s more of elapsed time) and an address
    space of `max_memory_bytes`. Raises OSError if this machine cannot confine a process.
    """
    limits = [str(max_memory_bytes), str(max(1, round(timeout_s))), str(os.getpid())]
    with tempfile.TemporaryFile() as output:  # the kernel limits its size
        try:
            status = subprocess.run(
                [sys.executable, "-I", __file__, *limits],
                input=code.encode(errors="replace"),
                stdout=output,
                stderr=subprocess.STDOUT,
                env=_VARIABLES,
                cwd="/",
                start_new_session=True,
                timeout=timeout_s + _START_S,
            ).returncode
        except subprocess.TimeoutExpired:
            status = -signal.SIGXCPU
        output.seek(0)
        text = output.read().decode(errors="replace")
    if status == _REFUSED:
        raise OSError(text.strip())
    if status >= 0:
        return text
    ends = {signal.SIGXCPU: f"the code ran longer than {timeout_s:g} s"}
    ends[signal.SIGXFSZ] = f"more than {MAX_OUTPUT_BYTES:,} bytes were printed"
    ended_by = signal.Signals(-status)
    end = ends.get(ended_by, f"the process was ended by {ended_by.name}")
    return text + "\n" * bool(text) + f"error: {end}"


# --- in the process of the sandbox ---------------------------------------------------------------


def _confine(max_memory_bytes: int, cpu_s: int) -> None:
    """Restrict this process until it ends, or raise OSError if the kernel cannot."""
    libc = ctypes.CDLL(None, use_errno=True)
    _checked(libc.prctl(38, 1, 0, 0, 0), "no_new_privs")
    _deny_files(libc)
    limits = {"FSIZE": MAX_OUTPUT_BYTES, "AS": max_memory_bytes, "CORE": 0, "NOFILE": 64}
    for name, limit in limits.items():
        resource.setrlimit(getattr(resource, f"RLIMIT_{name}"), (limit, limit))
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s + 1))
    _deny_calls()


def _deny_files(libc: ctypes.CDLL) -> None:
    """Refuse all access to files, except reading those of Python (Landlock, Linux 5.13)."""
    version = _checked(libc.syscall(444, None, ctypes.c_size_t(0), 1), "Landlock")
    # Rights over files: 13 in version 1; then REFER, TRUNCATE and, in version 5, IOCTL_DEV.
    num_rights = {1: 13, 2: 14, 3: 15, 4: 15}.get(version, 16)
    rights = ctypes.c_uint64(2**num_rights - 1)
    rules = _checked(libc.syscall(444, ctypes.byref(rights), ctypes.c_size_t(8), 0), "Landlock")
    paths = {*sysconfig.get_paths().values(), sys.base_prefix, sys.prefix}
    paths |= {path for path in sys.path if path.endswith(("site-packages", "dist-packages"))}
    paths |= {"/lib", "/lib64", "/usr/lib", "/usr/lib64", "/usr/share/zoneinfo", "/dev/urandom"}
    for path in filter(os.path.exists, paths):
        opened = os.open(path, os.O_PATH)
        allowed = 2**2 | 2**3 * os.path.isdir(path)  # READ_FILE, and READ_DIR for a folder
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
    for name in _ALLOWED:
        number = library.seccomp_syscall_resolve_name(name.encode())
        if number >= 0:  # else this architecture has no call of this name
            added = library.seccomp_rule_add_array(context, 0x7FFF0000, number, 0, None)
            _checked(added, f"a seccomp rule for {name}")
    _checked(library.seccomp_load(context), "seccomp")


def _checked(result: int, what: str) -> int:
    if result < 0:
        text = os.strerror(ctypes.get_errno() or -result)
        raise OSError(
            f"this machine cannot confine a process: no {what} ({text}). Use Linux 5.13 or newer "
            "in a container that allows it, or leave out the tool python"
        )
    return result


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
    for number in (signal.SIGXCPU, signal.SIGXFSZ):  # the exit status then shows the limit
        signal.signal(number, signal.SIG_DFL)
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
