# SPDX-License-Identifier: Apache-2.0
"""The work directory of a run: its files, its config, and its state (new, begun or finished).

A run writes and deletes under a few names. If a file with such a name is not of a run of tba_jax,
the directory is refused before the first write. Other files are not touched. Imports no jax.
Invariants: a directory that holds a run is never used for another config. No file of another
program is changed, and no symbolic link is followed (tests/run/test_ownership.py,
tests/chaos/test_foreign_files.py).
"""

import contextlib
import json
import os
import re
import stat
import uuid
import zipfile
import zlib
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_jax.config import schema as config_lib
from tba_jax.config.command_line import versions
from tba_jax.config.schema import Config
from tba_jax.run.errors import UserError
from tba_jax.run.host_state import CHECKPOINT_ENTRIES, ITEMS_FILE, Facts, read_facts
from tba_jax.storage import digests, sealed

if TYPE_CHECKING:
    from tba_jax.devices.cluster import Cluster
    from tba_jax.run.lock import Hold


_LOGS = ("metrics.jsonl", "samples.jsonl")
_FILES = (*_LOGS, "versions.json", "report.json", "report.html", "prompts.json")
# Folders that a run fills, and those of TensorBoard and W&B.
_OWN_FOLDERS = ("checkpoints", "weights", "adapters", "plots", "lock", "damaged_checkpoints")
_FOLDERS = (*_OWN_FOLDERS, "tensorboard", "wandb")
_CONFIG = "config.json"
_SCHEDULE = re.compile(r"schedule(\.\d+)?\.jsonl")
# Files that exist before config.json.
_BEFORE = {"lock": re.compile(r"\d{8}\.(json|unfinished)")}
# Suffixes that a killed process leaves when it replaces a file.
_REMAINDERS = (".unfinished", ".new", ".kept")
# First bytes of the files that a run writes. The reader of a file reports later damage.
_BEGINNINGS = {
    **dict.fromkeys(_LOGS, b'{"'),
    "versions.json": b"{\n",
    "report.json": b"{\n",
    "prompts.json": b"{\n",
}
_PAGE_BEGINNING = (
    b'<!DOCTYPE html>\n<html lang="en"><head><meta charset="utf-8">'
    b'<meta http-equiv="Content-Security-Policy"'
)
_ADVICE = "Give a new --workdir, or move them away"


# Orbax lists a checkpoint's files by a pattern that begins with its path.
_WILD = frozenset("*?[]")
_SHOWN = 8  # maximum number of differences between two configs in a message


class Contents(NamedTuple):
    """Contents of a work directory that a run has written.

    Attributes:
        run_id: ID of the run in the directory; "" without a run.
        config: flat config of the run; {} without a run, or if config.json is lost and no
            checkpoint holds the config.
        lost_config: whether config.json is lost, so that the run ID is that of the newest
            checkpoint.
    """

    run_id: str = ""
    config: dict[str, object] = {}
    lost_config: bool = False


def inspect(workdir: Path) -> Contents:
    """Return the contents of a work directory; only reads.

    Raises:
        UserError: a name that a run writes is a symbolic link, of another kind, or not of a run
            of tba_jax; a checkpoint is of another run, or its folder was renamed.
    """
    found = _names(workdir)
    for name in sorted(found):
        _check_kind(workdir / name)
    if _CONFIG in found:
        run_id, config = _run_of(workdir / _CONFIG)
        _check_checkpoints(workdir / "checkpoints", run_id)
        return Contents(run_id, config)
    # An empty folder belongs to no program.
    rest = sorted(
        name for name in found if not _is_empty(workdir / name) and not _is_before(workdir / name)
    )
    if not rest:
        return Contents()
    facts = _newest_facts(workdir / "checkpoints")
    if facts is None or not facts.run_id:
        names = ", ".join(rest)
        raise UserError(
            f"{workdir} holds {names}, and no {_CONFIG} of a run of tba_jax that could have "
            f"written {'it' if len(rest) == 1 else 'them'}. {_ADVICE}"
        )
    _check_checkpoints(workdir / "checkpoints", facts.run_id)
    return Contents(facts.run_id, dict(facts.config), lost_config=True)


def check_bucket(address: object, names: Collection[str], config: bytes | None) -> None:
    """Refuse an object store in which a run would replace or delete objects of another program.

    A checkpoint of a run without config.json is accepted here; `inspect` checks its local copy.

    Args:
        names: names of all objects.
        config: content of config.json; None without that file.

    Raises:
        UserError: the store has a name that a run writes, but no config.json of a run.
    """
    with contextlib.suppress(ValueError, KeyError):
        if config is not None and isinstance(sealed.unseal(config)["config"], dict):
            return
    if config is None and any(re.match(r"checkpoints/\d+/host_state/", name) for name in names):
        return
    first = {name.partition("/")[0] for name in names}
    found = sorted(n for n in first if n == "logs" or (n != "lock" and _is_written(n)))
    if found:
        raise UserError(
            f"{address} has {found[0]}, which a run writes, and no {_CONFIG} of a run of tba_jax. "
            "Give a new --workdir"
        )


def check_for_report(workdir: Path) -> None:
    """Refuse to write a report over files that no run of tba_jax wrote.

    Raises:
        UserError: as in `inspect`; or neither config.json nor report.json is of a run.
    """
    for name in sorted(_names(workdir)):
        _check_kind(workdir / name)
    for name in (_CONFIG, "report.json"):
        if (workdir / name).exists():
            try:
                sealed.read(workdir / name)
            except ValueError:
                continue  # `load_run` names the damage
            return
    if not any((workdir / name).exists() for name in (_CONFIG, "report.json")):
        raise UserError(
            f"{workdir} has neither {_CONFIG} nor report.json, wanted the work directory of a run. "
            "Give the directory that was named by --workdir"
        )


def _names(workdir: Path) -> set[str]:
    """Return the names of existing files and folders that a run may write."""
    try:
        present = {entry.name for entry in workdir.iterdir()}
    except FileNotFoundError:
        return set()
    except OSError as error:
        raise UserError(
            f"the work directory {workdir} cannot be read ({error.strerror}). Give another "
            "--workdir"
        ) from error
    return {name for name in present if _is_written(name)}


def _is_written(name: str) -> bool:
    """Return whether a run writes a file or folder of that name into its work directory."""
    name = next((name.removesuffix(e) for e in _REMAINDERS if name.endswith(e)), name)
    return name in (*_FILES, *_FOLDERS, _CONFIG) or _SCHEDULE.fullmatch(name) is not None


def _check_kind(path: Path) -> None:
    """Refuse a symbolic link, and a file or folder where a run writes the other kind."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        raise UserError(
            f"{path} is a symbolic link, and a run writes and deletes under that name. Remove the "
            "link, or give a --workdir on the disk that it points to"
        )
    is_folder = path.name in _FOLDERS
    if not (stat.S_ISDIR(mode) if is_folder else stat.S_ISREG(mode)):
        wanted = "a folder" if is_folder else "a regular file"
        raise UserError(
            f"{path} is not {wanted}, and a run writes {wanted} under that name. {_ADVICE}"
        )
    if not is_folder:
        _check_beginning(path)
    elif path.name in ("lock", "plots"):
        for entry in path.iterdir():
            if entry.is_symlink():
                raise UserError(
                    f"{entry} is a symbolic link, and a run writes and deletes files in {path}. "
                    "Remove the link"
                )


def _check_beginning(path: Path) -> None:
    """Refuse a file whose first bytes differ from those that a run writes."""
    wanted = _PAGE_BEGINNING if path.name == "report.html" else _BEGINNINGS.get(path.name, b"")
    if _SCHEDULE.fullmatch(path.name):
        wanted = _BEGINNINGS["metrics.jsonl"]
    try:
        with open(path, "rb") as file:
            found = file.read(len(wanted))
    except OSError as error:
        raise UserError(f"{path} cannot be read ({error.strerror}). {_ADVICE}") from error
    if found and not wanted.startswith(found):
        raise UserError(f"{path} begins with {found[:20]!r}: no run of tba_jax wrote it. {_ADVICE}")


def _run_of(path: Path) -> tuple[str, dict[str, object]]:
    """Return (run ID, flat config) of a config.json.

    Raises:
        UserError: the file is damaged, or not of a run.
    """
    try:
        facts = sealed.read(path)
        config, run_id = facts["config"], facts["run_id"]
        if not isinstance(config, dict) or not isinstance(run_id, str):
            raise TypeError("`config` must be an object and `run_id` a text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path} is not readable as the config of a run of tba_jax ({why}). Restore the "
            "file, or give another --workdir"
        ) from error
    return run_id, config


def _is_empty(path: Path) -> bool:
    return not any(path.iterdir()) if path.is_dir() else path.stat().st_size == 0


def _is_before(path: Path) -> bool:
    """Return whether a folder holds only files that a run writes before config.json."""
    wanted = _BEFORE.get(path.name)
    return wanted is not None and all(wanted.fullmatch(entry.name) for entry in path.iterdir())


def _steps(folder: Path) -> list[Path]:
    """Return the step folders of a checkpoint folder, newest first."""
    if not folder.is_dir():
        return []
    return sorted((e for e in folder.iterdir() if e.name.isdigit()), key=lambda e: -int(e.name))


def _newest_facts(folder: Path) -> Facts | None:
    for path in _steps(folder):
        facts = _facts_of(path)
        if facts is not None:
            return facts
    return None


def _facts_of(path: Path) -> Facts | None:
    """Return the facts of a checkpoint; None where they are missing or damaged."""
    for file in sorted((path / "host_state").glob("process_*.npz")):
        try:
            return read_facts(file)
        except (OSError, ValueError, KeyError, TypeError, EOFError, zipfile.BadZipFile):
            continue
        except (RuntimeError, zlib.error):
            # zipfile fails on damaged headers. A resume reports a file of another format.
            continue
    return None


def _check_checkpoints(folder: Path, run_id: str) -> None:
    """Refuse step folders that are not checkpoints of this run, or were renamed."""
    has_newer = False  # whether an earlier folder in this order is a checkpoint
    for path in _steps(folder):
        if path.is_symlink():
            raise UserError(
                f"{path} is a symbolic link, and a run deletes its old checkpoints. Remove the "
                "link, or move the checkpoint itself there"
            )
        if not path.is_dir() or not (
            (path / digests.NAME).exists()
            or (path / "host_state").exists()
            or (has_newer and _is_half_deleted(path))
        ):
            raise UserError(
                f"{path} is not a checkpoint of tba_jax, and a run deletes its old checkpoints "
                "there. Move it away"
            )
        facts = _facts_of(path)
        if facts is None:
            continue  # a resume moves the damaged checkpoint
        if run_id and facts.run_id and facts.run_id != run_id:
            raise UserError(
                f"{path} is a checkpoint of run {facts.run_id}, and the work directory is of run "
                f"{run_id}. Move it away, or restore the config.json of its run"
            )
        if facts.step >= 0 and facts.step != int(path.name):
            raise UserError(
                f"{path} holds step {facts.step}: the folder was renamed. Name it "
                f"{path.parent / str(facts.step)} again"
            )
        has_newer |= facts.run_id == run_id


def _is_half_deleted(path: Path) -> bool:
    """Return whether a folder may be a checkpoint whose deletion was interrupted."""
    entries = list(path.iterdir())
    if any(entry.is_symlink() or entry.name not in CHECKPOINT_ENTRIES for entry in entries):
        return False
    items = path / ITEMS_FILE
    return not items.is_file() or b'"tba_jax.' in items.read_bytes()


class Outcome(NamedTuple):
    """Outcome of a call that trains.

    Attributes:
        step: number of optimiser steps so far.
        is_finished: whether all steps are done and the final policy is evaluated.
        was_finished: whether the run was finished before the call.
        report: contents of report.json; {} in processes other than 0.
    """

    step: int
    is_finished: bool
    was_finished: bool
    report: dict[str, Any]


def default_workdir(config: Config) -> str:
    """Return the default work directory of a config: runs/NAME-seedN."""
    return os.path.join("runs", f"{config.name.replace('/', '-')}-seed{config.seed}")


def holds_run(workdir: Path, config: Config) -> bool:
    """Return whether the directory holds a run with this config; only reads.

    Raises:
        UserError: the directory holds a run with another config (the message has the differences)
            or files of another program (see `inspect`), or it cannot be a work directory.
    """
    wild = sorted(set(str(workdir.absolute())) & _WILD)
    if wild:
        raise UserError(
            f"the path of the work directory {workdir} contains {' and '.join(wild)}, which "
            "storage reads as a pattern, so that no checkpoint could be restored. Give another "
            "--workdir"
        )
    found = inspect(workdir)
    # The config of a start that left no files may be corrected in place.
    if not (found.run_id and _is_begun(workdir)):
        return False
    old = found.config or config_lib.flatten(config)
    lines = config_lib.difference(old, json.loads(json.dumps(config_lib.flatten(config))))
    if lines:
        raise UserError(
            f"{workdir} holds a run with another config: "
            + "; ".join(lines[:_SHOWN])
            + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
            + ". Give another --workdir, or the old values to resume"
        )
    return True


def saved_config(workdir: Path) -> dict[str, Any]:
    """Return the flat config of the run in a directory.

    Raises:
        UserError: config.json is missing or damaged.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run: there is no {path}; give a run's --workdir")
    return _run_of(path)[1]


def run_id_of(workdir: str | os.PathLike[str]) -> str:
    """Return the run ID in the config.json of a work directory; "" without one."""
    try:
        return str(sealed.read(Path(workdir) / "config.json").get("run_id", ""))
    except (OSError, ValueError):
        return ""  # parts of a run that were built without a claimed directory


def begun_config(workdir: Path) -> dict[str, Any]:
    """Return the config of the run that a directory holds, field by field; {} if it has none.

    Raises:
        UserError: the config is damaged.
    """
    path = workdir / "config.json"
    if not path.is_file():
        return {}
    saved = saved_config(workdir)
    return saved if _is_begun(workdir) else {}


def begin_run(workdir: Path, config: Config, run_id: str = "") -> None:
    """Write config.json of a new run.

    Args:
        run_id: ID of the run; "": a new ID.

    Raises:
        UserError: the directory cannot be written to.
    """
    path = workdir / "config.json"
    facts = {
        "config": config_lib.flatten(config),
        "chosen": dict(config.chosen),
        "versions": versions(),
        "run_id": run_id or uuid.uuid4().hex[:16],
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        sealed.write(path, facts)
    except OSError as error:
        raise UserError(f"cannot write to the work directory {workdir}: {error}") from error


def begin_or_continue(workdir: Path, config: Config) -> bool:
    """Begin a run unless the directory holds one; return whether it does.

    A lost config.json is written again with the run ID from the newest checkpoint.
    """
    if not holds_run(workdir, config):
        begin_run(workdir, config)
        return False
    found = inspect(workdir)
    if found.lost_config:
        begin_run(workdir, config, found.run_id)
    return True


def _is_begun(workdir: Path) -> bool:
    """Return whether a run has left logs or checkpoints in the directory."""
    metrics = workdir / "metrics.jsonl"
    has_file = any(
        path.exists() and path.stat().st_size > 0 for path in (metrics, workdir / "report.json")
    )
    return has_file or any(any((workdir / name).glob("*")) for name in ("checkpoints", "weights"))


def is_finished(workdir: Path, num_steps: int) -> bool:
    """Return whether the run made its last step, evaluated it and wrote the report."""
    path = workdir / "report.json"
    if not path.is_file() or not (workdir / "report.html").is_file():
        return False
    try:
        after = sealed.read(path)["eval"]["after"]
        return after is not None and after["step"] == num_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False  # a damaged report is written again from the checkpoint


def command_of(config: Config, workdir: Path) -> dict[str, Any]:
    """Return the fields that must be equal in all processes, as JSON values."""
    flat = json.loads(json.dumps(config_lib.flatten(config)))
    return {**flat, "workdir": str(workdir), "version": versions()}


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """Return a clause for each difference between the commands of process 0 and this process."""
    return [
        f"{field}: {theirs.get(field)!r} there, {mine[field]!r} here"
        for field in sorted(mine)
        if theirs.get(field) != mine[field]
    ]


def claim_together(
    cluster: "Cluster",
    config: Config,
    workdir: Path,
    held: contextlib.ExitStack,
    owner: int = 0,
) -> "tuple[bool, Hold | None]":
    """Check that every process has the same command; the owner claims the directory for all.

    Args:
        cluster: the processes; all of them call this function.

    Returns:
        (whether the run is finished, lease of the directory). Only the owner of an unfinished run
        gets a lease.

    Raises:
        UserError: configs differ, or the directory is refused; raised in all processes.
    """
    mine = command_of(config, workdir)
    lines = differences(cluster.broadcast_json(mine), mine)
    for host, wrong in enumerate(cluster.gather_json(lines)):
        if wrong:
            raise UserError(
                f"process {host} was started with another command than process 0: "
                f"{'; '.join(wrong)}. Start the same command on every host"
            )
    answer: dict[str, Any] = {}
    hold = None
    if cluster.number == owner:
        try:
            hold = claim(workdir, config)
            if hold is not None:
                held.enter_context(hold)
            answer = {"finished": hold is None}
        except UserError as error:
            answer = {"refused": str(error)}
    (answer,) = [found for found in cluster.gather_json(answer) if found]
    if "refused" in answer:
        raise UserError(answer["refused"])
    if not workdir.is_dir():
        raise UserError(
            f"process {cluster.number} does not see the work directory {workdir} that process "
            f"{owner} made: a pod needs a directory that all hosts share"
        )
    return answer["finished"], hold


def claim(workdir: Path, config: Config) -> "Hold | None":
    """Hold the work directory and begin its run, unless it holds one.

    Returns:
        The lease of the directory; None if its run is finished.

    Raises:
        UserError: another process holds the directory, or it holds another run or is not
            writable.
    """
    from tba_jax.run.lock import Hold, LockFolder

    if holds_run(workdir, config) and is_finished(workdir, config.num_steps):
        return None
    hold = Hold(LockFolder(workdir))
    try:
        begin_or_continue(workdir, config)  # no other process can begin a run now
    except BaseException:
        hold.release()
        raise
    return hold


def finished_before(config: Config, workdir: Path) -> Outcome:
    """Return the outcome of a run that was already finished."""
    report = sealed.read(workdir / "report.json")
    return Outcome(config.num_steps, is_finished=True, was_finished=True, report=report)
