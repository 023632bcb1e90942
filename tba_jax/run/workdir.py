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
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_jax.config import schema as config_lib
from tba_jax.config.command_line import versions
from tba_jax.config.schema import Config
from tba_jax.run.errors import UserError
from tba_jax.run.lock import HEARTBEAT, LOCK, Hold
from tba_jax.run.object_store import ADDRESS
from tba_jax.storage.whole_files import UNFINISHED, read_json, write_json

if TYPE_CHECKING:
    from tba_jax.devices.cluster import Cluster

_CONFIG = "config.json"
# Names that exist before config.json.
_BEFORE = {LOCK, HEARTBEAT, ADDRESS, HEARTBEAT + UNFINISHED, _CONFIG + UNFINISHED}
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
    if not (workdir / _CONFIG).is_file():
        try:
            names = sorted(set(os.listdir(workdir)) - _BEFORE)
        except FileNotFoundError:
            return False
        except OSError as error:
            raise UserError(
                f"the work directory {workdir} cannot be read ({error.strerror}). Give another "
                "--workdir"
            ) from error
        if names:
            raise UserError(
                f"{workdir} holds {names[0]!r} and no {_CONFIG}: it is not empty, and not the work "
                "directory of a run. Give a new --workdir"
            )
        return False
    # The config of a start that left no files may be corrected in place.
    old = begun_config(workdir)
    if not old:
        return False
    if lines := config_lib.difference(old, _as_json(config)):
        raise UserError(
            f"{workdir} holds a run with another config: "
            + "; ".join(lines[:_SHOWN])
            + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else "")
            + ". Give another --workdir, or the old values to resume"
        )
    return True


def _as_json(config: Config) -> dict[str, Any]:
    return json.loads(json.dumps(config_lib.flatten(config)))


def saved_config(workdir: Path) -> dict[str, Any]:
    """Return the flat config of the run in a directory.

    Raises:
        UserError: config.json is missing or damaged.
    """
    path = workdir / _CONFIG
    if not path.is_file():
        raise UserError(f"{workdir} holds no run: there is no {path}; give a run's --workdir")
    try:
        facts = read_json(path)
        if not isinstance(facts["config"], dict) or not isinstance(facts["run_id"], str):
            raise TypeError("`config` must be an object and `run_id` a text")
    except (OSError, ValueError, KeyError, TypeError) as error:
        why = f"there is no {error}" if isinstance(error, KeyError) else str(error)
        raise UserError(
            f"{path} is not readable as the config of a run of tba_jax ({why}). Restore the "
            "file, or give another --workdir"
        ) from error
    return facts["config"]


def run_id_of(workdir: str | os.PathLike[str]) -> str:
    """Return the run ID in the config.json of a work directory; "" without one."""
    try:
        return str(read_json(Path(workdir) / _CONFIG).get("run_id", ""))
    except (OSError, ValueError):
        return ""  # parts of a run that were built without a claimed directory


def begun_config(workdir: Path) -> dict[str, Any]:
    """Return the flat config of a run that has left logs or checkpoints in a directory, else {}.

    Raises:
        UserError: the config is damaged.
    """
    if not (workdir / _CONFIG).is_file():
        return {}
    saved = saved_config(workdir)
    logs = (workdir / "metrics.jsonl", workdir / "report.json")
    has_log = any(path.exists() and path.stat().st_size > 0 for path in logs)
    folders = (workdir / "checkpoints", workdir / "weights")
    is_begun = has_log or any(any(folder.glob("*")) for folder in folders)
    return saved if is_begun else {}


def begin_run(workdir: Path, config: Config, run_id: str = "") -> None:
    """Write config.json of a new run.

    Args:
        run_id: ID of the run; "": a new ID.

    Raises:
        UserError: the directory cannot be written to.
    """
    facts = {
        "config": config_lib.flatten(config),
        "chosen": dict(config.chosen),
        "versions": versions(),
        "run_id": run_id or uuid.uuid4().hex[:16],
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        write_json(workdir / _CONFIG, facts)
    except OSError as error:
        raise UserError(f"cannot write to the work directory {workdir}: {error}") from error


def is_finished(workdir: Path, num_steps: int) -> bool:
    """Return whether the run made its last step, evaluated it and wrote the report."""
    if not (workdir / "report.html").is_file():
        return False
    try:
        after = read_json(workdir / "report.json")["eval"]["after"]
        return after is not None and after["step"] == num_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False  # a damaged report is written again from the checkpoint


def finished_before(config: Config, workdir: Path) -> Outcome:
    """Return the outcome of a run that was already finished."""
    report = read_json(workdir / "report.json")
    return Outcome(config.num_steps, is_finished=True, was_finished=True, report=report)


def check_for_report(workdir: Path) -> None:
    """Refuse to write a report into a directory that no run wrote.

    Raises:
        UserError: config.json is damaged or of another program, or neither that file nor
            report.json exists.
    """
    if (workdir / _CONFIG).exists():
        saved_config(workdir)
    elif not (workdir / "report.json").exists():
        raise UserError(
            f"{workdir} has neither {_CONFIG} nor report.json, wanted the work directory of a run. "
            "Give the directory that was named by --workdir"
        )


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
    hold = Hold(workdir)
    try:
        if not holds_run(workdir, config):  # no other process can begin a run now
            begin_run(workdir, config)
    except BaseException:
        hold.release()
        raise
    return hold


def claim_together(
    cluster: "Cluster",
    config: Config,
    workdir: Path,
    held: contextlib.ExitStack,
    owner: int = 0,
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
    theirs = cluster.broadcast_json(mine)
    lines = [
        f"{field}: {theirs.get(field)!r} there, {mine[field]!r} here"
        for field in sorted(mine)
        if theirs.get(field) != mine[field]
    ]
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
