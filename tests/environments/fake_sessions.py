# SPDX-License-Identifier: Apache-2.0
"""A decode session that says what a test wants."""

import time
import types

import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings
from tba_jax.environments.episodes import EpisodeSession
from tba_jax.flow.trajectory import Prompt

LONG = SamplingSettings(4000)


class Scripted:
    """A decode session whose turns are given; each is sampled with log-prob -1.

    `turns`: a list of texts in the order of the requests, or a function prompt tokens -> text.
    """

    num_slots, version, statistics = 4, 7, None

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns, self.contexts, self.open = tokenizer, turns, [], []
        self.keys = []

    @property
    def is_idle(self):
        return not self.open

    @property
    def room(self):
        return self.num_slots - len(self.open)

    def submit(self, prompt, keys, settings, temperatures=None):
        self.contexts.append(prompt)
        self.keys += keys.tolist()
        self.open.append(len(self.contexts) - 1)
        return self.open[-1]

    def forget(self, conversation): ...

    def step(self):
        numbers, self.open = self.open, []
        return [self.response(number) for number in numbers]

    run = step

    def response(self, number):
        script = self.turns
        text = script(self.contexts[number]) if callable(script) else script[number]
        tokens = self.tokenizer.encode(text, add_bos=False)
        logprobs = np.full(len(tokens), -1, np.float32)
        return Response(number, 0, tokens, logprobs, True, 7, 7, 1.0, np.full(len(tokens), 7))


def all_played(environments, session, prompts, settings=LONG, swap=None):
    """The episode of each prompt, in order.

    With `swap` the session takes these weights, as of version 4, after its first turns.
    """
    decoder = types.SimpleNamespace(session=lambda params, **options: session)
    over, found = EpisodeSession(decoder, {}, environments), []
    for prompt in prompts:
        over.submit(prompt, np.zeros((1, 2), np.uint32), settings, np.ones(1))
    end = time.monotonic() + 90
    while not over.is_idle:
        assert time.monotonic() < end
        if not over.is_waiting:
            found += over.step()
            continue
        if swap is not None and over.statistics.tokens:
            over.swap(swap, 4)
            swap = None
        time.sleep(0.002)
    return sorted(found, key=lambda y: y.request)


def played(environments, session, prompt):
    """The one episode of a prompt."""
    (episode,) = all_played(environments, session, [prompt])
    return episode


def row(tokenizer, text, **columns):
    """A prompt with the columns of its row."""
    return Prompt(0, text, tokenizer.encode(text, add_bos=False), columns)
