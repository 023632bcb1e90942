# SPDX-License-Identifier: Apache-2.0
"""Settings of the replay buffer."""

import math
from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field, share


@dataclass(frozen=True)
class ReplaySettings(Section):
    """The replay buffer: what it keeps, and what a batch is drawn from."""

    recency_prob: float = share(0.95, "m: probability that a slot draws from the newest data")
    fresh_window: int = field(1, "merges that count as newest", at_least=1)
    pace: Literal["off", "trainer"] = field(
        "off",
        "off: a slot short of fresh data becomes replay; trainer: the trainer waits (with "
        "driver=sync it never has to)",
    )
    priority_temperature: float = field(
        math.inf,
        "replay draws a prompt's responses ~ softmax(reward / this); inf: uniformly",
        above=0,
    )
    uniform_mix: float = share(0.0, "share of the uniform distribution in that softmax")
    capacity_per_prompt: int = field(100, "responses kept per prompt", at_least=1)
    max_bytes: int = field(
        2**30, "of everything stored, bookkeeping included (estimated per response)", at_least=1
    )
    evict: Literal["oldest", "lowest_reward"] = field(
        "oldest",
        "which response goes first at either bound; oldest: by policy version; then by arrival",
    )
    similarity: float = share(
        0.0,
        "of two responses to a prompt whose edit distance is below this share of both lengths "
        "together only the one with the higher reward is kept; 0: off",
    )
    max_age: int = field(
        0, "responses older than this many steps are dropped; 0: never", at_least=0
    )
    max_reuse: int = field(0, "times a response may be drawn; 0: without bound", at_least=0)
    max_staleness: int = field(
        0, "fresh slots wait for data at most this many steps stale; 0: off", at_least=0
    )
