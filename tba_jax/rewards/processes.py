# SPDX-License-Identifier: Apache-2.0
"""Processes that run user code: reward functions and environments.

Each process leads a process group, which is killed with it, so its children end too. Its output
goes to a log file. This is no sandbox: a child can leave the group.
"""

import contextlib
import multiprocessing
import os
import signal
import socket
import sys
import threading
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path

# A file that user code writes by accident must not fill the disk of the run.
MOST_FILE_BYTES = 2**32


def log_file(folder: Path | None, kind: str, number: int) -> str:
    """Return the log file of a worker of this process; "" without a folder: standard streams."""
    if folder is None:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"{kind}-{socket.gethostname()}-{os.getpid()}-{number}.log")


def enter_process(connection: Connection, folder: str, max_memory_bytes: int, log: str) -> None:
    """Prepare a new process for user code; the process and its group end when its parent ends.

    Args:
        connection: pipe to the parent; children of this process do not inherit it, so the parent
            sees when this process ends.
        folder: folder from which user modules can be imported.
        max_memory_bytes: limit of the memory that the process allocates; 0: no limit.
        log: file to which standard output and standard error are appended; "": no change.
    """
    if sys.platform != "win32":
        os.setpgid(0, 0)
        _limit(max_memory_bytes)
    os.set_inheritable(connection.fileno(), False)
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    # A parent that was killed cannot stop a process that hangs in user code.
    threading.Thread(target=_leave_with_parent, name="exit-with-parent", daemon=True).start()
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's file must not hide a module of the library


def leave() -> None:
    """End this process and its process group."""
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def kill(process: BaseProcess) -> None:
    """Kill a process that called `enter_process`, and its process group."""
    if process.pid is None:
        return  # not started
    if sys.platform != "win32":
        # Before the process itself, whose ID could otherwise become that of another process.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(process.pid, signal.SIGKILL)
    process.kill()
    process.join(1.0)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    leave()


def _limit(max_memory_bytes: int) -> None:
    import resource

    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: MOST_FILE_BYTES}
    if max_memory_bytes:
        limits[resource.RLIMIT_DATA] = max_memory_bytes
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))
    # A file that is too large raises an exception instead of ending the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
