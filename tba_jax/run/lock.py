# SPDX-License-Identifier: Apache-2.0
"""Exclusive use of a work directory by one process.

`filelock` excludes processes of the same machine, and ends with the process. A heartbeat file
excludes other hosts, also on file systems without distributed locks: the holder replaces the file
every few seconds, and another host takes over after it has seen no new heartbeat for `expire_s` of
its own monotonic clock.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import filelock
from etils import epath

from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.run.errors import UserError, WorkdirLost
from tba_jax.storage.whole_files import write_json

LOCK, HEARTBEAT = "lock", "heartbeat.json"


class Hold:
    """Lock of a work directory; a context manager that releases it.

    Args:
        folder: work directory; created if it is missing.
        shared: folder of the heartbeat file, for example in an object store; None: `folder`.
        beat_s: seconds between two heartbeats.
        expire_s: heartbeat timeout of a holder on another host.

    Attributes:
        stop: stop flag of the heartbeat's worker, whose failure `check` raises.

    Raises:
        UserError: another process holds the directory, or the directory cannot be written.
    """

    def __init__(
        self,
        folder: Path,
        shared: epath.Path | None = None,
        *,
        beat_s: float = 5.0,
        expire_s: float = 30.0,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._where = shared or folder
        self._file = (shared or epath.Path(folder)) / HEARTBEAT
        self._beat_s, self._expire_s = beat_s, expire_s
        self._clock, self._sleep = clock, sleep
        self._entry = {"host": socket.gethostname(), "pid": os.getpid(), "beat": 0}
        self.stop = StopFlag()
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._lock = filelock.FileLock(folder / LOCK, blocking=False)
            self._lock.acquire()
            try:
                self._wait_for_other_host()
                write_json(self._file, self._entry)
            except BaseException:
                self._lock.release()
                raise
        except filelock.Timeout:
            raise self._held(self._read() or {}) from None
        except OSError as error:
            raise UserError(
                f"cannot write to the work directory {self._where}: {error}. Repair its "
                "permissions, free space, or give another --workdir"
            ) from error
        self._beat_at = clock()
        self._worker = Worker("workdir-lock", self._beat, self.stop, idle_s=beat_s)
        self._worker.start()

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *args: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise a failure of the heartbeat, without any I/O.

        Raises:
            WorkdirLost: the directory was removed, or its storage fails.
        """
        try:
            self.stop.check()
        except WorkerError as error:
            raise error.__cause__ or error from None

    def release(self) -> None:
        """Release the directory, and delete the heartbeat file."""
        self.stop.set()
        self._worker.join(self._expire_s)
        with contextlib.suppress(OSError):  # if the directory was removed, `check` reported it
            self._file.unlink(missing_ok=True)
        self._lock.release()

    def _wait_for_other_host(self) -> None:
        """Wait until the heartbeat file of another host is deleted or expires.

        Raises:
            UserError: the other host still sends heartbeats.
        """
        entry = self._read()
        if entry is None or entry.get("host") == self._entry["host"]:
            return  # the lock excludes processes of this host
        start = self._clock()
        while self._clock() - start < self._expire_s:
            self._sleep(self._beat_s)
            if (now := self._read()) is None:
                return
            if now != entry:
                raise self._held(now)

    def _held(self, entry: dict[str, Any]) -> UserError:
        return UserError(
            f"process {entry.get('pid', '?')} on {entry.get('host', '?')} is working on "
            f"{self._where}. Wait for it or stop it, or give another --workdir"
        )

    def _beat(self) -> bool:
        try:
            if not self._file.exists():
                raise WorkdirLost(
                    f"the work directory {self._where} was deleted or moved during the run"
                )
            self._entry["beat"] += 1
            write_json(self._file, self._entry)
            self._beat_at = self._clock()
        except OSError as error:  # temporary errors are ignored until other hosts may take over
            if self._clock() - self._beat_at > self._expire_s:
                raise WorkdirLost(
                    f"no heartbeat could be written to {self._where} for {self._expire_s:.0f} s "
                    f"({error}); another host may take it over. Repair the storage, then run "
                    "the same command again"
                ) from error
        return False  # the worker sleeps until the next call

    def _read(self) -> dict[str, Any] | None:
        """Return the entry of the heartbeat file; None without the file, {} if it is damaged."""
        try:
            entry = json.loads(self._file.read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return entry if isinstance(entry, dict) else {}
