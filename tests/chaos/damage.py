# SPDX-License-Identifier: Apache-2.0
"""Damage to the files of a work directory, and what the next command makes of it, in one process.

`read_all` does what the commands do when they begin on a work directory, with their own functions
and without their devices: claim, choose a checkpoint, restore, cut the logs, report, show the
buffer, publish. What it returns is compared with what the undamaged directory gives. Whatever was
damaged, that is the same, or an older checkpoint's, or the command ends in one line.
"""

import dataclasses
import hashlib
import io
import json
import os
import shutil
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console

from tba_jax.commands.saved import load_run_config
from tba_jax.config.schema import Config, flatten
from tba_jax.devices.cluster import Cluster
from tba_jax.flow.state import PartState
from tba_jax.report import page
from tba_jax.report.files import load_run
from tba_jax.report.writers import ProgressDisplay
from tba_jax.run.build import _newest_intact
from tba_jax.run.checkpoint import Checkpoints, load_host_state
from tba_jax.run.conduct import resume_display
from tba_jax.run.errors import is_mendable
from tba_jax.run.host_state import check_facts
from tba_jax.run.lock import Hold, LockFolder
from tba_jax.run.run import forget_after, open_logs
from tba_jax.run.schedule_replay import read_schedule
from tba_jax.run.workdir import (
    begin_run,
    finished_before,
    holds_run,
    is_finished,
    run_id_of,
)

KINDS = {
    "config": "config.json",
    "metrics": "metrics.jsonl",
    "schedule": "schedule.jsonl",
    "report": "report.json",
    "lock": "lock/*",
    "versions": "versions.json",
    "published weights": "weights/**/*",
    "host state": "checkpoints/**/process_*.npz",
    "digests": "checkpoints/**/digests.json",
    "arrays": "checkpoints/**/d/*",
    "checkpoint": "checkpoints/**/*",
}
"""Kinds of files of a work directory; every file is of one at least."""


@dataclasses.dataclass(frozen=True)
class Template:
    """An undamaged work directory.

    Attributes:
        folder: it.
        config: of its run.
        target: tree of jax.ShapeDtypeStruct of the train state.
    """

    folder: Path
    config: Config
    target: Any


def _flip(rng: np.random.Generator, data: bytearray) -> bytes:
    if data:
        data[int(rng.integers(len(data)))] ^= 1 << int(rng.integers(8))
    return bytes(data)


def _some_bytes(rng: np.random.Generator, data: bytearray) -> bytes:
    at, length = int(rng.integers(len(data) + 1)), int(rng.integers(1, 64))
    data[at : at + length] = rng.bytes(length)
    return bytes(data)


def _zeros(rng: np.random.Generator, data: bytearray) -> bytes:
    at = int(rng.integers(len(data) + 1))  # as a file system that lost its last pages
    return bytes(data[:at]) + bytes(len(data) - at)


def _cut(rng: np.random.Generator, data: bytearray) -> bytes:
    return bytes(data[: int(rng.integers(len(data) + 1))])


def _cut_a_piece(rng: np.random.Generator, data: bytearray) -> bytes:
    a, b = sorted(int(rng.integers(len(data) + 1)) for _ in range(2))
    return bytes(data[:a] + data[b:])


def _more(rng: np.random.Generator, data: bytearray) -> bytes:
    return bytes(data) + rng.bytes(int(rng.integers(1, 200)))


def _foreign(rng: np.random.Generator, data: bytearray) -> bytes:
    contents = (b"", b"{}", b"[]", b"null", b"3", b'"x"', b"{", b"\xff\xfe", b"[" * 100_000)
    contents += (b'{"config": [1]}\n', b'{"config": {}}', b'{"step": "x"}\n', b"nan\n", b"\0" * 999)
    return contents[int(rng.integers(len(contents)))]


def _nonsense(rng: np.random.Generator, data: bytearray) -> bytes:
    """One value of a JSON file becomes another, or one of its lines does; else one bit flips."""
    lines = bytes(data).split(b"\n")
    at = int(rng.integers(len(lines)))
    try:
        facts = json.loads(b"\n".join(lines) if len(lines) < 3 else lines[at])
        nodes = list(_nodes(facts))
        node, key = nodes[int(rng.integers(len(nodes)))]
    except (ValueError, IndexError, UnicodeError):
        return _flip(rng, data)
    values: tuple[Any, ...] = (None, [], {}, "x", -1, 1e308, True, [[]], "9" * 99, {"a": 1})
    node[key] = values[int(rng.integers(len(values)))]
    if len(lines) < 3:
        return json.dumps(facts).encode()
    lines[at] = json.dumps(facts).encode()
    return b"\n".join(lines)


def _nodes(facts: Any):
    keys = range(len(facts)) if isinstance(facts, list) else facts
    for key in keys if isinstance(facts, list | dict) else ():
        yield facts, key
        yield from _nodes(facts[key])


CHANGES = {
    "a bit flipped": _flip,
    "random bytes": _some_bytes,
    "zeros at the end": _zeros,
    "cut off": _cut,
    "a piece missing": _cut_a_piece,
    "bytes appended": _more,
    "other contents": _foreign,
    "a value changed": _nonsense,
}


def pick(rng: np.random.Generator, folder: Path) -> tuple[str, Path] | None:
    """A kind and one of its files; None where there is none of the kind."""
    kind = list(KINDS)[int(rng.integers(len(KINDS)))]
    files = sorted(f for f in folder.glob(KINDS[kind]) if f.is_file())
    return (kind, files[int(rng.integers(len(files)))]) if files else None


def damage(rng: np.random.Generator, file: Path) -> str:
    """Spoil a file; what was done. "" where it came out as it was."""
    before = file.read_bytes()
    at = int(rng.integers(len(CHANGES) + 3))
    if at < len(CHANGES):
        name = list(CHANGES)[at]
        after = CHANGES[name](rng, bytearray(before))
        file.write_bytes(after)
        return "" if after == before else name
    file.unlink()
    if at == len(CHANGES):
        return "deleted"
    if at == len(CHANGES) + 1:
        file.mkdir()
        return "a folder in its place"
    file.symlink_to("/nowhere/at/all")
    return "a link to nothing"


def read_all(template: Template, workdir: Path) -> dict[str, Any]:
    """What each command finds in a work directory: a value to compare, or its error."""
    found: dict[str, Any] = {}
    # First those that change nothing.
    for name, read in (
        ("config", lambda: flatten(load_run_config(str(workdir)))),
        ("report", lambda: bool(page.render(load_run(workdir), {}))),
        ("schedule", lambda: [*read_schedule(workdir / "schedule.jsonl").events("step")]),
        ("buffer", lambda: load_host_state(str(workdir))[1].parts["buffer"][1]["counters"]),
        ("resume", lambda: _resume(template, workdir)),
    ):
        try:
            found[name] = read()
        except Exception as error:  # judged by `verdict`
            found[name] = error
    return found


class Told(ValueError):
    """A command ended in this line."""


@dataclasses.dataclass(frozen=True)
class Resumed:
    """What a run would go on with.

    Attributes:
        step: of the checkpoint; None for a run that begins.
        state: digest of all of it.
        report: of a finished run, {} else.
        notes: lines about what was lost.
    """

    step: int | None
    state: str
    report: Any
    notes: tuple[str, ...]


def _resume(template: Template, workdir: Path) -> Resumed:
    """As `conduct` begins."""
    config = template.config
    if holds_run(workdir, config) and is_finished(workdir, config.num_steps):
        return Resumed(None, "", finished_before(config, workdir).report, ())
    # As `claim`, but for the patience with a holder that seems to be elsewhere.
    hold = Hold(LockFolder(workdir), beat_s=0.02, expire_s=0.05)
    notes: list[str] = [hold.taken_over] if hold.taken_over else []
    with hold:
        if not holds_run(workdir, config):
            begin_run(workdir, config)
        checkpoints = Checkpoints(str(workdir / "checkpoints"), keep=2)
        shared: Any = types.SimpleNamespace(checkpoints=checkpoints, cluster=Cluster())
        step = _newest_intact(shared, notes.append)
        if step is None:
            return Resumed(None, "", {}, tuple(notes))
        _, state, host_state = checkpoints.restore(template.target, step)
        facts = host_state.facts
        check_facts(step, facts, dataclasses.replace(facts, run_id=run_id_of(workdir)), ())
        notes += _cut_logs(workdir, step, host_state.parts)
        hold.confirm()
        checkpoints.close()
    return Resumed(step, _digest(state, host_state), {}, tuple(notes))


def _cut_logs(workdir: Path, step: int, parts: Mapping[str, PartState]) -> list[str]:
    """What is said of the logs."""
    out = io.StringIO()
    quiet = Console(file=out, force_terminal=False)
    progress = ProgressDisplay(step, console=quiet)
    logs = open_logs(workdir, Cluster(), progress, [])
    run: Any = types.SimpleNamespace(
        evaluated=types.SimpleNamespace(**parts["evaluations"].meta),
        search=types.SimpleNamespace(searchers=[]),
        logs=logs,
    )
    try:
        logs.restore(parts["logs"])
        forget_after(run, step)
        resume_display(progress, workdir)
    finally:
        logs.close()
    return [line for line in out.getvalue().splitlines() if "is not whole" in line]


def digest_of(state: Any) -> str:
    """A name for the values of a train state."""
    digest = hashlib.sha256()
    for path, leaf in jax.tree_util.tree_leaves_with_path(state):
        digest.update(str(path).encode() + np.asarray(leaf).tobytes())
    return digest.hexdigest()[:16]


def _digest(state: Any, host: Any) -> str:
    digest = hashlib.sha256(digest_of(state).encode())
    for name, part in sorted(host.parts.items()):
        digest.update(name.encode() + json.dumps(part.meta, sort_keys=True).encode())
        for key, array in sorted(part.arrays.items()):
            digest.update(key.encode() + np.asarray(array).tobytes())
    return digest.hexdigest()[:16]


def verdict(name: str, before: Any, now: Any, states: dict[int | None, str]) -> str:
    """What is wrong with what a command found; "" for nothing.

    Args:
        name: of the command in `read_all`.
        before: what it found in the undamaged directory.
        now: what it found.
        states: digest of each checkpoint's state.
    """
    if isinstance(now, Exception):
        if not (isinstance(now, Told) or is_mendable(now)):
            return f"{name}: {type(now).__name__} instead of a line: {now!s:.300}"
        text = str(now)
        if not text or "\n" in text or "Traceback" in text:
            return f"{name}: not one line: {text:.300}"
        return "" if len(text) < 2000 else f"{name}: {len(text)} characters: {text:.200}"
    if name in ("report", "schedule"):
        return ""  # figures and events carry no digest; that they are read in one line is all
    if name == "resume":
        if now.step is not None and states.get(now.step) != now.state:
            return f"resume: checkpoint {now.step} is another than was saved"
        if now == before or (now.step is not None and (now.step == before.step or now.notes)):
            return ""
        if before.step is None and now.step is not None:
            return ""  # was finished; its report is made again from the checkpoint
        return f"resume: silently {now!s:.200} in place of {before!s:.200}"
    return "" if now == before else f"{name}: silently other: {now!s:.200}"


def states_of(template: Template) -> dict[int | None, str]:
    """Digest of the state in each checkpoint of the template."""
    checkpoints = Checkpoints(str(template.folder / "checkpoints"), read_only=True)
    found: dict[int | None, str] = {}
    for path in (template.folder / "checkpoints").iterdir():
        if path.name.isdigit():
            step, state, host = checkpoints.restore(template.target, int(path.name))
            found[step] = _digest(state, host)
    return found


def try_one(
    template: Template,
    before: dict[str, Any],
    states: dict[int | None, str],
    rng: np.random.Generator,
    scratch: Path,
) -> tuple[str, list[str], dict[str, Any]] | None:
    """Damage one file of a copy and read it.

    Returns:
        What was done, what is wrong with what came of it, and that; None: nothing was damaged.
    """
    workdir = scratch / "run"
    shutil.rmtree(workdir, ignore_errors=True)
    shutil.copytree(template.folder, workdir, symlinks=True)
    if rng.random() < 0.5:  # as if it was killed before it wrote its report
        (workdir / "report.json").unlink(missing_ok=True)
        before = before["unfinished"]
    else:
        before = before["finished"]
    picked = pick(rng, workdir)
    what = damage(rng, picked[1]) if picked else ""
    if not picked or not what:
        return None
    now = read_all(template, workdir)
    done = f"{picked[0]} {os.path.relpath(picked[1], workdir)}: {what}"
    wrong = [v for name in now if (v := verdict(name, before[name], now[name], states))]
    return done, wrong, now


def baselines(template: Template, scratch: Path) -> dict[str, dict[str, Any]]:
    """What commands find in the undamaged directory, finished and not."""
    found = {}
    for name in ("finished", "unfinished"):
        workdir = scratch / name
        shutil.copytree(template.folder, workdir)
        if name == "unfinished":
            (workdir / "report.json").unlink(missing_ok=True)
        found[name] = read_all(template, workdir)
        for command, value in found[name].items():
            if isinstance(value, Exception):
                raise AssertionError(f"{command} fails on an undamaged directory") from value
        shutil.rmtree(workdir)
    return found
