# SPDX-License-Identifier: Apache-2.0
"""A run whose work directory is in an object store: held there, worked on here, brought there.

Orbax writes to folders and to Google's store, not to others, and logs are appended to, which no
store can; so the run has a folder of this machine, and a worker brings what is new. It does not
know what a work directory holds; `storage.mirror` does. Invariant: nothing is brought under a hold
that is lost, and a run that ends in order has all of it in the bucket.
"""

import atexit
import hashlib
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from tba_jax.config.command_line import local_folder
from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.run.errors import UserError
from tba_jax.run.lock import FOLDER, Hold
from tba_jax.storage.bucket import Bucket, StorageError, is_address
from tba_jax.storage.mirror import Mirror

PERIOD_S = 5.0


class BucketSlots:
    """Objects lock/NUMBER.json of a bucket; as `lock.Slots`."""

    def __init__(self, bucket: Bucket) -> None:
        self._bucket = bucket

    def __str__(self) -> str:
        return self._bucket.address

    def numbers(self) -> set[int]:
        """Of the objects there."""
        names = (name.removeprefix(f"{FOLDER}/") for name in self._bucket.names(f"{FOLDER}/"))
        stems = [name.removesuffix(".json") for name in names if name.endswith(".json")]
        return {int(stem) for stem in stems if stem.isdigit()}

    def create(self, number: int, text: str) -> bool:
        """Make an object that is not there."""
        return self._bucket.create(self._name(number), text.encode())

    def read(self, number: int) -> str | None:
        """Its content."""
        content = self._bucket.read(self._name(number))
        return None if content is None else content.decode(errors="replace")

    def write(self, number: int, text: str) -> None:
        """Replace the object."""
        self._bucket.write(self._name(number), text.encode())

    def remove(self, number: int) -> None:
        """Delete the object."""
        self._bucket.remove([self._name(number)])

    def _name(self, number: int) -> str:
        return f"{FOLDER}/{number:08d}.json"


class Mirroring:
    """Brings a run's folder to the bucket, again and again, on a thread of its own.

    Args:
        mirror: of the run.
        hold: of the bucket.
        patience_s: a store that refuses for longer ends the run.
        period_s: between two times.
        clock: seconds that only go on.
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
        """The folder is as the run goes on with it: from now on, what is in it is brought."""
        self._begun = True
        self._pushed_at = self._clock()
        self._worker.start()

    def check(self) -> None:
        """Raise what the worker found.

        Raises:
            StorageError: the store has refused for too long. WorkdirLost: as `Hold.confirm`.
        """
        try:
            self._stop.check()
        except WorkerError as error:
            cause = error.__cause__
            raise cause if cause is not None else error from None

    def finish(self) -> None:
        """Bring the rest; returns when it is there.

        Raises:
            StorageError: the store refuses; says where the rest is.
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
        """Bring what can be brought at once, for a run that failed."""
        if self._begun:
            self._stop.set()
            self._worker.join(30.0)
            self._patience_s = 0.0
            try:
                self.finish()
            except (StorageError, RuntimeError):  # that run has its failure
                return

    def _step(self) -> bool:
        try:
            self._hold.confirm()
            self._mirror.push()
            if not self._has_forgotten:  # of what was there before, once the rest is there
                self._mirror.forget()
                self._has_forgotten = True
            self._pushed_at = self._clock()
        except OSError as error:
            self._give_up_late(error)
        return False  # and sleeps until the next

    def _give_up_late(self, error: OSError) -> None:
        if self._clock() - self._pushed_at > self._patience_s:
            raise StorageError(
                f"the store has taken nothing for {self._patience_s:.0f} s "
                f"(config.checkpoint.timeout_s): {error}. What it lacks is in "
                f"{self._mirror.folder}; mend the store and run the same command again to continue "
                "from what it has"
            ) from error


def folder_of(address: str) -> Path:
    """The folder of this machine that a run in a bucket works in."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    return cache / "tba_jax" / "buckets" / name


def run_folder(text: str | os.PathLike[str], what: str, note: Callable[[str], None]) -> Path:
    """The work directory of a run to look at; of one in a bucket a copy, gone when this ends.

    Args:
        text: as given.
        what: the argument that it was given as.
        note: told what in the bucket is damaged.

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
            raise UserError(f"{bucket} holds no run: there is no {bucket}/config.json")
        Mirror(bucket, folder).fetch(note, weights=True)
    except (OSError, StorageError) as error:
        raise UserError(f"{what}={text} cannot be read: {error}") from error
    return folder
