# SPDX-License-Identifier: Apache-2.0
"""Runs whose work directory is at gs://BUCKET/FOLDER: the local folder, its upload, its readers."""

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from tba_jax.config.command_line import local_folder
from tba_jax.devices.worker import Worker
from tba_jax.run.errors import UserError
from tba_jax.run.lock import HEARTBEAT, Hold
from tba_jax.storage.mirror import Mirror, StorageError, is_address

_PERIOD_S = 5.0  # seconds between two uploads
_PATIENCE_S = 600.0  # seconds after which errors of the store end the run


@contextlib.contextmanager
def fetched(address: str) -> Iterator[tuple[Mirror, Hold]]:
    """Lock a work directory in an object store, and copy it to its local folder.

    Raises:
        StorageError: the store cannot be used.
        UserError: another process holds the directory, or it has files and no config.json.
    """
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    name = hashlib.sha256(address.rstrip("/").encode()).hexdigest()[:16]
    folder = cache / "tba_jax" / "buckets" / name
    mirror = Mirror(address, folder / "run")
    with _reading(address):
        names = [name for name in mirror.names() if name != HEARTBEAT]
    if names and "config.json" not in names:
        raise UserError(
            f"{address} has {names[0]} and no config.json: it is not empty, and not the work "
            "directory of a run. Give a new --workdir"
        )
    with Hold(folder, epath.Path(address)) as hold:
        with _reading(address):
            mirror.fetch()
        yield mirror, hold


@contextlib.contextmanager
def _reading(address: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # each store has its own exception classes
        raise StorageError(
            f"{address} cannot be read: {type(error).__name__}: {error}. Check the address, the "
            "credentials and the network, then run the same command again"
        ) from error


@contextlib.contextmanager
def uploading(mirror: Mirror, hold: Hold) -> Iterator[None]:
    """Upload new files of a run on a worker thread, and the rest at the end.

    `hold.check` raises a failure of the thread.

    Raises:
        StorageError: no upload has succeeded for `_PATIENCE_S`; the message names the local folder.
    """
    lock, pushed_at = threading.Lock(), time.monotonic()

    def push() -> bool:
        """Return whether the upload succeeded."""
        nonlocal pushed_at
        try:
            with lock:
                mirror.push()
        except Exception as error:  # each store has its own exception classes
            if time.monotonic() - pushed_at > _PATIENCE_S:
                raise StorageError(
                    f"no upload to {mirror.address} has succeeded for {_PATIENCE_S:.0f} s: "
                    f"{error}. The newer files are in {mirror.folder}. Repair the store, then run "
                    "the same command again to continue from the newest uploaded checkpoint"
                ) from error
            return False
        pushed_at = time.monotonic()
        return True

    def step() -> bool:
        push()
        return False  # the worker sleeps until the next call

    Worker("upload", step, hold.stop, idle_s=_PERIOD_S).start()
    try:
        yield
    except BaseException:
        with contextlib.suppress(StorageError):  # the failure of the run is reported instead
            push()
        raise
    hold.check()
    while not push():
        time.sleep(1.0)


def run_folder(text: str | os.PathLike[str], what: str) -> Path:
    """Return a local work directory to read; for an object store, a temporary copy.

    Args:
        what: name of the command-line argument.

    Raises:
        StorageError: the store cannot be read.
        UserError: the store holds no run.
    """
    if not is_address(text):
        return local_folder(text, what)
    folder = Path(tempfile.mkdtemp(prefix="tba_jax-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    mirror = Mirror(str(text), folder)
    with _reading(str(text)):
        mirror.fetch(weights=True)
    if not (folder / "config.json").is_file():
        raise UserError(
            f"{what}={text} holds no run: there is no config.json. Give the --workdir of a run"
        )
    return folder
