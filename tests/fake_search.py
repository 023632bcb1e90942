# SPDX-License-Identifier: Apache-2.0
"""A searcher over a decode session that only counts down."""

import itertools

import numpy as np
from fake_tickets import House

from tba_jax.decoding.requests import Response, Statistics
from tba_jax.environments.episodes import EpisodeSession
from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.scores import Grader, Score
from tba_jax.search.config import SearchSettings
from tba_jax.search.sampler import GroupSession, Sampler
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.weights.publication import Published

SETTINGS = SearchSettings(samples_per_prompt=2, num_slots=4)


class CountdownSession:
    """Four slots; sample j of prompt i ends after its own number of chunks."""

    def __init__(self, published, lengths):
        self.version, self.num_slots = published.version, 4
        self.statistics = Statistics()
        self._lengths = lengths
        self._queue = []
        self._slots = []
        self._requests = itertools.count()

    @property
    def is_idle(self):
        return not (self._queue or self._slots)

    @property
    def room(self):
        return self.num_slots - len(self._slots) - len(self._queue)

    def submit(self, prompt, keys, settings, temperatures):
        request, prompt_id = next(self._requests), int(prompt[0]) - 1
        for sample in range(2):
            self._queue.append([request, sample, prompt_id, self._lengths(prompt_id, sample), 0])
        return request

    def swap(self, params, version):
        self.version = version

    def step(self):
        while self._queue and len(self._slots) < self.num_slots:
            entry = self._queue.pop(0)
            entry[4] = self.version
            self._slots.append(entry)
        for entry in self._slots:
            entry[3] -= 1
        self.statistics.tokens += len(self._slots)
        self.statistics.slot_steps += self.num_slots
        ended = [e for e in self._slots if not e[3]]
        versions = np.full(2, self.version, np.int32)
        self._slots = [e for e in self._slots if e[3]]
        return [
            Response(r, j, np.array([10 + i, j]), np.zeros(2), True, v, self.version, 1.0, versions)
            for r, j, i, _, v in ended
        ]


class CountdownSampler(Sampler):
    """Opens such sessions."""

    lengths = staticmethod(lambda i, j: 1)

    def open(self, published):
        session = CountdownSession(published, self.lengths)
        return GroupSession(self, EpisodeSession(session))


class ByFunction:
    """Rewards by a function of (text, token IDs), None of which has the reason "none"."""

    def __init__(self, function):
        self.function = function

    async def score(self, completions):
        rewards = [self.function(x.text, x.ids) for x in completions]
        return [Score(r, "none" if r is None else None) for r in rewards]


FIRST_TOKEN = ByFunction(lambda text, ids: float(ids[0]))


class OneToken:
    """Prompt n has the token 1 + n."""

    def from_number(self, number):
        return number, Prompt(number, f"p{number}", np.array([1 + number], np.int32), {})


class World:
    """A searcher over such sessions, and the owner that it takes tickets from."""

    def __init__(self, lengths=lambda i, j: 1, *, in_flight=True, reward=FIRST_TOKEN, **settings):
        self.version = 0
        self.house = House(1, prompts=OneToken(), **settings)
        self.owner = self.house.owner
        sampler = CountdownSampler(None, SETTINGS, np.zeros(2, np.uint32))
        object.__setattr__(sampler, "lengths", lengths)
        parts = SearchParts(
            index=0,
            weights=lambda: Published(self.version, None),
            evaluated=lambda version: None,
            sampler=sampler,
            grader=Grader(reward, lambda rows: ["x"] * len(rows), lambda text: None, ""),
            evaluator=None,
            given=None,
            swaps_in_flight=in_flight,
        )
        self.searcher = Searcher(parts, self.owner)

    def run(self, num_chunks):
        """Results of the chunks, by ticket number."""
        for _ in range(num_chunks):
            self.searcher.step()
            self.searcher.grade()
        return self.owner._results
