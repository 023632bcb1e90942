# SPDX-License-Identifier: Apache-2.0
"""What a reward process may take, and that nothing of it stays behind.

Each process leads a process group of its own, which the processes that it starts belong to. When
it is gone, killed at a deadline or with its parent, the group is killed. Processes leave a group
(setsid) and their ancestors (a daemon forks twice), but not the limits on resources that they
inherit: on Linux one of those, which limits nothing here, is a mark of the process that led, and
whatever has the mark is killed with the group. (A sub-reaper would only inherit the orphans, among
the children of whoever uses this library.) Elsewhere, or where the limit is finite already, only
the group is. A process with the right to raise its limits can take the mark off: this is no
sandbox. It knows nothing of rewards. Invariant: a group or mark is killed only when its leader is
gone, so no id that was given out anew is ever signalled.
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

# Files that a reward writes by accident must not fill the disk of the run.
MOST_FILE_BYTES = 2**32
_SWEEP_S = 1.0


def enter(folder: str, max_memory_bytes: int) -> None:
    """In a new process: lead a group, be known, and take no more than this.

    Args:
        folder: where processes make themselves known.
        max_memory_bytes: of data that the process itself allocates; 0: any.
    """
    if sys.platform == "win32":
        return
    os.setpgid(0, 0)
    import resource

    mark = _take_mark()
    # The parent may have closed the pool meanwhile; then this process ends soon.
    with contextlib.suppress(OSError):
        (Path(folder) / str(os.getpid())).write_text(f"{_began(os.getpid())} {mark}")

    limits = {resource.RLIMIT_CORE: 0, resource.RLIMIT_FSIZE: MOST_FILE_BYTES}
    if max_memory_bytes:
        limits[resource.RLIMIT_DATA] = max_memory_bytes
    for kind, limit in limits.items():
        _, hard = resource.getrlimit(kind)
        limit = limit if hard == resource.RLIM_INFINITY else min(limit, hard)
        resource.setrlimit(kind, (limit, hard))
    # A file that grows too large is an exception and not the end of the process.
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)


def leave(folder: str) -> None:
    """In a process whose parent is gone: end, with everything that it started.

    Args:
        folder: as in `enter`; nobody is left to remove it.
    """
    shutil.rmtree(folder, ignore_errors=True)
    if sys.platform != "win32":
        _kill_marked(_mark_of(0))
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def end(folder: str, parent: int) -> None:
    """In a process that ends by itself, as one does that finds nobody at the other end of its pipe.

    Args:
        folder: as in `enter`.
        parent: process id of who started it.
    """
    if os.getppid() != parent:
        leave(folder)
    _kill_marked(_mark_of(0))


def _take_mark() -> int:
    """Mark this process and all that it will start; the mark, 0 where there can be none."""
    if sys.platform != "linux":
        return 0
    import resource

    # Microseconds that a process with a real-time policy may run on without a pause: such policies
    # need a privilege that rewards lack, and as a limit this is hundreds of years.
    if resource.getrlimit(resource.RLIMIT_RTTIME)[1] != resource.RLIM_INFINITY:
        return 0
    mark = 2**61 + secrets.randbits(60)
    try:
        resource.setrlimit(resource.RLIMIT_RTTIME, (mark, mark))
    except (OSError, ValueError):  # a kernel in user space may know this limit and not set it
        return 0
    return mark


def _mark_of(pid: int) -> int:
    """The mark of a process, 0 for this one; 0 for one without or one that is gone."""
    if sys.platform != "linux":
        return 0
    import resource

    try:
        hard = resource.prlimit(pid, resource.RLIMIT_RTTIME)[1]
    except OSError:  # gone, or another user's
        return 0
    return hard if hard >= 2**61 else 0


def _kill_marked(mark: int) -> None:
    """Kill every process with this mark but the own one."""
    if not mark:
        return
    told = {os.getpid()}
    while True:
        # A process that was told starts none any more: when all that are found were, none is left.
        found = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        found = [pid for pid in found if pid not in told and _mark_of(pid) == mark]
        if not found:
            return
        for pid in found:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        told.update(found)


class Groups:
    """The groups and marks of a pool's processes, in the parent."""

    def __init__(self) -> None:
        self.folder = tempfile.mkdtemp(prefix="tba_jax_rewards_")
        self._swept_s = 0.0

    def sweep(self, *, now: bool = False) -> int:
        """Kill what processes that are gone have left; how many groups. At most once a second.

        Args:
            now: also if it was done a moment ago.
        """
        if not now and time.monotonic() - self._swept_s < _SWEEP_S:
            return 0
        self._swept_s = time.monotonic()
        return sum(self._killed(record) for record in self._records())

    def close(self) -> None:
        """Kill what is left of all groups, once their leaders were told to end."""
        self.sweep(now=True)
        shutil.rmtree(self.folder, ignore_errors=True)  # the system empties its temporary folder

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
            return False  # being written, or alive
        record.unlink(missing_ok=True)
        _kill_marked(int(mark))
        # No process gets the id of a group that has members, so if this id is another process's by
        # now the group is empty.
        if _began(leader):
            return False
        try:
            os.killpg(leader, signal.SIGKILL)
        except ProcessLookupError:
            return False
        return True


def _began(pid: int) -> str:
    """When a process was started, in ticks since the machine was; "" for none or a dead one."""
    try:
        with open(f"/proc/{pid}/stat") as file:
            stat = file.read().rpartition(")")[2].split()
    except OSError:
        return ""
    return "" if stat[0] in "ZX" else stat[19]  # fields 3 and 22 of proc(5)
