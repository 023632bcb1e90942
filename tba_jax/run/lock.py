# SPDX-License-Identifier: Apache-2.0
"""One process works on a work directory: a lease with a heartbeat and a fencing number.

`WORKDIR/lock/N.json` is made exclusively by whoever holds the directory for the N-th time; the
highest N holds it. That needs no locks of the file system, so it works on network file systems
too. The holder counts a beat in its file every few seconds. Whether a holder is gone is decided by
the watcher's own monotonic clock: it saw no beat for `expire_s`; on the very machine it looks for
the process itself. A holder that slept and was taken over finds a higher number and ends, before
it writes a checkpoint. It knows nothing of what is in the directory.
"""

import contextlib
import json
import os
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.run.errors import UserError, WorkdirLost

FOLDER = "lock"
BEAT_S = 5.0
EXPIRE_S = 30.0


class Hold:
    """A held work directory; a context manager that lets it go.

    Args:
        workdir: exists.
        beat_s: seconds between two signs of life.
        expire_s: a holder elsewhere without one for as long is gone.
        clock, sleep: seconds that only go on, and waiting for some.

    Attributes:
        number: fencing number.
        taken_over: a line about the holder before, of which nothing was heard any more; "".

    Raises:
        UserError: another process holds it.
    """

    def __init__(
        self,
        workdir: Path,
        *,
        beat_s: float = BEAT_S,
        expire_s: float = EXPIRE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._workdir = workdir
        self._folder = workdir / FOLDER
        self._beat_s, self._expire_s = beat_s, expire_s
        self._clock, self._sleep = clock, sleep
        self._entry: dict[str, Any] = {**_here(), "beat": 0, "released": False}
        self._stop = StopFlag()
        self.number, self.taken_over = self._acquire()
        self._worker = Worker("workdir-lock", self._beat, self._stop, idle_s=beat_s)
        self._worker.start()

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *args: object) -> None:
        self.release()

    def check(self) -> None:
        """Raise what the heartbeat found; costs nothing.

        Raises:
            WorkdirLost: the directory is gone or in other hands.
        """
        try:
            self._stop.check()
        except WorkerError as error:
            cause = error.__cause__
            raise cause if isinstance(cause, WorkdirLost) else error from None

    def confirm(self) -> None:
        """Look now, before something is written that must not come from two processes.

        Raises:
            WorkdirLost: as `check`.
        """
        self.check()
        numbers = self._numbers()
        if numbers and max(numbers) > self.number:
            other = self._read(max(numbers)) or {}
            raise WorkdirLost(
                f"process {other.get('pid', '?')} on {other.get('host', '?')} has taken over "
                f"{self._workdir}: no sign of life came from this one for {self._expire_s:.0f} s "
                "(was it suspended?). It ends and writes nothing more"
            )
        if self.number not in numbers:
            raise WorkdirLost(
                f"the work directory {self._workdir} is gone: deleted or moved away while the run "
                "was going"
            )

    def release(self) -> None:
        """Let the directory go; the next holder has the next number."""
        self._stop.set()
        self._worker.join(self._expire_s)
        # Where the directory is gone there is nothing to release, and `check` has said so.
        with contextlib.suppress(OSError):
            if self.number in self._numbers():
                self._write(self.number, {**self._entry, "released": True})

    def _beat(self) -> bool:
        self.confirm()
        self._entry["beat"] += 1
        self._write(self.number, self._entry)
        return False  # and sleeps until the next

    def _acquire(self) -> tuple[int, str]:
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            while True:
                newest = max(self._numbers(), default=0)
                line = self._wait_until_gone(newest) if newest else ""
                if self._create(newest + 1):
                    break
            for number in self._numbers():
                if number <= newest:
                    self._file(number).unlink(missing_ok=True)
        except OSError as error:
            raise UserError(
                f"cannot write to the work directory {self._workdir}: {error}"
            ) from error
        return newest + 1, line

    def _wait_until_gone(self, number: int) -> str:
        """Return when its holder is gone; a line about it, unless it left in order.

        Raises:
            UserError: it is alive.
        """
        entry = self._read(number)
        if entry is None or entry.get("released"):
            return ""
        who = f"process {entry.get('pid')} on {entry.get('host')}"
        if entry.get("machine") == self._entry["machine"]:
            if _is_alive(entry):
                raise self._held(who)
            return ""  # killed; the usual way to continue
        start = self._clock()
        while self._clock() - start < self._expire_s:
            self._sleep(self._beat_s)
            now = self._read(number)
            if now is None or now.get("released"):
                return ""
            if now != entry:
                raise self._held(who)
        return (
            f"{self._workdir} was held by {who}, of which nothing was heard for "
            f"{self._expire_s:.0f} s; taken over"
        )

    def _held(self, who: str) -> UserError:
        return UserError(
            f"{who} is working on {self._workdir}. Wait for it or stop it, or give another "
            "--workdir"
        )

    def _numbers(self) -> set[int]:
        try:
            names = os.listdir(self._folder)
        except FileNotFoundError:
            return set()
        stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return {int(stem) for stem in stems if stem.isdigit()}

    def _file(self, number: int) -> Path:
        return self._folder / f"{number:08d}.json"

    def _create(self, number: int) -> bool:
        """Whether this process is the one that made it."""
        try:
            with open(self._file(number), "x") as file:
                json.dump(self._entry, file)
        except FileExistsError:
            return False
        return True

    def _read(self, number: int) -> dict[str, Any] | None:
        """An entry; {} while it is being written, None when it is gone."""
        try:
            entry = json.loads(self._file(number).read_text())
        except FileNotFoundError:
            return None
        except ValueError:
            return {}
        return entry if isinstance(entry, dict) else {}

    def _write(self, number: int, entry: dict[str, Any]) -> None:
        unfinished = self._file(number).with_suffix(".unfinished")
        unfinished.write_text(json.dumps(entry))
        os.replace(unfinished, self._file(number))


def _here() -> dict[str, Any]:
    """What names this process; `machine` is equal where process ids mean the same."""
    machine = ""
    with contextlib.suppress(OSError):  # not Linux: then nobody is known to be on the same machine
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return {
        "host": socket.gethostname(),
        "machine": machine or f"{socket.gethostname()} {os.getpid()}",
        "pid": os.getpid(),
        "began": _began(os.getpid()),
    }


def _is_alive(entry: dict[str, Any]) -> bool:
    return bool(entry.get("began")) and _began(int(entry["pid"])) == entry["began"]


def _began(pid: int) -> str:
    """When a process was started, in ticks since the machine was; "" for none. Ids are reused."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Fields 3 and 22 of proc(5); a zombie holds nothing any more.
    return "" if stat[0] in "ZX" else stat[19]
