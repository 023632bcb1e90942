# SPDX-License-Identifier: Apache-2.0
"""Command: share of decode slots in use with slow environments, in simulated time.

    python -m tba_jax.bench.environment_slots [--episodes=2000] [--json]

Decoding and environments are simulated; turns, slots and limits are those of an episode session. A
turn has a lognormal number of tokens with mean 128, and a decode step takes 20 ms. An environment
takes a lognormal time with median 1 s, limited to 0.1 to 10 s. An episode has four turns.

Prints for each limit of open episodes (`search.max_episodes`) the share of slot steps, including
idle time, that sampled a token; completed episodes per minute; and the mean duration of an episode.
"""

import heapq
import itertools
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.bench.reporting import columns, make_parser, run_command
from tba_jax.bench.search_economy import CHUNK, Slots
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.environments.episodes import Episodes
from tba_jax.environments.pool import Answer
from tba_jax.flow.trajectory import Prompt

SLOTS, TURNS, STEP_S, OBSERVED = 64, 4, 0.02, 16
SHORTEST_S, MEDIAN_S, LONGEST_S = 0.1, 1.0, 10.0
SPREAD = math.log(LONGEST_S / MEDIAN_S) / 2  # 95 % of the times lie between the limits


class Clock:
    """Simulated clock, with the pending response times of environments."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self._responses: list[float] = []

    def respond(self, time_s: float) -> None:
        """Record the time of a response."""
        heapq.heappush(self._responses, time_s)

    def skip(self) -> None:
        """Advance to the time of the next response."""
        while self._responses and self._responses[0] <= self.now_s:
            heapq.heappop(self._responses)
        self.now_s = self._responses[0]


class SlowEnvironment:
    """Environment that responds after a random time, and ends after a number of turns."""

    def __init__(self, pool: "SlowEnvironments") -> None:
        self._pool, self._num_turns, self._ready_s = pool, 0, 0.0

    def begin(self, row: Mapping[str, Any]) -> None:
        self._wait()

    def turn(self, text: str, response: Any) -> None:
        self._num_turns += 1
        self._wait()

    def _wait(self) -> None:
        self._ready_s = self._pool.clock.now_s + self._pool.duration_s()
        self._pool.clock.respond(self._ready_s)

    @property
    def is_answered(self) -> bool:
        """Return whether the environment has responded at the simulated time."""
        return self._pool.clock.now_s >= self._ready_s

    def poll(self) -> Answer | None:
        """Return the response; None before the time of the response."""
        if not self.is_answered:
            return None
        if self._num_turns == TURNS:
            return Answer(finish="done", reward=1.0)
        return Answer("x" * OBSERVED)

    def release(self) -> None:
        """Do nothing: there is no process."""


class SlowEnvironments:
    """Pool of `SlowEnvironment`.

    Args:
        clock: simulated time.
        seed: seed of the durations.
        is_instant: whether environments respond at once.
    """

    def __init__(self, clock: Clock, seed: int, *, is_instant: bool) -> None:
        self.clock, self._rng, self._is_instant = clock, np.random.default_rng(seed), is_instant

    def open(self) -> SlowEnvironment:
        return SlowEnvironment(self)

    def duration_s(self) -> float:
        """Return the time of a response."""
        found = MEDIAN_S * math.exp(SPREAD * self._rng.standard_normal())
        return 0.0 if self._is_instant else min(max(found, SHORTEST_S), LONGEST_S)


class Letters:
    """Tokenizer with one token per letter."""

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        return np.ones(len(text), np.int32)

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        return "x" * len(ids)

    def format_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        return "".join(message["content"] for message in messages)


def simulate(
    num_episodes: int, under_way: int, *, seed: int = 0, is_instant: bool = False
) -> dict[str, Any]:
    """Run episodes in a session that always has prompts; return the measurements.

    Args:
        num_episodes: number of completed episodes.
        under_way: number of concurrent episodes.
        seed: seed of lengths and durations.
        is_instant: environments respond at once.
    """
    clock = Clock()
    pool: Any = SlowEnvironments(clock, seed, is_instant=is_instant)
    slots: Any = Slots(0, [0], seed, num_slots=SLOTS)
    session = Episodes(pool, Letters(), TURNS, most=under_way).over(slots)
    sampling, key = SamplingSettings(100_000), np.zeros((1, 2), np.uint32)
    begun_s: dict[int, float] = {}
    ages: list[float] = []
    numbers = itertools.count()
    while len(ages) < num_episodes:
        while session.room > 0:
            i = next(numbers)
            prompt = Prompt(i, "", np.array([i], np.int32), {})
            begun_s[session.submit(prompt, key, sampling, np.ones(1))] = clock.now_s
        if session.is_waiting:
            clock.skip()
            continue
        session.take_answers()
        ended = session.step()
        clock.now_s += slots.steps * STEP_S
        ages += [clock.now_s - begun_s.pop(y.request) for y in ended]
    return {
        "environments": "instant" if is_instant else "0.1-10 s",
        "under_way": under_way,
        "slot_use": slots.statistics.tokens * STEP_S / (SLOTS * clock.now_s),
        "per_minute": 60 * len(ages) / clock.now_s,
        "mean_age_s": float(np.mean(ages)),
    }


def measure(num_episodes: int) -> dict[str, Any]:
    """Return the figures of all cases.

    Raises:
        ValueError: `num_episodes` is less than 1.
    """
    if num_episodes < 1:
        raise ValueError(f"--episodes={num_episodes}: wanted at least 1")
    rows = [simulate(num_episodes, SLOTS, is_instant=True)]
    rows += [simulate(num_episodes, share * SLOTS // 4) for share in (4, 6, 8, 12)]
    return {"slots": SLOTS, "chunk_steps": CHUNK, "episodes": num_episodes, "rows": rows}


def table(result: dict[str, Any]) -> Iterator[str]:
    yield f"{result['slots']} slots, {result['episodes']} episodes of {TURNS} turns"
    yield from columns(
        result["rows"],
        {
            "environments": "{environments}",
            "under way": "{under_way}",
            "slot use": "{slot_use:.1%}",
            "episodes/min": "{per_minute:.0f}",
            "mean age": "{mean_age_s:.1f} s",
        },
    )


def main(argv: Sequence[str] | None = None) -> int:
    """Run the benchmark; return the exit code."""
    parser = make_parser("environment_slots", __doc__)
    parser.add_argument("--episodes", type=int, default=2000, help="completed episodes per case")
    return run_command(parser, argv, lambda args: measure(args.episodes), table)


if __name__ == "__main__":
    sys.exit(main())
