# SPDX-License-Identifier: Apache-2.0
"""Exclusive use of a work directory by one process: a lease with heartbeats and a fencing number.

The N-th holder creates `WORKDIR/lock/N.json` exclusively; the highest N is the current holder. This
needs no locks of the file system, so it works on network file systems and in object stores with
conditional creation. The holder writes a heartbeat to its file every few seconds. A waiting process
takes over after it has seen no heartbeat for `expire_s` of its own monotonic clock. On the same
machine it checks whether the holder's process exists. A holder that was suspended and replaced
finds a higher number, and ends before it writes a checkpoint.

A run with its work directory in an object store works in a local folder, and `Mirroring` uploads
new files. Invariant: nothing is uploaded under a lost lease, and a run that ends normally has
uploaded everything.
"""

import atexit
import contextlib
import hashlib
import json
import os
import re
import shutil
import socket
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tba_jax.config.command_line import local_folder
from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.run.errors import UserError, WorkdirLost
from tba_jax.storage.bucket import Bucket, StorageError, is_address
from tba_jax.storage.mirror import Mirror

FOLDER = "lock"
_ENTRY = re.compile(rf"{FOLDER}/(\d+)\.json")
BEAT_S = 5.0
EXPIRE_S = 30.0
PERIOD_S = 5.0


class LockFolder:
    """The folder WORKDIR/lock, with the methods of a `Bucket` that a lock needs.

    Args:
        workdir: work directory; created with the first file.
    """

    def __init__(self, workdir: Path) -> None:
        self._workdir = workdir

    def __str__(self) -> str:
        return str(self._workdir)

    def names(self, prefix: str) -> list[str]:
        """Return the names of the files; `prefix` is "lock/"."""
        with contextlib.suppress(FileNotFoundError):
            return [f"{prefix}{name}" for name in os.listdir(self._workdir / prefix)]
        return []

    def create(self, name: str, content: bytes) -> bool:
        """Create a file unless it exists; return whether this call created it."""
        path = self._workdir / name
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            with open(path, "xb") as file:
                file.write(content)
        except FileExistsError:
            return False
        return True

    def read(self, name: str) -> bytes | None:
        """Return the content; None without such a file."""
        try:
            return (self._workdir / name).read_bytes()
        except (FileNotFoundError, IsADirectoryError):
            return None

    def write(self, name: str, content: bytes) -> None:
        """Replace the file atomically."""
        path = self._workdir / name
        unfinished = path.with_suffix(".unfinished")
        unfinished.write_bytes(content)
        os.replace(unfinished, path)

    def remove(self, names: list[str]) -> None:
        """Delete the files, or the folders in their places."""
        for path in (self._workdir / name for name in names):
            if path.is_dir():
                path.rmdir()
            else:
                path.unlink(missing_ok=True)


class Hold:
    """Lease of a work directory; a context manager that releases it.

    Args:
        beat_s: seconds between two heartbeats.
        expire_s: heartbeat timeout of a holder on another machine.

    Attributes:
        number: fencing number.
        taken_over: line about a previous holder whose heartbeat stopped; "": there was none.
        mirroring: upload to the object store, which starts with the run and which `check` also
            checks; None: the work directory is a local folder.

    Raises:
        UserError: another process holds the directory.
    """

    def __init__(
        self,
        store: LockFolder | Bucket,
        *,
        beat_s: float = BEAT_S,
        expire_s: float = EXPIRE_S,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._store = store
        self._beat_s, self._expire_s = beat_s, expire_s
        self._clock, self._sleep = clock, sleep
        self._entry: dict[str, Any] = {**_here(), "beat": 0, "released": False}
        self._stop = StopFlag()
        self.number, self.taken_over = self._acquire()
        self._beat_at = clock()
        self.mirroring: Mirroring | None = None
        self._worker = Worker("workdir-lock", self._beat, self._stop, idle_s=beat_s)
        self._worker.start()

    def __enter__(self) -> "Hold":
        return self

    def __exit__(self, *args: object) -> None:
        self.release()

    def begin(self) -> None:
        """Start the upload `mirroring`; called when the run has been built."""
        if self.mirroring is not None:
            self.mirroring.start()

    def check(self) -> None:
        """Raise a failure of the heartbeat or of the upload, without any I/O.

        Raises:
            WorkdirLost: the directory was removed, or another process has taken it over.
        """
        if self.mirroring is not None:
            self.mirroring.check()
        try:
            self._stop.check()
        except WorkerError as error:
            cause = error.__cause__
            raise cause if isinstance(cause, WorkdirLost) else error from None

    def confirm(self) -> None:
        """Check the lease on disk, before a write that must not come from two processes."""
        self.check()
        numbers = self._numbers()
        if numbers and max(numbers) > self.number:
            other = self._read(max(numbers)) or {}
            raise WorkdirLost(
                f"process {other.get('pid', '?')} on {other.get('host', '?')} has taken over "
                f"{self._store}: this process sent no heartbeat for {self._expire_s:.0f} s "
                "(was it suspended?)"
            )
        if self.number not in numbers:
            raise WorkdirLost(
                f"the work directory {self._store} was deleted or moved during the run"
            )

    def release(self) -> None:
        """Release the directory; the next holder gets the next number."""
        self._stop.set()
        self._worker.join(self._expire_s)
        # If the directory was removed, `check` has reported that, and there is nothing to release.
        with contextlib.suppress(OSError):
            if self.number in self._numbers():
                self._write(self.number, {**self._entry, "released": True})

    def _beat(self) -> bool:
        try:
            self.confirm()
            self._entry["beat"] += 1
            self._write(self.number, self._entry)
            self._beat_at = self._clock()
        except OSError as error:  # temporary errors are ignored while the lease is valid
            if self._clock() - self._beat_at > self._expire_s:
                raise WorkdirLost(
                    f"no heartbeat could be written to {self._store} for {self._expire_s:.0f} s "
                    f"({error}); another process may take it over. Repair the storage, then run "
                    "the same command again"
                ) from error
        return False  # the worker sleeps until the next call

    def _acquire(self) -> tuple[int, str]:
        try:
            while True:
                newest = max(self._numbers(), default=0)
                line = self._wait_until_gone(newest) if newest else ""
                if self._create(newest + 1):
                    break
            old = [_name(number) for number in self._numbers() if number <= newest]
            self._store.remove(old)
        except OSError as error:
            raise UserError(
                f"cannot write to the work directory {self._store}: {error}. Repair its "
                "permissions, free space, or give another --workdir"
            ) from error
        return newest + 1, line

    def _wait_until_gone(self, number: int) -> str:
        """Wait until a holder has ended; return a line about it unless it released the lease.

        Raises:
            UserError: the holder is alive.
        """
        entry = self._read(number)
        if entry is None or entry.get("released"):
            return ""
        who = f"process {entry.get('pid')} on {entry.get('host')}"
        if entry.get("machine") == self._entry["machine"]:
            if _is_alive(entry):
                raise self._held(who)
            return ""  # the holder was killed on this machine, which needs no line
        start = self._clock()
        while self._clock() - start < self._expire_s:
            self._sleep(self._beat_s)
            now = self._read(number)
            if now is None or now.get("released"):
                return ""
            if now != entry:
                raise self._held(who)
        return (
            f"{who} held {self._store} and sent no heartbeat for {self._expire_s:.0f} s: this "
            "process has taken it over"
        )

    def _held(self, who: str) -> UserError:
        return UserError(
            f"{who} is working on {self._store}. Wait for it or stop it, or give another --workdir"
        )

    def _create(self, number: int) -> bool:
        """Create the entry of this process; return whether this call created it."""
        return self._store.create(_name(number), json.dumps(self._entry).encode())

    def _read(self, number: int) -> dict[str, Any] | None:
        """Return an entry; {} while it is being written, None if it does not exist."""
        content = self._store.read(_name(number))
        if content is None:
            return None
        try:
            entry = json.loads(content.decode(errors="replace"))
        except (ValueError, RecursionError):
            return {}
        return entry if isinstance(entry, dict) else {}

    def _write(self, number: int, entry: dict[str, Any]) -> None:
        self._store.write(_name(number), json.dumps(entry).encode())

    def _numbers(self) -> set[int]:
        """Return the numbers of the entries."""
        names = self._store.names(f"{FOLDER}/")
        return {int(match[1]) for name in names if (match := _ENTRY.fullmatch(name))}


def _name(number: int) -> str:
    return f"{FOLDER}/{number:08d}.json"


def _here() -> dict[str, Any]:
    """Describe this process; process IDs are comparable between entries with equal `machine`."""
    machine = ""
    with contextlib.suppress(OSError):  # without Linux, all processes count as on other machines
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        machine = f"{boot} {os.readlink('/proc/self/ns/pid')}"
    return {
        "host": socket.gethostname(),
        "machine": machine or f"{socket.gethostname()} {os.getpid()}",
        "pid": os.getpid(),
        "began": _began(os.getpid()),
    }


def _is_alive(entry: dict[str, Any]) -> bool:
    pid = entry.get("pid")  # a damaged entry may hold any value
    return isinstance(pid, int) and bool(entry.get("began")) and _began(pid) == entry["began"]


def _began(pid: int) -> str:
    """Return the start time of a process in clock ticks; "" without such a process."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return ""
    # Fields 3 and 22 of proc(5); a zombie process holds no lease.
    return "" if stat[0] in "ZX" else stat[19]


class Mirroring:
    """Worker thread that uploads new files of a run's local folder to the bucket.

    Args:
        patience_s: seconds after which errors of the store end the run.
        period_s: seconds between two uploads.
    """

    def __init__(
        self,
        mirror: Mirror,
        hold: Hold,
        *,
        patience_s: float,
        period_s: float = PERIOD_S,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._mirror, self._hold = mirror, hold
        self._patience_s, self._clock = patience_s, clock
        self._pushed_at = clock()
        self._stop = StopFlag()
        self._worker = Worker("mirror", self._step, self._stop, idle_s=period_s)
        self._begun = self._has_forgotten = False

    def start(self) -> None:
        """Start uploading, unless it has started."""
        if self._begun:
            return
        self._begun = True
        self._pushed_at = self._clock()
        self._worker.start()

    def check(self) -> None:
        """Raise a failure of the worker.

        Raises:
            StorageError: the store has failed for too long.
        """
        try:
            self._stop.check()
        except WorkerError as error:
            cause = error.__cause__
            raise cause if cause is not None else error from None

    def finish(self) -> None:
        """Upload the remaining files, and wait for the upload.

        Raises:
            StorageError: the store failed; the message names the local folder.
        """
        if not self._begun:
            return
        self._stop.set()
        self._worker.join(self._patience_s)
        self.check()
        while True:
            try:
                self._hold.confirm()
                self._mirror.push()
                return
            except OSError as error:
                self._give_up_late(error)
                time.sleep(1.0)

    def abandon(self) -> None:
        """Upload once more after the run failed."""
        if self._begun:
            self._stop.set()
            self._worker.join(30.0)
            self._patience_s = 0.0
            try:
                self.finish()
            except (StorageError, RuntimeError):  # the failure of the run is reported instead
                return

    def _step(self) -> bool:
        try:
            self._hold.confirm()
            self._mirror.push()
            if not self._has_forgotten:  # delete outdated objects after the upload
                self._mirror.forget()
                self._has_forgotten = True
            self._pushed_at = self._clock()
        except OSError as error:
            self._give_up_late(error)
        return False  # the worker sleeps until the next call

    def _give_up_late(self, error: OSError) -> None:
        if self._clock() - self._pushed_at > self._patience_s:
            raise StorageError(
                f"no upload to the store has succeeded for {self._patience_s:.0f} s "
                f"(config.checkpoint.timeout_s): {error}. The newer files are in "
                f"{self._mirror.folder}. Repair the store, then run the same command again to "
                "continue from the newest uploaded checkpoint"
            ) from error


def folder_of(address: str) -> Path:
    """Return the local folder of a run whose work directory is in a bucket."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    return cache / "tba_jax" / "buckets" / name


def run_folder(text: str | os.PathLike[str], what: str, note: Callable[[str], None]) -> Path:
    """Return a local work directory to read; for a bucket, a temporary copy.

    Args:
        what: name of the command-line argument.
        note: receives one line for each damaged object.

    Raises:
        UserError: the bucket cannot be read, or holds no run.
    """
    if not is_address(text):
        return local_folder(text, what)
    folder = Path(tempfile.mkdtemp(prefix="tba_jax-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    try:
        bucket = Bucket(str(text))
        if not bucket.names("config.json"):
            raise UserError(
                f"{what}={text} holds no run: there is no {bucket}/config.json. Give the "
                "--workdir of a run"
            )
        Mirror(bucket, folder).fetch(note, weights=True)
    except (OSError, StorageError) as error:
        raise UserError(f"{what}={text} cannot be read: {error}") from error
    return folder
