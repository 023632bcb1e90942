# SPDX-License-Identifier: Apache-2.0
"""A decode session that says what a test wants."""

import time

import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.environments.episodes import EpisodeSession


class Scripted:
    """A decode session whose turns are given; each is sampled with log-prob -1."""

    num_slots, room, version = 4, 4, 7

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.contexts, self.is_idle = tokenizer, turns, [], True

    def submit(self, prompt, keys, settings, temperatures):
        self.contexts.append(prompt)
        self.is_idle = False
        return len(self.contexts) - 1

    def forget(self, conversation): ...

    def step(self):
        if self.is_idle:
            return []
        number, self.is_idle = len(self.contexts) - 1, True
        tokens = self.tokenizer.encode(self.turns[number], add_bos=False)
        logprobs = np.full(len(tokens), -1, np.float32)
        return [Response(number, 0, tokens, logprobs, True, 7, 7, 1.0)]


def played(environments, session, prompt):
    """The one episode of a prompt."""
    over = EpisodeSession(session, environments)
    over.submit(prompt, np.zeros((1, 2), np.uint32), SamplingSettings(4000), np.ones(1))
    found, end = [], time.monotonic() + 60
    while not found:
        assert time.monotonic() < end
        found = over.step()
        time.sleep(0.002)
    return found[0]
