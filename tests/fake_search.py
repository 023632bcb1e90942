# SPDX-License-Identifier: Apache-2.0
"""A searcher without rounds over a decode session that only counts down."""

import itertools
from typing import Any

import jax
import numpy as np

from tba_jax.decoding.requests import Response, Statistics
from tba_jax.environments.episode import SingleTurnSession
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Prompt
from tba_jax.replay.admission import Admission
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import ScoreResult
from tba_jax.search.config import SearchSettings
from tba_jax.search.continuous import ContinuousSearch
from tba_jax.search.sampler import GroupSession, Sampler
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.weights.transport import Published

SETTINGS = SearchSettings(samples_per_prompt=2, prompts_per_round=2)


class CountingStream:
    """Prompts 0, 1, 2, ..."""

    def __init__(self):
        self.position = 0

    def take(self, num_prompts):
        first, self.position = self.position, self.position + num_prompts
        ids = range(first, self.position)
        return [Prompt(i, f"p{i}", np.array([1 + i], np.int32), {}) for i in ids]

    def state(self):
        return {"position": self.position}

    def restore(self, state):
        self.position = state["position"]


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
        self._slots = [e for e in self._slots if e[3]]
        return [
            Response(r, j, np.array([10 + i, j], np.int32), np.zeros(2, np.float32), True, v,
                     self.version)
            for r, j, i, _, v in ended
        ]  # fmt: skip


class CountdownSampler(Sampler):
    """Opens such sessions."""

    def __init__(self, lengths):
        super().__init__(None, SETTINGS, jax.random.key(0), 3)
        self._lengths = lengths

    def open(self, published):
        session = CountdownSession(published, self._lengths)
        return GroupSession(self, SingleTurnSession(session))


class FirstToken:
    """The first token's id."""

    def score(self, prompts, completions, columns, *, completion_ids, has_eos):
        return ScoreResult([float(x[0]) for x in completion_ids], [None] * len(prompts), "")


class World:
    """A searcher over such sessions."""

    def __init__(
        self,
        lengths=lambda i, j: 1,
        *,
        max_staleness=0,
        in_flight=True,
        reward=FirstToken,
        admission=None,
    ):
        self.version = 0
        self.outbox, self.stream = Outbox(2**20), CountingStream()
        parts = SearchParts(
            index=3,
            stream=self.stream,
            weights=lambda: Published(self.version, None),
            sampler=CountdownSampler(lengths),
            grader=Grader(reward(), lambda rows: ["x"] * len(rows), lambda text: None, ""),
            reference=None,
            padding=Padding((4,), (4,), 0),
            outbox=self.outbox,
            clock=lambda: 0.0,
        )
        self.searcher = Searcher(parts)
        self.admission: Any = admission or Admission(
            [3], num_prompts=2, share=1.0, max_staleness=max_staleness
        )
        self.search = ContinuousSearch(self.searcher, self.admission, swaps_in_flight=in_flight)

    def run(self, num_chunks):
        for _ in range(num_chunks):
            self.search.step()
            self.search.grade()
