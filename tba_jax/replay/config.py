# SPDX-License-Identifier: Apache-2.0
"""Settings of the replay buffer."""

import math
from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field, need, share

# Memory of one response besides its tokens and log-probs, so that max_bytes is close to the
# process's memory: a table row and two bytes objects, measured with 10**6 responses.
RESPONSE_OVERHEAD_BYTES = 220
# The same for one prompt, besides its tokens and text: its objects, with one column of a short text
# (measured with 20,000 prompts).
PROMPT_OVERHEAD_BYTES = 670


@dataclass(frozen=True)
class ReplaySettings(Section):
    """The replay buffer: its limits, and the sampling of batches."""

    recency_prob: float = share(0.95, "m: probability that a batch slot draws from the newest data")
    pace: Literal["off", "trainer"] = field(
        "off",
        "for a batch slot without fresh data: off: draw the newest groups again, as the paper "
        "does; trainer: the trainer waits (no effect with driver=sync)",
    )
    priority_temperature: float = field(
        math.inf,
        "replay draws responses by softmax(reward / priority_temperature); inf: uniformly",
        above=0,
    )
    capacity_per_prompt: int = field(
        100,
        "responses kept per prompt, newest policy versions first",
        at_least=1,
    )
    max_bytes: int = field(
        2**30,
        "limit of all stored data, including bookkeeping (estimated per response)",
        at_least=1,
    )
    equal_rewards: Literal["train", "redraw", "skip"] = field(
        "train",
        "groups of equal rewards: train: train on them, which helps Trajectory Balance; redraw: "
        "draw the slot again (DAPO's dynamic sampling); skip: leave the slot empty (CISPO's "
        "filter), unless every group of the batch has equal rewards",
    )
    max_staleness: int = field(
        0,
        "limit of staleness in steps: unused responses wait in a queue, oldest version first, and "
        "are late beyond the limit; 0: no queue, newest merge first",
        at_least=0,
    )
    late: Literal["train", "wait"] = field(
        "train",
        "with max_staleness: train: train on late responses and count them; wait: searchers "
        "wait for newer weights, and the trainer waits for responses that its next step would make "
        "late",
    )

    def check(self) -> None:
        """Refuse contradictory settings."""
        need(
            self.late == "train" or self.max_staleness > 0,
            "replay.late",
            self.late,
            "without replay.max_staleness no response is late",
            "Set --config.replay.max_staleness=4, or --config.replay.late=train.",
        )
        need(
            self.late != "wait" or self.pace == "trainer",
            "replay.late",
            self.late,
            f"with replay.pace={self.pace} the trainer never waits",
            "Set --config.replay.pace=trainer.",
        )
