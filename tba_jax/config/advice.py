# SPDX-License-Identifier: Apache-2.0
"""Advice about settings without effect, and about a run that is slow or does not learn."""

import collections
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tba_jax.config.schema import SETTINGS, Config, get_field
from tba_jax.settings import Schedule

_NUM_REPORTS = 3  # reports of tickets that a share is computed from
_MAX_CUT_SHARE = 0.2
_MAX_EQUAL_SHARE = 0.8
_EARLY_STEPS = 50  # a policy that has learned gives equal rewards, too
_WAIT_FROM, _WAIT_TO = 5, 30  # steps between which waiting is measured
_MAX_WAIT_SHARE = 0.3
_MAX_PADDING_SHARE = 0.6
_SHORT_ROW = 128  # tokens of a prompt and a response below which rows are not worth packing


class Times(NamedTuple):
    """Seconds since the run began, and seconds of waiting of trainer and searchers (mean)."""

    elapsed: float
    trainer: float
    searchers: float


class Advice:
    """Advice about a run that learns little or waits; each kind of sentence is given once."""

    def __init__(self) -> None:
        self._said: set[str] = set()
        self._reports: dict[str, collections.deque[float]] = {
            name: collections.deque(maxlen=_NUM_REPORTS)
            for name in ("search/cut_share", "search/equal_rewards_share", "train/padding_share")
        }
        self._begin: Times | None = None

    def lines(
        self, config: Config, step: int, values: Mapping[str, Any], times: Times
    ) -> list[str]:
        """Return the advice that has not been given before; called at every step.

        Args:
            values: metrics of the last step, and of the tickets merged before it.
        """
        shares = []
        for name, reports in self._reports.items():
            reports.extend([values[name]] if name in values else [])
            shares.append(sum(reports) / len(reports) if len(reports) == _NUM_REPORTS else 0.0)
        found = dict(_about_shares(config, step, *shares))
        if step == _WAIT_FROM:
            self._begin = times
        if step == _WAIT_TO and self._begin is not None:
            seconds = Times(*(now - then for now, then in zip(times, self._begin, strict=True)))
            found["wait"] = about_waiting(config, seconds)
        new = {kind: line for kind, line in found.items() if line and kind not in self._said}
        self._said |= new.keys()
        return list(new.values())


def _about_shares(
    config: Config, step: int, cut: float, equal: float, padding: float
) -> Iterator[tuple[str, str]]:
    """Yield (kind, sentence) for each share that is too large."""
    search, batch = config.search, config.batch
    if cut > _MAX_CUT_SHARE:
        limit = search.max_new_tokens
        yield (
            "cut",
            f"{cut:.0%} of responses are cut by search.max_new_tokens={limit}. Set --config."
            f"search.max_new_tokens={2 * limit} if the model's context allows it, or ask for "
            "shorter responses in the prompt",
        )
    if equal > _MAX_EQUAL_SHARE and step <= _EARLY_STEPS:
        yield (
            "equal",
            f"all responses have the same reward in {equal:.0%} of the groups, so these groups "
            "do not show which response is better. Use prompts that are solved sometimes, a "
            "reward with more values, or more responses: "
            f"--config.search.samples_per_prompt={2 * search.samples_per_prompt}",
        )
    longest = config.task.max_prompt_tokens + search.max_new_tokens
    is_packable = not (batch.packed_length or search.min_new_tokens) and longest >= _SHORT_ROW
    if padding > _MAX_PADDING_SHARE and is_packable:
        yield (
            "padding",
            f"{padding:.0%} of the tokens in the train step are padding. Begin a run with "
            f"--config.batch.packed_length={-(-2 * longest // _SHORT_ROW) * _SHORT_ROW}, which "
            "puts several responses into a row",
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
        return (
            f"searchers wait {searchers:.0%} of the time: training is slower. Set "
            "--config.model.remat=dots where memory allows it, or use fewer searchers"
        )
    return ""


# Before a run.


def notes(config: Config) -> list[str]:
    """Return a sentence for each setting without effect and each schedule that is cut short.

    `--config.num_steps` does not rescale schedules: a shortened run follows their beginning.
    """
    return list(_notes(config))


def _notes(config: Config) -> Iterator[str]:
    num_steps, o, period = config.num_steps, config.objective, config.reference.reset_period
    if config.driver == "sync" and config.replay.pace == "trainer":
        yield "replay.pace=trainer has no effect: with driver=sync the trainer never has to wait"
    for name, setting in SETTINGS.items():
        if setting.type is Schedule:
            schedule = get_field(config, name)
            end = _end(schedule, num_steps)
            if num_steps < end:
                yield f"{name}={schedule}: the run ends at step {num_steps}, the schedule at {end}"
    if not o.beta.is_always(0.0) and o.built.needs.beta == "unused":
        yield f"objective.beta={o.beta} has no effect: objective {o.name} has no KL to a reference"
    if period >= num_steps:
        yield f"reference.reset_period={period}: the run ends before the first reset"


def _end(schedule: Schedule, num_steps: int) -> int:
    """Return the step from which a schedule stays at its last value."""
    if schedule.jump is not None:
        return schedule.jump + 1
    if len(set(schedule.numbers)) == 1:
        return schedule.warmup
    return schedule.begin + (schedule.over(num_steps).steps or 0)
