# SPDX-License-Identifier: Apache-2.0
"""The work directory of a run: its lock, its config, and its state (new, begun or finished).

config.json decides what a directory is: without that file, a directory that is not empty is
refused. A start of this program that left neither logs nor checkpoints is no run yet, so the next
command may correct its config; its lock file distinguishes it from a config.json that a user put
there. A run writes and deletes only the names that it made. `filelock` excludes processes of the
same machine. A heartbeat file excludes other hosts, also on file systems without distributed locks:
the holder replaces it every few seconds, and another host takes over after it has seen no new
heartbeat for `EXPIRE_S` of its own monotonic clock. Imports no jax.

A work directory may be at gs://BUCKET/FOLDER, through etils.epath and Orbax, which writes
checkpoints and published weights there. A local folder has the small files of the run (logs, which
objects cannot append to, config and report), and the address in the file `address`.

Invariants: a directory that holds a run is never used for another config
(tests/run/test_workdir.py). The small files are uploaded before a checkpoint becomes complete, so
the store has the log lines of its steps (tests/run/test_object_store.py).
"""

import atexit
import contextlib
import hashlib
import json
import os
import shutil
import socket
import tempfile
import time
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import filelock
from etils import epath

from tba_jax.config import schema
from tba_jax.config.command_line import local_folder, versions
from tba_jax.config.schema import Config
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.run.errors import RunError, UserError
from tba_jax.storage.whole_files import UNFINISHED, is_address, read_json, write_json, write_whole

CONFIG, _LOCK, _HEARTBEAT = "config.json", "tba_jax-lock", "tba_jax-heartbeat"
ADDRESS = "address"  # local file with the address of a work directory in an object store
# Names that exist before config.json.
_BEFORE = {_LOCK, _HEARTBEAT, ADDRESS, _HEARTBEAT + UNFINISHED, CONFIG + UNFINISHED}
# Small files of a run, which a work directory in an object store has in a local folder.
_SMALL = (CONFIG, "*.jsonl", "report.json", "report.html", "trace.json", "plots/*")
BEAT_S = 5.0  # seconds between two heartbeats
EXPIRE_S = 30.0  # heartbeat timeout of a holder on another host


def refuse_foreign(folder: Path | epath.Path) -> None:
    """Raise a UserError if a folder is not empty and has no config.json."""
    if (folder / CONFIG).is_file() or not folder.exists():
        return
    if foreign := sorted({path.name for path in folder.iterdir()} - _BEFORE):
        raise UserError(
            f"{folder} holds {foreign[0]!r} and no {CONFIG}: it is not empty, and not the work "
            "directory of a run. Give a new --workdir"
        )


def holds_run(workdir: Path, config: Config) -> bool:
    """Return whether the directory holds a run with this config; only reads.

    Raises:
        UserError: it holds files but no config.json, or another run; or its path is unusable.
        OSError: it cannot be read.
    """
    if {*"*?[]"} & {*str(workdir.absolute())}:
        raise UserError(
            f"the path of the work directory {workdir} contains one of *?[], which Orbax reads as "
            "a pattern, so that no checkpoint could be restored. Give another --workdir"
        )
    refuse_foreign(workdir)
    if not (old := begun_config(workdir)):
        return False
    if lines := schema.difference(old, json.loads(json.dumps(schema.flatten(config)))):
        raise UserError(
            f"{workdir} holds a run with another config: {'; '.join(lines)}. Give another "
            "--workdir, or the old values to resume"
        )
    return True


def saved_config(workdir: Path) -> dict[str, Any]:
    """Return the flat config of the run in a directory.

    Raises:
        UserError: config.json is missing, damaged or of another program.
    """
    path = workdir / CONFIG
    if not path.is_file():
        raise UserError(f"{workdir} holds no run: there is no {path}. Give the --workdir of a run")
    try:
        facts = read_json(path)
        if not isinstance(facts.get("config"), dict) or not isinstance(facts.get("run_id"), str):
            raise ValueError("it has no object `config` or no text `run_id`")
    except (OSError, ValueError) as error:
        raise UserError(
            f"{path} is not readable as the config of a run of tba_jax ({error}). Restore the "
            "file, or give another --workdir"
        ) from error
    return facts["config"]


def code_version() -> str:
    """Return the version of this package and a digest of its code."""
    root = Path(__file__).parents[1]
    files = {str(p.relative_to(root)): p.read_text("utf-8") for p in sorted(root.rglob("*.py"))}
    digest = hashlib.sha256(json.dumps(files).encode()).hexdigest()
    return f"tba_jax {versions()['tba_jax']} {digest[:12]}"


def run_id_of(workdir: str | os.PathLike[str]) -> str:
    """Return the run ID in the config.json of a work directory; "" if it has none."""
    return str(read_json(Path(workdir) / CONFIG).get("run_id", ""))


def begun_config(workdir: Path) -> dict[str, Any]:
    """Return the flat config of the run in a directory; {} without one, or before its first logs.

    Raises:
        UserError: the config is damaged.
    """
    if not (workdir / CONFIG).is_file():
        return {}
    saved = saved_config(workdir)
    return {} if (workdir / _LOCK).exists() and not has_left_files(workdir) else saved


def has_left_files(workdir: Path) -> bool:
    """Return whether a run has left logs, checkpoints or weights in a local directory."""
    logs = (workdir / "metrics.jsonl", workdir / "report.json")
    has_logs = any(path.is_file() and path.stat().st_size > 0 for path in logs)
    return has_logs or any(any((workdir / x).glob("*")) for x in ("checkpoints", "weights"))


def begin_run(workdir: Path, config: Config) -> None:
    """Write config.json of a new run; raise OSError if the directory cannot be written."""
    facts = {"config": schema.flatten(config), "chosen": dict(config.chosen)}
    facts |= {"versions": versions(), "run_id": uuid.uuid4().hex[:16]}
    workdir.mkdir(parents=True, exist_ok=True)
    write_json(workdir / CONFIG, facts)


def finished_report(workdir: Path, num_steps: int) -> dict[str, Any] | None:
    """Return report.json of a run that made its last step and evaluated it; None before that."""
    try:
        report = read_json(workdir / "report.json")
        is_done = report["eval"]["after"]["step"] == num_steps
        return report if is_done and (workdir / "report.html").is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a damaged report is written again from the checkpoint


@contextlib.contextmanager
def hold(folder: Path, shared: epath.Path | None = None) -> Iterator[StopFlag]:
    """Lock a work directory; at the end, release it and delete the heartbeat file.

    Args:
        folder: work directory; created if it is missing.
        shared: folder of the heartbeat file, for example in an object store; None: `folder`.

    Yields:
        A flag, whose `check` raises an error if the directory was removed or its storage fails.

    Raises:
        UserError: another process holds the directory.
        OSError: the directory cannot be written.
    """
    where, stop, written_s = shared or epath.Path(folder), StopFlag(), time.monotonic()
    file, mine = where / _HEARTBEAT, f"process {os.getpid()} on {socket.gethostname()}\n"

    def beat() -> bool:
        nonlocal written_s
        try:
            write_whole(file, f"{mine}{time.time_ns()}".encode())
            written_s = time.monotonic()
        except OSError as error:  # ignored until other hosts may take over
            if time.monotonic() - written_s > EXPIRE_S:
                raise RunError(
                    f"no heartbeat could be written to {where} for {EXPIRE_S:.0f} s ({error}): the "
                    "work directory was deleted or moved, or its storage fails. Repair it, then "
                    "run the same command again"
                ) from error
        return False  # the worker sleeps until the next call

    folder.mkdir(parents=True, exist_ok=True)
    with contextlib.ExitStack() as held:
        try:
            held.enter_context(filelock.FileLock(folder / _LOCK, blocking=False))
            holder = _other_host(file)
        except filelock.Timeout:
            holder = _read(file) or "another process"
        if holder:
            raise UserError(
                f"{holder.splitlines()[0]:.99} is working on {where}. Wait for it or stop it, or "
                "give another --workdir"
            )
        write_whole(file, mine.encode())
        worker = Worker("workdir-lock", beat, stop, idle_s=BEAT_S).start()
        try:
            yield stop
        finally:
            stop.set()
            worker.join(EXPIRE_S)
            with contextlib.suppress(OSError):  # if the directory was removed, `check` reported it
                file.unlink(missing_ok=True)


def _other_host(file: epath.Path) -> str:
    """Wait for a new heartbeat of a holder on another host; return it, or "" without one."""
    entry, start_s = _read(file), time.monotonic()
    own = f" on {socket.gethostname()}\n"  # the lock excludes processes of this host
    while entry and own not in entry and time.monotonic() - start_s <= EXPIRE_S:
        time.sleep(BEAT_S)
        if (now := _read(file)) not in ("", entry):
            return now
        entry = now
    return ""


def _read(file: epath.Path) -> str:
    try:
        return file.read_bytes().decode(errors="replace").lstrip()
    except FileNotFoundError:
        return ""


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
