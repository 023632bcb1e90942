# SPDX-License-Identifier: Apache-2.0
"""Resource limits of reward processes, and cleanup of the processes that they start.

Each reward process leads a process group. When the process ends (at a deadline, or because its
parent has ended), its group is killed. Children can leave the group (setsid) and their ancestors
(double fork), but they inherit resource limits. On Linux, a harmless limit therefore has a value
that identifies the reward process, its mark. Every process with that mark is killed with the group.
(A sub-reaper would mix orphans with the children of the program that uses this library.) On other
systems, or if that limit is already finite, only the group is killed. This is no sandbox: a process
with the privilege can raise its limits. Invariant: a group or mark is killed only after its leader
has ended, so a reused process ID never gets a signal.
"""

import contextlib
import os
import secrets
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

# A file that a reward writes by accident must not fill the disk of the run.
MOST_FILE_BYTES = 2**32
_SWEEP_S = 1.0


def enter(folder: str, max_memory_bytes: int) -> None:
    """Start a process group, record the group, and set resource limits; call in a new process.

    Args:
        folder: folder of the records.
        max_memory_bytes: limit of the memory that the process allocates; 0: none.
    """
    if sys.platform == "win32":
        return
    os.setpgid(0, 0)
    import resource

    mark = _take_mark()
    # The parent may have closed the pool in the meantime; then this process ends soon.
    with contextlib.suppress(OSError):
        (Path(folder) / str(os.getpid())).write_text(f"{_began(os.getpid())} {mark}")

    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: MOST_FILE_BYTES}
    if max_memory_bytes:
        limits[resource.RLIMIT_DATA] = max_memory_bytes
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))
    # A file that is too large raises an exception instead of ending the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def leave(folder: str) -> None:
    """End this process and all processes that it started; call when its parent has ended."""
    shutil.rmtree(folder, ignore_errors=True)
    if sys.platform != "win32":
        _kill_marked(_mark_of(0))
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end(folder: str, parent: int) -> None:
    """Clean up in a process that ends by itself, for example because its pipe was closed."""
    if os.getppid() != parent:
        leave(folder)
    _kill_marked(_mark_of(0))


def _take_mark() -> int:
    """Mark this process and all its future children; return the mark, 0 if it cannot be set."""
    if sys.platform != "linux":
        return 0
    import resource

    # Microseconds that a process with a real-time policy may run without a pause. Such policies
    # need a privilege that rewards lack, and the value is hundreds of years.
    if resource.getrlimit(resource.RLIMIT_RTTIME)[1] != resource.RLIM_INFINITY:
        return 0
    mark = 2**61 + secrets.randbits(60)
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))
    except (OSError, ValueError):  # a user-space kernel may not support this limit
        return 0
    return mark


def _mark_of(pid: int) -> int:
    """Return the mark of process `pid` (0: this process); 0 if it has no mark or has ended."""
    if sys.platform != "linux":
        return 0
    import resource

    try:
        hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)[1]
    except OSError:  # the process has ended, or belongs to another user
        return 0
    return hard if hard >= 2**61 else 0


def _kill_marked(mark: int) -> None:
    """Kill every process with this mark except this process."""
    if not mark:
        return
    told = {os.getpid()}
    while True:
        # A killed process starts no further process: repeat until no new process is found.
        found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        found = [pid for pid in found if pid not in told and _mark_of(pid) == mark]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        told.update(found)


class Groups:
    """Process groups of a pool's processes, with the marks that their descendants inherit."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="tba_jax_rewards_")
        self._swept_s = 0.0

    def sweep(self, *, now: bool = False) -> int:
        """Kill the groups of processes that have ended; return the number of groups.

        Does nothing within a second of the last sweep.

        Args:
            now: whether to sweep even within a second of the last sweep.
        """
        if not now and time.monotonic() - self._swept_s < _SWEEP_S:
            return 0
        self._swept_s = time.monotonic()
        return sum(self._killed(record) for record in self._records())

    def close(self) -> None:
        """Kill all groups; called after their leaders were stopped."""
        self.sweep(now=True)
        shutil.rmtree(self.folder, ignore_errors=True)  # in the system's temporary folder

    def _records(self) -> list[Path]:
        with contextlib.suppress(FileNotFoundError):  # closed by another thread
            entries = os.scandir(self.folder)
            return [Path(entry.path) for entry in entries if entry.name.isdigit()]
        return []

    def _killed(self, record: Path) -> bool:
        try:
            leader, written = int(record.name), record.read_text()
        except FileNotFoundError:
            return False
        began, _, mark = written.partition(" ")
        if not mark or _began(leader) == began:
            return False  # the record is being written, or the process runs
        record.unlink(missing_ok=True)
        _kill_marked(int(mark))
        # The system does not reuse the ID of a group with members: if a new process has this ID,
        # the group is empty.
        if _began(leader):
            return False
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def _began(pid: int) -> str:
    """Return the start time of a process, in ticks since boot; "" if it has ended."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            stat = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if stat[0] in "ZX" else stat[19]  # fields 3 and 22 of proc(5)
