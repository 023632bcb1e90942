# SPDX-License-Identifier: Apache-2.0
"""Work directories at gs://BUCKET/FOLDER, through etils.epath and Orbax.

Orbax writes checkpoints and published weights to the address. A local folder has the small files of
the run (logs, which objects cannot append to, config and report), and the address in the file
`address`. Invariant: the small files are uploaded before a checkpoint becomes complete, so the
store has the log lines of its steps (tests/run/test_object_store.py).
"""

import atexit
import contextlib
import hashlib
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path

from etils import epath

from tba_jax.config.command_line import local_folder
from tba_jax.devices.worker import StopFlag
from tba_jax.run.errors import UserError
from tba_jax.run.workdir import ADDRESS, CONFIG, has_left_files, hold, refuse_foreign
from tba_jax.storage.whole_files import is_address

_SMALL = (CONFIG, "*.jsonl", "report.json", "report.html", "trace.json", "plots/*")


def storage_of(workdir: str | os.PathLike[str]) -> epath.Path:
    """Return the folder of checkpoints and weights of a run: an address, or its work directory."""
    path = Path(workdir) / ADDRESS
    return epath.Path(path.read_text() if path.is_file() else workdir)


@contextlib.contextmanager
def opened(address: str) -> Iterator[tuple[Path, StopFlag]]:
    """Lock a work directory in an object store; yield a local folder, and the flag of the lock.

    Raises:
        UserError: the store or the directory cannot be used, or another process holds it.
    """
    root = _root(address)
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    local = cache / "tba_jax" / "buckets" / hashlib.sha256(str(root).encode()).hexdigest()[:16]
    with _reading(root):
        refuse_foreign(root)
    with hold(local, root) as flag:
        shutil.rmtree(local / "run", ignore_errors=True)
        _fetch(root, local / "run")
        try:
            yield local / "run", flag
        except BaseException:
            if has_left_files(local / "run"):  # a failed start may be repeated with another config
                with contextlib.suppress(Exception):  # the failure of the run is reported instead
                    upload(local / "run")
            raise
        upload(local / "run")


def upload(workdir: Path) -> None:
    """Upload the small files of a run, unless its work directory is local."""
    root = storage_of(workdir)
    for path in _files(epath.Path(workdir)) if is_address(root) else ():
        path.copy(root / path.relative_to(workdir), overwrite=True)


def run_folder(text: str | os.PathLike[str], what: str) -> Path:
    """Return a local work directory to read; for an object store, a temporary copy of small files.

    Raises:
        UserError: the store cannot be read, or holds no run; `what` names the argument.
    """
    if not is_address(text):
        return local_folder(text, what)
    folder = Path(tempfile.mkdtemp(prefix="tba_jax-run-"))
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    _fetch(_root(str(text)), folder)
    if not (folder / CONFIG).is_file():
        raise UserError(
            f"{what}={text} holds no run: there is no {CONFIG}. Give the --workdir of a run"
        )
    return folder


def _root(address: str) -> epath.Path:
    kind, _, path = address.partition("://")
    if kind != "gs" or not path.strip("/").partition("/")[2]:
        raise UserError(
            f"{address!r} is not an address of a work directory. Give gs://BUCKET/FOLDER, or a "
            "folder of this machine"
        )
    return epath.Path(address.rstrip("/"))


def _fetch(root: epath.Path, folder: Path) -> None:
    """Copy the small files of a run into a local folder."""
    folder.mkdir(parents=True, exist_ok=True)
    with _reading(root):
        for path in _files(root):
            to = epath.Path(folder) / path.relative_to(root)
            to.parent.mkdir(exist_ok=True)
            path.copy(to, overwrite=True)
    (folder / ADDRESS).write_text(str(root))


def _files(folder: epath.Path) -> list[epath.Path]:
    """Return the small files in a work directory."""
    return [path for pattern in _SMALL for path in sorted(folder.glob(pattern))]


@contextlib.contextmanager
def _reading(root: epath.Path) -> Iterator[None]:
    try:
        yield
    except UserError:
        raise
    except ImportError as error:
        raise UserError(f"{root}: {error}. Install it with: pip install 'tba_jax[gcs]'") from error
    except Exception as error:  # each store has its own exception classes
        raise UserError(
            f"{root} cannot be read: {type(error).__name__}: {error}. Check the address, the "
            "credentials and the network, then run the same command again"
        ) from error
