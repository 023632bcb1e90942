# SPDX-License-Identifier: Apache-2.0
"""The state of a run that continues with another number of searchers."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.flow.rounds import pack_commits
from tba_jax.flow.state import PartState
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.outbox import Outbox
from tba_jax.run.host_state import HostState


def with_searchers(
    state: HostState, num_searchers: int, make_buffer: Callable[[], ReplayBuffer]
) -> HostState:
    """Return a state for another number of searchers.

    Unmerged rounds are merged first. Every searcher continues to count its rounds from the highest
    number so far, so that no random number is used twice, and prompt streams begin a new pass.

    Args:
        state: as it was saved.
        num_searchers: of the run, from now on.
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
    """Counters of the searchers; searcher 0 has the tokens of searchers that are no more."""
    known = {name: part.meta for name, part in state.named("searcher_").items()}
    names = [f"searcher_{i}" for i in range(num_searchers)]
    lost = sum(meta["decoded_tokens"] for name, meta in known.items() if name not in names)
    found = {}
    for name in names:
        meta = known.get(name, {"decoded_tokens": 0, "idle_s": 0.0})
        tokens = meta["decoded_tokens"] + (lost if name == "searcher_0" else 0)
        found[name] = PartState({}, {**meta, "decoded_tokens": tokens})
    return found
