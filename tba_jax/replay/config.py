# SPDX-License-Identifier: Apache-2.0
"""Settings of the replay buffer."""

import math
from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field, need, share

# Bookkeeping of one response beside its tokens and log-probs, so that bytes are about those of the
# process. Measured by tba_jax.bench.replay_buffer: table row, two bytes objects.
RESPONSE_OVERHEAD_BYTES = 220


@dataclass(frozen=True)
class ReplaySettings(Section):
    """The replay buffer: what it keeps, and what a batch is drawn from."""

    recency_prob: float = share(0.95, "m: probability that a slot draws from the newest data")
    pace: Literal["off", "trainer"] = field(
        "off",
        "off: a slot short of fresh data becomes replay; trainer: the trainer waits (with "
        "driver=sync it never has to)",
    )
    recycle_fresh: bool = field(
        False,
        "with pace=off a slot short of fresh data draws a prompt of the newest merges again and "
        "stays fresh; replay only where no other is left",
    )
    deduplicate: bool = field(
        True,
        "equal responses of one merge (tokens, versions, reward) are one row that is trained once "
        "with their number as weight; False: a row each",
    )
    priority_temperature: float = field(
        math.inf,
        "replay draws a prompt's responses ~ softmax(reward / this); inf: uniformly",
        above=0,
    )
    uniform_mix: float = share(0.0, "share of the uniform distribution in that softmax")
    capacity_per_prompt: int = field(
        100,
        "rows kept per prompt, newest policy versions first; equal responses of one merge are one "
        "row",
        at_least=1,
    )
    max_bytes: int = field(
        2**30, "of everything stored, bookkeeping included (estimated per response)", at_least=1
    )
    equal_rewards: Literal["train", "redraw", "skip"] = field(
        "train",
        "groups of equal rewards: train on them, as Trajectory Balance does with profit, draw the "
        "slot again (DAPO's dynamic sampling), or leave the slot empty (CISPO's filter), so that "
        "the batch is smaller; one of nothing else is trained on",
    )
    max_reuse: int = field(0, "times a response may be drawn; 0: without bound", at_least=0)
    max_staleness: int = field(
        0,
        "above 0 unused responses wait in a queue, oldest version first, and those drawn more "
        "steps stale than this are late; 0: newest merge first",
        at_least=0,
    )
    late: Literal["train", "drop", "wait"] = field(
        "train",
        "with max_staleness: train on late responses and count them; drop them; or have none, as "
        "searchers wait for newer weights and the trainer for what would be late",
    )

    def check(self) -> None:
        """What excludes what."""
        need(
            self.late == "train" or self.max_staleness > 0,
            "replay.late",
            self.late,
            "without a bound on staleness nothing is late",
            "Set --config.replay.max_staleness, or --config.replay.late=train.",
        )
        need(
            self.late != "wait" or self.pace == "trainer",
            "replay.late",
            self.late,
            f"with replay.pace = {self.pace!r} the trainer waits for nothing",
            "Set --config.replay.pace=trainer.",
        )
