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
from pathlib import Path
from typing import Any

import filelock
from etils import epath

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.run.errors import UserError, WorkdirLost
from tba_jax.storage.whole_files import read_json, write_json

LOCK, HEARTBEAT = "lock", "heartbeat.json"
BEAT_S = 5.0  # seconds between two heartbeats
EXPIRE_S = 30.0  # heartbeat timeout of a holder on another host


class Hold:
    """Lock of a work directory; a context manager that releases it and deletes the heartbeat file.

    Args:
        folder: work directory; created if it is missing.
        shared: folder of the heartbeat file, for example in an object store; None: `folder`.

    Attributes:
        check: raises a WorkerError, whose cause is a WorkdirLost, if the directory was removed or
            its storage fails; without any I/O.

    Raises:
        UserError: another process holds the directory, or the directory cannot be written.
    """

    def __init__(self, folder: Path, shared: epath.Path | None = None) -> None:
        self._file = (shared or epath.Path(folder)) / HEARTBEAT
        self._entry = {"host": socket.gethostname(), "pid": os.getpid(), "beat": 0}
        self._lock, self._stop = filelock.FileLock(folder / LOCK, blocking=False), StopFlag()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            with contextlib.ExitStack() as undo:
                undo.enter_context(self._lock)
                self._wait_for_other_host()
                write_json(self._file, self._entry)
                undo.pop_all()
        except filelock.Timeout:
            raise self._held(self._read() or {}) from None
        except OSError as error:
            raise UserError(
                f"cannot write to the work directory {self._file.parent}: {error}. Repair its "
                "permissions, free space, or give another --workdir"
            ) from error
        self._beat_at_s, self.check = time.monotonic(), self._stop.check
        self._worker = Worker("workdir-lock", self._beat, self._stop, idle_s=BEAT_S).start()

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *args: object) -> None:
        self._stop.set()
        self._worker.join(EXPIRE_S)
        with contextlib.suppress(OSError):  # if the directory was removed, `check` reported it
            self._file.unlink(missing_ok=True)
        self._lock.release()

    def _wait_for_other_host(self) -> None:
        """Wait until the heartbeat file of another host is deleted or expires.

        Raises:
            UserError: the other host still sends heartbeats.
        """
        entry, start_s = self._read(), time.monotonic()
        # The lock excludes processes of this host.
        while entry is not None and entry.get("host") != self._entry["host"]:
            if time.monotonic() - start_s > EXPIRE_S:
                return
            time.sleep(BEAT_S)
            if (now := self._read()) not in (None, entry):
                raise self._held(now or {})
            entry = now

    def _held(self, entry: dict[str, Any]) -> UserError:
        return UserError(
            f"process {entry.get('pid', '?')} on {entry.get('host', '?')} is working on "
            f"{self._file.parent}. Wait for it or stop it, or give another --workdir"
        )

    def _beat(self) -> bool:
        """Write a heartbeat; errors are ignored until other hosts may take over."""
        where = self._file.parent
        try:
            if not self._file.exists():
                raise WorkdirLost(f"the work directory {where} was deleted or moved during the run")
            self._entry["beat"] += 1
            write_json(self._file, self._entry)
            self._beat_at_s = time.monotonic()
        except OSError as error:
            if time.monotonic() - self._beat_at_s > EXPIRE_S:
                raise WorkdirLost(
                    f"no heartbeat could be written to {where} for {EXPIRE_S:.0f} s ({error}); "
                    "another host may take it over. Repair the storage, then run the same command "
                    "again"
                ) from error
        return False  # the worker sleeps until the next call

    def _read(self) -> dict[str, Any] | None:
        """Return the entry of the heartbeat file; None without the file, {} if it is damaged."""
        try:
            return read_json(self._file)
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
