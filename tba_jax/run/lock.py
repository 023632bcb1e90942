# SPDX-License-Identifier: Apache-2.0
"""Exclusive use of a work directory by one process.

`filelock` excludes processes of the same machine, and ends with the process. A heartbeat file
excludes other hosts, also on file systems without distributed locks: the holder replaces the file
every few seconds, and another host takes over after it has seen no new heartbeat for `EXPIRE_S` of
its own monotonic clock.
"""

import contextlib
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import filelock
from etils import epath

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.run.errors import UserError, WorkdirLost
from tba_jax.storage.whole_files import write_whole

LOCK, HEARTBEAT = "lock", "heartbeat"
BEAT_S = 5.0  # seconds between two heartbeats
EXPIRE_S = 30.0  # heartbeat timeout of a holder on another host


@contextlib.contextmanager
def hold(folder: Path, shared: epath.Path | None = None) -> Iterator[StopFlag]:
    """Lock a work directory; at the end, release it and delete the heartbeat file.

    Args:
        folder: work directory; created if it is missing.
        shared: folder of the heartbeat file, for example in an object store; None: `folder`.

    Yields:
        A flag. Without any I/O, its `check` raises a WorkerError, whose cause is a WorkdirLost, if
        the directory was removed or its storage fails.

    Raises:
        UserError: another process holds the directory, or the directory cannot be written.
    """
    where = shared or epath.Path(folder)
    file, mine = where / HEARTBEAT, f"process {os.getpid()} on {socket.gethostname()}"
    written_s = time.monotonic()

    def beat() -> bool:
        nonlocal written_s
        try:
            write_whole(file, f"{mine}\n{time.time_ns()}".encode())
            written_s = time.monotonic()
        except OSError as error:  # ignored until other hosts may take over
            if time.monotonic() - written_s > EXPIRE_S:
                raise WorkdirLost(
                    f"no heartbeat could be written to {where} for {EXPIRE_S:.0f} s ({error}): the "
                    "work directory was deleted or moved, or its storage fails. Repair it, then "
                    "run the same command again"
                ) from error
        return False  # the worker sleeps until the next call

    with contextlib.ExitStack() as held:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            held.enter_context(filelock.FileLock(folder / LOCK, blocking=False))
            _wait_for_other_host(file)
            write_whole(file, f"{mine}\n".encode())
        except filelock.Timeout:
            raise _held(file, _read(file) or "") from None
        except OSError as error:
            raise UserError(
                f"cannot write to the work directory {where}: {error}. Repair its permissions, "
                "free space, or give another --workdir"
            ) from error
        stop = StopFlag()
        worker = Worker("workdir-lock", beat, stop, idle_s=BEAT_S).start()
        try:
            yield stop
        finally:
            stop.set()
            worker.join(EXPIRE_S)
            with contextlib.suppress(OSError):  # if the directory was removed, `check` reported it
                file.unlink(missing_ok=True)


def _wait_for_other_host(file: epath.Path) -> None:
    """Wait until the heartbeat file of another host is deleted or expires.

    Raises:
        UserError: the other host still sends heartbeats.
    """
    entry, start_s = _read(file), time.monotonic()
    own = f" on {socket.gethostname()}\n"  # the lock excludes processes of this host
    while entry is not None and own not in entry and time.monotonic() - start_s <= EXPIRE_S:
        time.sleep(BEAT_S)
        if (now := _read(file)) not in (None, entry):
            raise _held(file, now)
        entry = now


def _read(file: epath.Path) -> str | None:
    try:
        return file.read_bytes().decode(errors="replace")
    except FileNotFoundError:
        return None


def _held(file: epath.Path, entry: str) -> UserError:
    holder = entry.partition("\n")[0][:99] or "another process"
    return UserError(
        f"{holder} is working on {file.parent}. Wait for it or stop it, or give another --workdir"
    )
