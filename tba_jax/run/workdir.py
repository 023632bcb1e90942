# SPDX-License-Identifier: Apache-2.0
"""The work directory of a run: its config, and its state (new, begun or finished).

config.json decides what a directory is: without that file, a directory that is not empty is
refused. A run writes and deletes only the names that it made. Imports no jax.
Invariant: a directory that holds a run is never used for another config
(tests/run/test_workdir.py).
"""

import json
import os
import uuid
from pathlib import Path
from typing import Any, NamedTuple

from etils import epath

from tba_jax.config import schema
from tba_jax.config.command_line import versions
from tba_jax.config.schema import Config
from tba_jax.run.errors import UserError
from tba_jax.run.lock import HEARTBEAT, LOCK
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
        report: contents of report.json.
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
        OSError: the directory cannot be read.
    """
    if wild := sorted(set(str(workdir.absolute())) & _WILD):
        raise UserError(
            f"the path of the work directory {workdir} contains {' and '.join(wild)}, which "
            "storage reads as a pattern, so that no checkpoint could be restored. Give another "
            "--workdir"
        )
    refuse_foreign(workdir)
    # The config of a start that left no files may be corrected in place.
    if not (old := begun_config(workdir)):
        return False
    if lines := schema.difference(old, json.loads(json.dumps(schema.flatten(config)))):
        more = f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
        raise UserError(
            f"{workdir} holds a run with another config: {'; '.join(lines[:_SHOWN])}{more}. Give "
            "another --workdir, or the old values to resume"
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
    has_logs = any(path.is_file() and path.stat().st_size > 0 for path in logs)
    folders = (workdir / "checkpoints", workdir / "weights")
    return saved if has_logs or any(any(folder.glob("*")) for folder in folders) else {}


def begin_run(workdir: Path, config: Config) -> None:
    """Write config.json of a new run.

    Raises:
        OSError: the directory cannot be written to.
    """
    facts = {"config": schema.flatten(config), "chosen": dict(config.chosen)}
    workdir.mkdir(parents=True, exist_ok=True)
    facts |= {"versions": versions(), "run_id": uuid.uuid4().hex[:16]}
    write_json(workdir / CONFIG, facts)


def finished_report(workdir: Path, num_steps: int) -> dict[str, Any] | None:
    """Return report.json of a run that made its last step and evaluated it; None before that."""
    try:
        report = read_json(workdir / "report.json")
        is_done = report["eval"]["after"]["step"] == num_steps
        return report if is_done and (workdir / "report.html").is_file() else None
    except (OSError, ValueError, KeyError, TypeError):
        return None  # a damaged report is written again from the checkpoint
