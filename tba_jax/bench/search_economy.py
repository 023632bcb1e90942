# SPDX-License-Identifier: Apache-2.0
"""Command: share of generated responses that are trained on, with real buffers in simulated time.

    python -m tba_jax.bench.search_economy [--steps=300] [--json]

Only decoding and training are simulated. A session has slots whose responses have lognormal
lengths, multiplied by the difficulty of the prompt (factor e between easiest and hardest), and a
step of the trainer takes one unit of time. Tickets, admission, commits, merges and draws are those
of a run. Prints for each case the share of groups that were trained on, the mean rank of their
lengths among all lengths (0.5 is unbiased), the share of slot steps that sampled a token, the share
of fresh batch slots, and the staleness.
"""

import heapq
import math
import sys
from collections.abc import Iterator, Sequence
from typing import Any, Literal, NamedTuple

import jax
import numpy as np

from tba_jax.bench.reporting import columns, make_parser, run_command
from tba_jax.decoding.requests import Response, Statistics
from tba_jax.environments.episode import SingleTurnSession
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Prompt
from tba_jax.replay.admission import Admission, Demand
from tba_jax.replay.buffer import ReplayBuffer
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.grader import Grades
from tba_jax.search.config import SearchSettings
from tba_jax.search.continuous import ContinuousSearch
from tba_jax.search.sampler import GroupSession, Sampler
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.weights.transport import Published

PROMPTS, SAMPLES, SLOTS, CHUNK = 32, 8, 32, 8
MEAN_LENGTH, SIGMA = 128.0, 0.6  # tokens; spread of the lognormal distribution
IDLE = 0.01  # An idle searcher checks for work again after this share of a step.


class Case(NamedTuple):
    """One simulated configuration.

    Attributes:
        searchers: number of searchers.
        supply: responses that searchers can generate, relative to the trainer's demand.
        bound: replay.max_staleness in steps.
        recency_prob: m.
        waits: whether replay.pace=trainer; if not, a batch with too few new groups repeats the
            newest groups.
        delivery: publication latency in steps.
        late: value of replay.late.
    """

    searchers: int
    supply: float
    bound: int
    recency_prob: float = 1.0
    waits: bool = True
    delivery: float = 0.0
    late: Literal["train", "wait", "drop"] = "train"


# With n searchers for the same work, a response takes about n / 4 steps on average.
CASES = (
    *(Case(n, 1.0, max(1, n // 8)) for n in (4, 16, 32, 64)),
    *(Case(n, 1.0, n) for n in (4, 16, 32, 64)),
    *(Case(n, 2.0, n) for n in (4, 16, 32, 64)),
    *(Case(8, supply, 8, 0.95, waits=False) for supply in (1.0, 0.75, 0.5)),
    # Bounds above and below the latency, without surplus responses.
    *(Case(16, 1.0, bound, late=late) for bound in (16, 2) for late in ("wait", "drop")),
    # Delayed weights, with a bound above and a bound below the delay.
    *(
        Case(4, 1.5, bound, delivery=delivery, late=late)
        for delivery, bound in ((2.5, 8), (2.5, 2), (5.5, 2))
        for late in ("train", "wait")
    ),
)


class Prompts:
    """Endless stream of numbered prompts whose difficulty is a function of the number."""

    def __init__(self, searcher: int, num_searchers: int) -> None:
        self._first, self._stride, self._count = searcher, num_searchers, 0

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts of this searcher."""
        counts = range(self._count, self._count + num_prompts)
        self._count += num_prompts
        ids = [self._first + self._stride * i for i in counts]
        return [Prompt(i, "", np.array([i], np.int32), {}) for i in ids]

    def state(self) -> dict[str, Any]:
        """Return the number of prompts taken so far."""
        return {"count": self._count}

    def restore(self, state: Any) -> None:
        """Continue from a saved number."""
        self._count = state["count"]


def difficulty(prompt_id: int) -> float:
    """Return the difficulty, from 1 to e, uniform on a logarithmic scale."""
    return math.exp(np.random.default_rng(prompt_id).random())


class Slots:
    """A simulated decode session: its slots, and the remaining tokens of their responses.

    The first token of a response is the number of the response in the run, which identifies it.
    """

    def __init__(
        self, version: int, serial: list[int], seed: int, *, num_slots: int = SLOTS
    ) -> None:
        self.version, self.num_slots = version, num_slots
        self.statistics = Statistics()
        self.steps = 0  # decode steps of the last chunk
        self._serial = serial
        self._rng = np.random.default_rng([seed, 7])
        self._queue: list[tuple[int, int, int]] = []
        self._length = np.zeros(num_slots, np.int64)
        self._left = np.zeros(num_slots, np.int64)
        self._owner: list[tuple[int, int, int] | None] = [None] * num_slots
        self._requests = 0

    @property
    def is_idle(self) -> bool:
        """Whether no response is queued or unfinished."""
        return not self._queue and not self._left.any()

    @property
    def room(self) -> int:
        """Number of free slots minus queued responses."""
        return int((self._left == 0).sum()) - len(self._queue)

    def submit(self, prompt: np.ndarray, keys: np.ndarray, settings: Any, temperatures: Any) -> int:
        """Queue the samples of a prompt."""
        prompt_id = int(prompt[0])
        mean = MEAN_LENGTH * difficulty(prompt_id) / (math.e - 1)
        lengths = self._rng.lognormal(math.log(mean) - SIGMA**2 / 2, SIGMA, len(keys))
        request, self._requests = self._requests, self._requests + 1
        self._queue += [(request, j, max(1, round(x))) for j, x in enumerate(lengths)]
        return request

    def swap(self, params: None, version: int) -> None:
        self.version = version

    def forget(self, conversation: np.ndarray) -> None: ...

    def step(self) -> list[Response]:
        """Simulate one chunk of decode steps."""
        for slot in np.flatnonzero(self._left == 0).tolist():
            if not self._queue:
                break
            request, sample, length = self._queue.pop(0)
            self._owner[slot] = request, sample, self.version
            self._length[slot] = self._left[slot] = length
        drawn = np.minimum(self._left, CHUNK)
        self._left -= drawn
        self.steps = int(drawn.max())
        self.statistics.tokens += int(drawn.sum())
        self.statistics.slot_steps += self.steps * self.num_slots
        ended = []
        for slot in np.flatnonzero((self._left == 0) & (drawn > 0)).tolist():
            owner = self._owner[slot]
            assert owner is not None
            request, sample, version = owner
            self._serial[0] += 1
            tokens = np.full(self._length[slot], self._serial[0], np.int32)
            logprobs = np.zeros(len(tokens), np.float32)
            ended.append(Response(request, sample, tokens, logprobs, True, version, self.version))
        return ended


class SlotSampler(Sampler):
    """Sampler that opens simulated decode sessions."""

    def __init__(self, serial: list[int], seed: int) -> None:
        settings = SearchSettings(samples_per_prompt=SAMPLES, prompts_per_round=SLOTS // SAMPLES)
        decoder: Any = None  # decoding is simulated
        super().__init__(decoder, settings, jax.random.key(0), 0)
        self._serial, self._seed = serial, seed

    def open(self, published: Published, *, is_fed: bool) -> GroupSession:
        self.session: Any = Slots(published.version, self._serial, self._seed)
        return GroupSession(self, SingleTurnSession(self.session))


class NoRewards:
    """Grader with reward 0 for every response."""

    def grade(self, prompts: Any, responses: Any, has_eos: Any, verdicts: Any) -> Grades:
        """Return one grade with reward 0 for each response."""
        n = len(responses)
        return Grades([""] * n, [0.0] * n, [None] * n, {}, [False] * n)


class World:
    """State of one simulated case."""

    def __init__(self, case: Case, seed: int = 0) -> None:
        self.case = case
        self.now = 0.0  # in steps of the trainer
        self.staleness: list[int] = []
        self.trained: set[int] = set()  # numbers of responses
        self.trained_groups: set[int] = set()  # smallest response number of each group
        self.lengths: dict[int, int] = {}
        self.num_groups = self.fresh_slots = self.slots = 0
        self.wait = 0.0
        self.step = 0
        self.settings = ReplaySettings(
            recency_prob=case.recency_prob,
            max_staleness=case.bound,
            pace="trainer" if case.waits else "off",
            recycle_fresh=not case.waits,
            late=case.late,
        )
        self.buffer = ReplayBuffer(self.settings, seed)
        serial = [0]
        self.outboxes = [Outbox(2**30) for _ in range(case.searchers)]
        self.admission = Admission(
            Demand(PROMPTS, case.recency_prob, case.bound, 1, is_strict=case.late == "wait"),
            range(case.searchers),
        )
        self.published = [(0.0, 0)]  # (when, version), those that may still be the newest delivered
        self.samplers = [SlotSampler(serial, seed * 1000 + i) for i in range(case.searchers)]
        self.searches = [self._search(i) for i in range(case.searchers)]
        # With all slots in use, the searchers generate `supply` times the responses of a step.
        demand = PROMPTS * case.recency_prob * SAMPLES * MEAN_LENGTH
        self.token_time = SLOTS * case.searchers / (demand * case.supply)

    def _search(self, i: int) -> ContinuousSearch:
        parts: Any = SearchParts(
            index=i,
            stream=Prompts(i, self.case.searchers),
            weights=self._delivered,
            sampler=self.samplers[i],
            grader=NoRewards(),  # pyright: ignore[reportArgumentType]
            reference=None,
            padding=Padding((1,), (2**20,), 0),
            outbox=self.outboxes[i],
            clock=lambda: self.now,
        )
        return ContinuousSearch(
            Searcher(parts), self.admission, swaps_in_flight=True, log_event=lambda event: None
        )

    def _delivered(self) -> Published:
        """Return the newest delivered version; version 0 is available at the start."""
        published, delivery = self.published, self.case.delivery
        while len(published) > 1 and published[1][0] + delivery <= self.now:
            published.pop(0)
        return Published(published[0][1], None)

    def run(self, num_steps: int) -> None:
        """Simulate until the trainer has made all its steps."""
        # (time, searcher, whether a chunk ends at that time)
        events = [(0.0, i, False) for i in range(len(self.searches))]
        trainer_at, waiting_since = 0.0, 0.0
        is_training = False
        while self.step < num_steps:
            if trainer_at <= events[0][0]:
                self.now = trainer_at
                if is_training:
                    self._end_step()
                is_training = self._begin_step()
                if is_training:
                    self.wait += self.now - waiting_since
                    trainer_at = waiting_since = self.now + 1.0
                else:
                    trainer_at = self.now + IDLE
                continue
            self.now, i, has_ended = heapq.heappop(events)
            search = self.searches[i]
            if has_ended:
                search.grade()
            is_busy = search.step()
            took = self.samplers[i].session.steps * self.token_time if is_busy else IDLE
            heapq.heappush(events, (self.now + took, i, is_busy))

    def _begin_step(self) -> bool:
        commits = [c for outbox in self.outboxes for c in outbox.take()]
        if commits:
            self.buffer.merge(commits, self.step)
        for commit in commits:
            (group,) = commit.groups
            self.num_groups += 1
            for y in group.trajectories:
                self.lengths[int(y.response_tokens[0])] = len(y.response_tokens)
        self._tell(len(commits))
        if self.admission.holds(self.step):
            return False
        draws = self.buffer.sample(PROMPTS, SAMPLES, self.step)
        if draws is None:
            return False
        for draw in draws:
            self.slots += 1
            ids = {int(y.response_tokens[0]) for y in draw.trajectories}
            if draw.is_fresh:
                self.fresh_slots += 1
                if not ids <= self.trained:
                    self.trained |= ids
                    self.trained_groups.add(min(ids))
                    oldest = min(y.version_min for y in draw.trajectories)
                    self.staleness.append(self.step - oldest)
        return True

    def _end_step(self) -> None:
        self.step += 1
        self.published.append((self.now, self.step))
        self.admission.note_step(1.0)
        self._tell(0)

    def _tell(self, num_merged: int) -> None:
        self.admission.update(
            step=self.step,
            version=self.step,
            num_merged=num_merged,
            num_fresh=self.buffer.num_fresh_groups,
        )

    def result(self) -> dict[str, Any]:
        """Return the measurements of the case."""
        lengths = np.array(sorted(self.lengths.values()))
        trained = np.array([self.lengths[i] for i in self.trained])
        low = np.searchsorted(lengths, trained, "left")
        high = np.searchsorted(lengths, trained, "right")
        used = [search.decode_counts() for search in self.searches]
        latency = self.admission.latency()
        return {
            **self.case._asdict(),
            "latency_steps": math.nan if latency is None else latency.mean_steps,
            "latency_p95_steps": math.nan if latency is None else latency.p95_steps,
            # Groups that wait at the end within the bound would have been trained next.
            "trained_share": len(self.trained_groups)
            / max(1, self.num_groups - self.buffer.num_fresh_groups),
            "length_rank": float(((low + high) / 2 / len(lengths)).mean()),
            "slot_use": sum(x.tokens for x in used) / max(1, sum(x.slot_steps for x in used)),
            "effective_m": self.fresh_slots / self.slots,
            "staleness_p95": float(np.quantile(self.staleness, 0.95)),
            "staleness_max": max(self.staleness),
            "feasible": math.nan if latency is None else latency.feasible,
            "late_share": float(np.mean(np.array(self.staleness) > self.case.bound)),
            "wait_share": self.wait / self.now,
        }


def measure(num_steps: int, cases: Sequence[Case] = CASES) -> dict[str, Any]:
    """Return the measurements of every case."""
    results = []
    for case in cases:
        world = World(case)
        world.run(num_steps)
        results.append(world.result())
    return {"cases": results}


def table(result: dict[str, Any]) -> Iterator[str]:
    first = result["cases"][0]
    formats = {n: f"{{{n}:.3f}}" if isinstance(v, float) else f"{{{n}}}" for n, v in first.items()}
    yield from columns(result["cases"], formats)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("search_economy", __doc__)
    parser.add_argument("--steps", type=int, default=300, help="optimiser steps of each case")
    return run_command(parser, argv, lambda args: measure(args.steps), table)


if __name__ == "__main__":
    sys.exit(main())
