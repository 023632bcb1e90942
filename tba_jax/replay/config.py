# SPDX-License-Identifier: Apache-2.0
"""Settings of the replay buffer."""

import math
from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field, share

# Memory of one response besides its packed bytes, so that max_bytes is close to the process's
# memory: its objects and its places in lists, measured with 10**6 responses.
RESPONSE_OVERHEAD_BYTES = 220
# The same for one prompt, besides its tokens and text: its objects, with one column of a short text
# (measured with 20,000 prompts).
PROMPT_OVERHEAD_BYTES = 1450


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
        "limit of staleness in steps of every drawn response; older responses are removed, and "
        "unused groups wait in a queue, oldest version first. 0: no limit, and only groups of the "
        "newest merge are fresh",
        at_least=0,
    )
