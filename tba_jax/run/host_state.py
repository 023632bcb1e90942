# SPDX-License-Identifier: Apache-2.0
"""The state of a process of a run: the states of its parts by name, and the facts they belong to.

Serialises them, refuses what other versions wrote, and divides them over another number of
searchers. What a part's state means is known to the part alone. Invariant: nothing on disk is
pickled.
"""

import dataclasses
import io
import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.rounds import pack_commits
from tba_jax.flow.state import PartState
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.outbox import Outbox
from tba_jax.storage import digests

ITEMS_FILE = "_CHECKPOINT_METADATA"  # written by Orbax: the classes that wrote the items
# Names in the folder of a checkpoint.
CHECKPOINT_ENTRIES = frozenset(
    {"train_state", "host_state", ITEMS_FILE, "commit_success.txt", digests.NAME}
)

FORMAT = 6
"""1: all counters in one part `run`; 2: each part has its own; 3: tickets, repeats with counts;
4: what the run was made of; 5: responses that were lost; 6: where logs ended."""

_FACTS_KEY, _META_KEY = "__facts__", "__meta__"


class CheckpointError(RuntimeError):
    """A checkpoint could not be written or read."""


@dataclasses.dataclass(frozen=True)
class Facts:
    """The run that a host state belongs to.

    Attributes:
        seed: seed of the run.
        num_searchers: searchers of the whole run.
        run_id: unique name of the run.
        fingerprints: digests of model, data and more, by kind (`identity.KINDS`).
        format: version of the file format.
        step: step of the checkpoint; -1 in old checkpoints without it.
        config: flat config of the run; {} in checkpoints that do not hold it.
    """

    seed: int
    num_searchers: int
    run_id: str = ""
    fingerprints: Mapping[str, str] = dataclasses.field(default_factory=dict)
    format: int = FORMAT
    step: int = -1
    config: Mapping[str, Any] = dataclasses.field(default_factory=dict)


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
    """Host state as npz bytes: arrays as `part/key`, facts and metadata as JSON entries."""
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


def read_facts(path: Path) -> Facts:
    """Return the facts of a host state file, without reading its arrays.

    Raises:
        CheckpointError: a format that this version does not know.
        ValueError, KeyError, OSError, zipfile.BadZipFile: when the bytes are not intact.
    """
    with open(path, "rb") as file, np.load(file, allow_pickle=False) as entries:
        return _facts(entries)


def _facts(entries: Any) -> Facts:
    facts: dict[str, Any] = {"format": 1}  # format 1 has no such field
    if _FACTS_KEY in entries.files:
        facts = json.loads(entries[_FACTS_KEY].tobytes().decode())
    if facts["format"] != FORMAT:
        raise CheckpointError(
            f"the checkpoint is of format {facts['format']} and this version of tba_jax reads "
            f"format {FORMAT}; continue the run with the version that config.json names"
        )
    facts.pop("num_processes", None)  # written by earlier versions
    return Facts(**facts)


def unpack(data: bytes) -> HostState:
    """Inverse of `pack`.

    Raises:
        CheckpointError: a format that this version does not know.
        ValueError, KeyError, OSError, zipfile.BadZipFile: when the bytes are not intact.
    """
    with np.load(io.BytesIO(data), allow_pickle=False) as entries:
        facts = _facts(entries)
        metas = json.loads(entries[_META_KEY].tobytes().decode())
        arrays: dict[str, dict[str, np.ndarray]] = {name: {} for name in metas}
        for full_key in entries.files:
            if full_key not in (_FACTS_KEY, _META_KEY):
                name, key = full_key.split("/", 1)
                arrays[name][key] = entries[full_key]
        parts = {name: PartState(arrays[name], meta) for name, meta in metas.items()}
        return HostState(facts, parts)


class RunClock:
    """Running time of a run in seconds, summed over all processes that resumed it.

    Attributes:
        time_to_first_step_s: running time at the end of the first step, None before.
    """

    def __init__(self, now: Callable[[], float], start: float) -> None:
        self._now = now
        self._start = start
        self.time_to_first_step_s: float | None = None

    def __call__(self) -> float:
        """Return the running time, without pauses between processes."""
        return self._now() - self._start

    def set(self, elapsed_s: float) -> None:
        """Set the running time to that of another process of the run."""
        self._start = self._now() - elapsed_s

    def note_step(self) -> None:
        """Record the time of the first step."""
        if self.time_to_first_step_s is None:
            self.time_to_first_step_s = self()

    def state(self) -> PartState:
        """Return the running time as state."""
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

    Unmerged rounds are merged first. Every searcher continues to count its rounds from the highest
    number so far, so that no random number is used twice, and prompt streams begin a new pass.

    Args:
        state: saved state.
        num_searchers: new number of searchers of the run.
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
        merged.merge(waiting, buffer.meta["step"])
        buffer = merged.state()
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
            "num_generated": buffer.meta["counters"]["generated"] if searcher == 0 else 0,
            "num_lost": 0,
        }
        parts[f"outbox_{searcher}"] = PartState(arrays, {**meta, "position": position})
    parts |= _counters(state, num_searchers)
    facts = dataclasses.replace(state.facts, num_searchers=num_searchers)
    return HostState(facts, parts)


def _next_number(position: Mapping[str, Any]) -> int:
    """Return a number above every round that an outbox has received."""
    return max([position["next_round"], *(number + 1 for number, _ in position["ahead"])])


def _counters(state: HostState, num_searchers: int) -> dict[str, PartState]:
    """Return the counters of the searchers; searcher 0 takes the tokens of removed searchers."""
    known = {name: part.meta for name, part in state.named("searcher_").items()}
    names = [f"searcher_{i}" for i in range(num_searchers)]
    lost = sum(meta["decoded_tokens"] for name, meta in known.items() if name not in names)
    found = {}
    for name in names:
        meta = known.get(name, {"decoded_tokens": 0, "idle_s": 0.0})
        tokens = meta["decoded_tokens"] + (lost if name == "searcher_0" else 0)
        found[name] = PartState({}, {**meta, "decoded_tokens": tokens})
    return found
