# SPDX-License-Identifier: Apache-2.0
"""The work directory of a run: claimed by one config, begun, finished.

It compares configs and reads what is there; it imports no jax. Its invariant: a directory that
holds a run is never given to another config.
"""

import contextlib
import json
import os
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_jax.config import schema as config_lib
from tba_jax.config.command_line import versions
from tba_jax.config.retired import upgrade
from tba_jax.config.schema import Config
from tba_jax.run.errors import UserError
from tba_jax.run.ownership import inspect
from tba_jax.storage import sealed

if TYPE_CHECKING:
    from tba_jax.devices.cluster import Cluster
    from tba_jax.run.lock import Hold


# Orbax lists a checkpoint's files by a pattern that begins with its path.
_WILD = frozenset("*?[]")
_SHOWN = 8  # differences between two configs, in a message of one line


class Outcome(NamedTuple):
    """What became of a run.

    Attributes:
        step: optimiser steps made so far.
        is_finished: all of them are made and the outcome is evaluated.
        was_finished: they were when this was asked for, so nothing was done.
        report: contents of report.json; {} in processes other than 0.
    """

    step: int
    is_finished: bool
    was_finished: bool
    report: dict[str, Any]


def default_workdir(config: Config) -> str:
    """runs/NAME-seedN."""
    return os.path.join("runs", f"{config.name.replace('/', '-')}-seed{config.seed}")


def holds_run(workdir: Path, config: Config) -> bool:
    """Whether the directory holds a run with this very config; only looks.

    Raises:
        UserError: it holds a run with another config (the difference is shown), files of another
            program (see `ownership`), or it cannot be a work directory.
    """
    wild = sorted(set(str(workdir.absolute())) & _WILD)
    if wild:
        raise UserError(
            f"the path of the work directory {workdir} has {' and '.join(wild)} in it, which "
            "checkpoints cannot be restored from: storage takes it for a pattern. Give another "
            "--workdir"
        )
    found = inspect(workdir)
    # A start that failed before it left anything may be corrected in place.
    if not (found.run_id and _is_begun(workdir)):
        return False
    old = upgrade(found.config) if found.config else config_lib.flatten(config)
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
    """The config of the run in a directory, field by field.

    Raises:
        UserError: there is none, or it is damaged.
    """
    path = workdir / "config.json"
    if not path.is_file():
        raise UserError(f"{workdir} holds no run: there is no {path}; give a run's --workdir")
    try:
        config = sealed.read(path)["config"]
        if not isinstance(config, dict):
            raise TypeError(f"config is a {type(config).__name__}")
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(
            f"{path} is not readable as the config of a run ({error}). Put it back as it was, or "
            "give another --workdir"
        ) from error
    return config


def begin_run(workdir: Path, config: Config, run_id: str = "") -> None:
    """Make the directory a run's.

    Args:
        workdir: held by this process, or about to be.
        config: of the run.
        run_id: its name; "": a new one.

    Raises:
        UserError: the directory cannot be written to.
    """
    path = workdir / "config.json"
    facts = {
        "config": config_lib.flatten(config),
        "versions": versions(),
        "run_id": run_id or uuid.uuid4().hex[:16],
    }
    try:
        workdir.mkdir(parents=True, exist_ok=True)
        sealed.write(path, facts)
    except OSError as error:
        raise UserError(f"cannot write to the work directory {workdir}: {error}") from error


def begin_or_continue(workdir: Path, config: Config) -> bool:
    """Begin a run unless the directory holds one; whether it does.

    A run whose config.json is lost gets it back: its checkpoint says which run it is.

    Args:
        workdir: held by this process.
        config: of the run.

    Raises:
        UserError: as `holds_run` and `begin_run`.
    """
    if not holds_run(workdir, config):
        begin_run(workdir, config)
        return False
    found = inspect(workdir)
    if found.lost_config:
        begin_run(workdir, config, found.run_id)
    return True


def _is_begun(workdir: Path) -> bool:
    """Whether a run has left anything there; one that failed before its first step has not."""
    metrics = workdir / "metrics.jsonl"
    has_file = any(
        path.exists() and path.stat().st_size > 0 for path in (metrics, workdir / "report.json")
    )
    return has_file or any(any((workdir / name).glob("*")) for name in ("checkpoints", "weights"))


def is_finished(workdir: Path, num_steps: int) -> bool:
    """Whether the run has made its last step, evaluated the outcome and written the report."""
    path = workdir / "report.json"
    if not path.is_file() or not (workdir / "report.html").is_file():
        return False
    try:
        after = sealed.read(path)["eval"]["after"]
        return after is not None and after["step"] == num_steps
    except (OSError, ValueError, KeyError, TypeError):
        return False  # damaged: it is made again from the checkpoint


def command_of(config: Config, workdir: Path) -> dict[str, Any]:
    """What all processes of a run must have in common, as it is after a way through JSON."""
    flat = json.loads(json.dumps(config_lib.flatten(config)))
    return {**flat, "workdir": str(workdir), "version": versions()}


def differences(theirs: Mapping[str, Any], mine: Mapping[str, Any]) -> list[str]:
    """What is not common to the commands of process 0 and of this one, a clause for each."""
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
        cluster: the processes, all of which call this.
        config: of the run.
        workdir: its directory.
        held: lets go of it when it ends.
        owner: number of the process that owns the replay buffer.

    Returns:
        Whether the run in it is finished; and what holds the directory, in the owner alone, unless
        it is.

    Raises:
        UserError: configs differ, or the directory is refused; the same in all processes.
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
    """Hold the directory for a run, begin that or find it there.

    Returns:
        What holds it; None where the run in it is finished, which needs none.

    Raises:
        UserError: another process holds it, it holds another run, or it cannot be written to.
    """
    from tba_jax.run.lock import FolderSlots, Hold

    if holds_run(workdir, config) and is_finished(workdir, config.num_steps):
        return None
    hold = Hold(FolderSlots(workdir))
    try:
        begin_or_continue(workdir, config)  # no other process can begin one now
    except BaseException:
        hold.release()
        raise
    return hold


def finished_before(config: Config, workdir: Path) -> Outcome:
    """The outcome of a run that was finished when it was asked for."""
    report = sealed.read(workdir / "report.json")
    return Outcome(config.num_steps, is_finished=True, was_finished=True, report=report)
