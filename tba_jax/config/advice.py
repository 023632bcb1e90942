# SPDX-License-Identifier: Apache-2.0
"""Advice during a run: what slows it or keeps it from learning, and the setting that helps."""

import collections
from collections.abc import Mapping
from typing import Any, NamedTuple

from tba_jax.config.schema import Config

_NUM_REPORTS = 3  # reports of tickets that a share is computed from
_MAX_CUT_SHARE = 0.2
_MAX_EQUAL_SHARE = 0.8
_EARLY_STEPS = 50  # a policy that has learned gives equal rewards, too
_WAIT_FROM, _WAIT_TO = 5, 30  # steps between which waiting is measured
_MAX_WAIT_SHARE = 0.3
_MAX_PADDING_SHARE = 0.6
_SHORT_ROW = 128  # tokens of a prompt and a response below which rows are not worth packing


class Times(NamedTuple):
    """Seconds since the run began, and seconds of waiting.

    Attributes:
        elapsed: seconds since the run began.
        trainer: seconds in which the trainer waited.
        searchers: seconds in which a searcher waited, mean over the searchers.
    """

    elapsed: float
    trainer: float
    searchers: float


class Advice:
    """Advice about a run that learns little or waits; each sentence is given once.

    `lines` receives the metrics of every step.
    """

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._cut: collections.deque[float] = collections.deque(maxlen=_NUM_REPORTS)
        self._equal: collections.deque[float] = collections.deque(maxlen=_NUM_REPORTS)
        self._padding: collections.deque[float] = collections.deque(maxlen=_NUM_REPORTS)
        self._begin: Times | None = None

    def lines(
        self, config: Config, step: int, values: Mapping[str, Any], times: Times
    ) -> list[str]:
        """Return the advice that has not been given before.

        Args:
            values: metrics of the last step, and of the tickets merged before it.
        """
        if "search/cut_share" in values:
            self._cut.append(values["search/cut_share"])
            self._equal.append(values["search/equal_rewards_share"])
        if "train/padding_share" in values:
            self._padding.append(values["train/padding_share"])
        found = {
            "cut": self._about_cut(config),
            "equal": self._about_equal(config, step),
            "padding": self._about_padding(config),
        }
        if step == _WAIT_FROM:
            self._begin = times
        if step == _WAIT_TO and self._begin is not None:
            seconds = Times(*(now - then for now, then in zip(times, self._begin, strict=True)))
            found["wait"] = about_waiting(config, seconds)
        new = {name: line for name, line in found.items() if line and name not in self._said}
        self._said |= new.keys()
        return list(new.values())

    def _about_cut(self, config: Config) -> str:
        share, limit = _mean(self._cut), config.search.max_new_tokens
        if share <= _MAX_CUT_SHARE:
            return ""
        return (
            f"{share:.0%} of responses are cut by search.max_new_tokens={limit}. Set --config."
            f"search.max_new_tokens={2 * limit} if the model's context allows it, or ask for "
            "shorter responses in the prompt"
        )

    def _about_equal(self, config: Config, step: int) -> str:
        share, size = _mean(self._equal), config.search.samples_per_prompt
        if share <= _MAX_EQUAL_SHARE or step > _EARLY_STEPS:
            return ""
        return (
            f"all responses have the same reward in {share:.0%} of the groups, so these groups "
            "do not show which response is better. Use prompts that are solved sometimes, a "
            "reward with more values, or more responses: "
            f"--config.search.samples_per_prompt={2 * size}"
        )

    def _about_padding(self, config: Config) -> str:
        share = _mean(self._padding)
        longest = config.task.max_prompt_tokens + config.search.max_new_tokens
        is_possible = not (config.batch.packed_length or config.search.min_new_tokens)
        if share <= _MAX_PADDING_SHARE or not is_possible or longest < _SHORT_ROW:
            return ""
        length = -(-2 * longest // _SHORT_ROW) * _SHORT_ROW
        return (
            f"{share:.0%} of the tokens in the train step are padding. Begin a run with --config."
            f"batch.packed_length={length}, which puts several responses into a row"
        )


def about_waiting(config: Config, times: Times) -> str:
    """Return a sentence if the trainer or the searchers wait much, with a remedy; else ""."""
    trainer, searchers = times.trainer / times.elapsed, times.searchers / times.elapsed
    if trainer > max(_MAX_WAIT_SHARE, searchers):
        faster = f"--config.num_searchers={2 * config.num_searchers} where devices are free"
        if config.replay.pace == "trainer":
            faster += ", or --config.replay.pace=off, which trains on replayed responses meanwhile"
        return f"the trainer waits {trainer:.0%} of the time: searching is slower. Set {faster}"
    if searchers > _MAX_WAIT_SHARE:
        fewer = ""
        if config.num_searchers > 1:
            fewer = f", or --config.num_searchers={config.num_searchers // 2}"
        return (
            f"searchers wait {searchers:.0%} of the time: training is slower. Set "
            f"--config.model.remat=dots where memory allows it{fewer}"
        )
    return ""


def _mean(shares: "collections.deque[float]") -> float:
    return sum(shares) / len(shares) if len(shares) == _NUM_REPORTS else 0.0
