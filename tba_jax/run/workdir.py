# SPDX-License-Identifier: Apache-2.0
"""The work directory of a run: its config, and its state (new, begun or finished).

config.json decides what a directory is: without that file, a directory that is not empty is
refused. A run writes and deletes only the names that it made. Imports no jax.
Invariant: a directory that holds a run is never used for another config
(tests/run/test_workdir.py).
"""

import contextlib
import json
import os
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from tba_jax.config import schema as config_lib
from tba_jax.config.command_line import versions
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster, PeerError
from tba_jax.run.errors import UserError
from tba_jax.run.lock import HEARTBEAT, LOCK, Hold
from tba_jax.storage.whole_files import UNFINISHED, read_json, write_json

CONFIG = "config.json"
ADDRESS = "address"
"""Name of the local file that holds the address of a work directory in an object store."""
# Names that exist before config.json.
_BEFORE = {LOCK, HEARTBEAT, ADDRESS, HEARTBEAT + UNFINISHED, CONFIG + UNFINISHED}
# Orbax lists a checkpoint's files by a pattern that begins with its path.
_WILD = frozenset("*?[]")
_SHOWN = 8  # maximum number of differences between two configs in a message


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


def refuse_foreign(folder: Path | epath.Path) -> None:
    """Refuse a folder that is not empty and has no config.json.

    Raises:
        UserError: the folder has other files.
    """
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
        UserError: the directory holds files but no config.json, or a run with another config (the
            message has the differences), or it cannot be a work directory.
    """
    if wild := sorted(set(str(workdir.absolute())) & _WILD):
        raise UserError(
            f"the path of the work directory {workdir} contains {' and '.join(wild)}, which "
            "storage reads as a pattern, so that no checkpoint could be restored. Give another "
            "--workdir"
        )
    try:
        refuse_foreign(workdir)
    except OSError as error:
        raise UserError(
            f"the work directory {workdir} cannot be read ({error.strerror}). Give another "
            "--workdir"
        ) from error
    # The config of a start that left no files may be corrected in place.
    if not (old := begun_config(workdir)):
        return False
    if lines := config_lib.difference(old, _as_json(config)):
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise UserError(
            f"{workdir} holds a run with another config: {'; '.join(lines[:_SHOWN])}{more}. Give "
            "another --workdir, or the old values to resume"
        )
    return True


def _as_json(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps(config_lib.flatten(config)))


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


def run_id_of(workdir: str | os.PathLike[str]) -> str:
    """Return the run ID in the config.json of a work directory; "" without one."""
    try:
        return str(read_json(Path(workdir) / CONFIG).get("run_id", ""))
    except (OSError, ValueError):
        return ""  # parts of a run that were built without a claimed directory


def begun_config(workdir: Path) -> dict[str, Any]:
    """Return the flat config of a run that has left logs or checkpoints in a directory, else {}.

    Raises:
        UserError: the config is damaged.
    """
    if not (workdir / CONFIG).is_file():
        return {}
    saved = saved_config(workdir)
    logs = (workdir / "metrics.jsonl", workdir / "report.json")
    folders = (workdir / "checkpoints", workdir / "weights")
    has_logs = any(path.is_file() and path.stat().st_size > 0 for path in logs)
    return saved if has_logs or any(any(folder.glob("*")) for folder in folders) else {}


def begin_run(workdir: Path, config: Config) -> None:
    """Write config.json of a new run.

    Raises:
        UserError: the directory cannot be written to.
    """
    facts = {
        "config": config_lib.flatten(config),
        "chosen": dict(config.chosen),
        "versions": versions(),
        "run_id": uuid.uuid4().hex[:16],
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / CONFIG, facts)
    except OSError as error:
        raise UserError(f"cannot write to the work directory {workdir}: {error}") from error


def is_finished(workdir: Path, num_steps: int) -> bool:
    """Return whether the run made its last step, evaluated it and wrote the report."""
    try:
        after = read_json(workdir / "report.json")["eval"]["after"]
        return after["step"] == num_steps and (workdir / "report.html").is_file()
    except (OSError, ValueError, KeyError, TypeError):
        return False  # a damaged report is written again from the checkpoint


def finished_before(config: Config, workdir: Path) -> Outcome:
    """Return the outcome of a run that was already finished."""
    report = read_json(workdir / "report.json")
    return Outcome(config.num_steps, is_finished=True, was_finished=True, report=report)


def claim(workdir: Path, config: Config) -> Hold | None:
    """Lock the work directory and begin its run, unless it holds one.

    Returns:
        The lock of the directory; None if its run is finished.

    Raises:
        UserError: another process holds the directory, or it holds another run or is not
            writable.
    """
    if holds_run(workdir, config) and is_finished(workdir, config.num_steps):
        return None
    with contextlib.ExitStack() as undo:
        hold = undo.enter_context(Hold(workdir))
        if not holds_run(workdir, config):  # no other process can begin a run now
            begin_run(workdir, config)
        undo.pop_all()
    return hold


def claim_together(
    cluster: Cluster, config: Config, workdir: Path, held: contextlib.ExitStack, owner: int = 0
) -> tuple[bool, Hold | None]:
    """Check that every process has the same command; the owner claims the directory for all.

    Args:
        cluster: the processes; all of them call this function.

    Returns:
        (whether the run is finished, lock of the directory). Only the owner of an unfinished run
        gets a lock.

    Raises:
        UserError: configs differ, or the directory is refused; raised in all processes.
    """
    mine = {**_as_json(config), "workdir": str(workdir), "version": versions()}
    first, *others = cluster.gather_json(mine)
    hold, refusal = None, ""
    for number, other in enumerate(others, 1):
        if wrong := [name for name in first if first[name] != other.get(name)]:
            refusal = (
                f"process {number} was started with another command than process 0: "
                + "; ".join(f"{x}: {first[x]!r} -> {other.get(x)!r}" for x in wrong)
                + ". Start the same command on every host"
            )
    if cluster.number == owner and not refusal:
        try:
            if hold := claim(workdir, config):
                held.enter_context(hold)
        except UserError as error:
            refusal = str(error)
    refusal, is_done = cluster.gather_json([refusal, hold is None])[owner]
    if refusal:
        with contextlib.suppress(PeerError):  # process 0 ends after the others have read this
            cluster.gather_json(None)
        raise UserError(refusal)
    if not workdir.is_dir():
        raise UserError(
            f"process {cluster.number} does not see the work directory {workdir} that process "
            f"{owner} made: a pod needs a directory that all hosts share"
        )
    return is_done, hold
