# SPDX-License-Identifier: Apache-2.0
"""The state of a process of a run: states of its parts by name, and facts that identify the run.

This module serialises host states, and converts a state to another number of searchers.

Invariants: no file has pickled objects. A checkpoint of another run is refused
(tests/run/test_host_state.py).
"""

import dataclasses
import hashlib
import io
import json
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.config.command_line import versions
from tba_jax.flow.rounds import pack_commits
from tba_jax.flow.state import PartState
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.outbox import Outbox
from tba_jax.run.errors import CheckpointError

_FACTS_KEY, _META_KEY = "__facts__", "__meta__"


@dataclasses.dataclass(frozen=True)
class Facts:
    """Facts that identify the run of a host state.

    Attributes:
        run_id: unique name of the run.
        step: step of the checkpoint.
    """

    seed: int
    num_searchers: int
    run_id: str = ""
    step: int = -1


class HostState(NamedTuple):
    """All state of a process except the train state.

    Attributes:
        facts: the run that the state belongs to.
        parts: state of each part, by name: logs, buffer, outbox_I and searcher_I of each searcher
            I, trainer, clock, evaluations.
    """

    facts: Facts
    parts: Mapping[str, PartState]

    def named(self, prefix: str) -> dict[str, PartState]:
        """Return the parts whose names begin with a prefix."""
        return {name: part for name, part in self.parts.items() if name.startswith(prefix)}


def pack(state: HostState) -> bytes:
    """Return a host state as npz bytes: arrays as `part/key`, facts and metadata as JSON."""
    arrays = {
        f"{name}/{key}": np.asarray(value)
        for name, part in state.parts.items()
        for key, value in part.arrays.items()
    }
    entries = {
        _FACTS_KEY: dataclasses.asdict(state.facts),
        _META_KEY: {name: part.meta for name, part in state.parts.items()},
    }
    for key, value in entries.items():
        arrays[key] = np.frombuffer(json.dumps(value).encode(), np.uint8)
    out = io.BytesIO()
    np.savez(out, allow_pickle=False, **arrays)
    return out.getvalue()


def read_facts(path: str | os.PathLike[str]) -> Facts:
    """Return the facts of a host state file, without reading its arrays.

    Raises:
        ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile: the bytes are not intact.
    """
    with np.load(os.fspath(path), allow_pickle=False) as entries:
        return Facts(**json.loads(entries[_FACTS_KEY].tobytes().decode()))


def unpack(data: bytes) -> HostState:
    """Return the host state that `pack` converted to bytes.

    Raises:
        ValueError, KeyError, TypeError, OSError, zipfile.BadZipFile: the bytes are not intact.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as entries:
        facts = Facts(**json.loads(entries[_FACTS_KEY].tobytes().decode()))
        metas = json.loads(entries[_META_KEY].tobytes().decode())
        arrays: dict[str, dict[str, np.ndarray]] = {name: {} for name in metas}
        for full_key in entries.files:
            if full_key not in (_FACTS_KEY, _META_KEY):
                name, key = full_key.split("/", 1)
                arrays[name][key] = entries[full_key]
        parts = {name: PartState(arrays[name], meta) for name, meta in metas.items()}
        return HostState(facts, parts)


def check_facts(step: int, saved: Facts, now: Facts) -> None:
    """Refuse a checkpoint of another run.

    Raises:
        CheckpointError: the checkpoint was copied into the work directory.
    """
    for name, before, after in (
        ("run", saved.run_id, now.run_id),
        ("seed", saved.seed, now.seed),
    ):
        if before != after:
            raise CheckpointError(
                f"checkpoint {step} is of {name} {before}, but the work directory is of {name} "
                f"{after}: the checkpoint was copied there. Move it away, or restore the "
                "config.json of its run"
            )


class RunClock:
    """Running time of a run in seconds, summed over all processes that resumed it.

    Attributes:
        time_to_first_step_s: running time at the end of the first step; None before that.
    """

    def __init__(self, now: Callable[[], float], start: float) -> None:
        self._now = now
        self._start = start
        self.time_to_first_step_s: float | None = None

    def __call__(self) -> float:
        """Return the running time, without the time between an interruption and the resume."""
        return self._now() - self._start

    def set(self, elapsed_s: float) -> None:
        """Set the running time to that of another process of the run."""
        self._start = self._now() - elapsed_s

    def note_step(self) -> None:
        """Record the running time at the end of the first step."""
        if self.time_to_first_step_s is None:
            self.time_to_first_step_s = self()

    def state(self) -> PartState:
        """Return the running time, as the state of a part."""
        times = {"elapsed_s": self(), "time_to_first_step_s": self.time_to_first_step_s}
        return PartState({}, times)

    def restore(self, state: PartState) -> None:
        """Continue from the running time of earlier processes."""
        self._start -= state.meta["elapsed_s"]
        self.time_to_first_step_s = state.meta["time_to_first_step_s"]


def with_searchers(
    state: HostState, num_searchers: int, make_buffer: Callable[[], ReplayBuffer]
) -> HostState:
    """Return a state for another number of searchers.

    Unmerged rounds are merged first. Every searcher counts its rounds from the highest number so
    far, so that no random number is used twice. Prompt streams begin a new epoch.

    Args:
        make_buffer: returns an empty buffer with the run's settings.
    """
    outboxes = state.named("outbox_")
    buffer = state.parts["buffer"]
    waiting = []
    for saved in outboxes.values():
        outbox = Outbox(max_bytes=1)
        outbox.restore(saved)
        waiting += outbox.take()
    if waiting:
        merged = make_buffer()
        merged.restore(buffer)
        merged.merge([g for commit in waiting for g in commit.groups], buffer.meta["step"])
        buffer = merged.state()
    generated = dict(buffer.meta["ledger"]["counters"])["generated"]
    next_round = max(_next_number(outbox.meta["position"]) for outbox in outboxes.values())
    parts = {
        name: part
        for name, part in state.parts.items()
        if not name.startswith(("outbox_", "searcher_"))
    }
    parts["buffer"] = buffer
    for searcher in range(num_searchers):
        arrays, meta = pack_commits([])
        position = {
            "next_round": next_round,
            "prompt_state": None,
            "ahead": [],
            # The ledger compares what the outboxes and the buffer have received.
            "num_generated": generated if searcher == 0 else 0,
            "num_lost": 0,
        }
        parts[f"outbox_{searcher}"] = PartState(arrays, {**meta, "position": position})
    parts |= _counters(state, num_searchers)
    facts = dataclasses.replace(state.facts, num_searchers=num_searchers)
    return HostState(facts, parts)


def _next_number(position: Mapping[str, Any]) -> int:
    """Return a round number higher than all rounds of a saved outbox."""
    return max([position["next_round"], *(number + 1 for number, _ in position["ahead"])])


def _counters(state: HostState, num_searchers: int) -> dict[str, PartState]:
    """Return the counters of the searchers; searcher 0 also counts tokens of removed searchers."""
    known = {name: part.meta for name, part in state.named("searcher_").items()}
    names = [f"searcher_{i}" for i in range(num_searchers)]
    lost = sum(meta["decoded_tokens"] for name, meta in known.items() if name not in names)
    found = {}
    for name in names:
        meta = known.get(name, {"decoded_tokens": 0, "idle_s": 0.0})
        tokens = meta["decoded_tokens"] + (lost if name == "searcher_0" else 0)
        found[name] = PartState({}, {**meta, "decoded_tokens": tokens})
    return found


def code_name() -> str:
    """Return the version of the package, and a digest of its source files."""
    root = Path(__file__).parents[1]
    digest = hashlib.sha256()
    for path in sorted(root.rglob("*.py")):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes() + b"\0")
    return f"tba_jax {versions()['tba_jax']} {digest.hexdigest()[:12]}"
