# SPDX-License-Identifier: Apache-2.0
"""The reward source of a config: functions, reward model, victim, or a weighted sum.

To add a learned reward, write its source in a file of this folder, its settings in `config`, and
its name and constructor here. This module imports no jax before a source is made. Invariant:
settings that pass `check_reward` make a source, unless its models cannot be used.
"""

import math
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_jax.rewards.config import DEFAULT_MAX_WORKERS
from tba_jax.rewards.functions import part_names, split_functions
from tba_jax.settings import GIVEN, need

if TYPE_CHECKING:
    from tba_jax.devices.site import Site
    from tba_jax.models.tokenizer import Tokenizer
    from tba_jax.rewards.source import RewardSource

START_MODEL = "embedded:start_model"
VICTIM = "victim"
LEARNED = (VICTIM,)
"""Rewards that are no functions, which tasks or `task.reward` select by name."""

Row = tuple[str, Mapping[str, Any]]
"""Prompt text and columns of one row of the data, for a trial of the functions."""


def check_reward(settings: Any, own: str, task: str) -> None:
    """Raise ConfigError if no reward is set, or its settings do not fit together.

    Args:
        settings: config of the run.
        own: the task's own reward, used if neither `task.reward` nor a reward model is set. If it
            is also empty, an environment gives the rewards.
        task: name of the task, for the error message.
    """
    reward = settings.task.reward
    need(
        bool(reward or own or settings.reward.model_path or settings.task.environment),
        "task.reward",
        reward,
        f"task {task} has no reward of its own, and reward.model_path names no reward model",
        "For example --config.task.reward=my_rewards.py:length_reward.",
    )
    need(
        _named(settings, own) != VICTIM or bool(settings.classifier.target),
        "classifier.target",
        settings.classifier.target,
        "task redteam needs a target",
        "Give a label (of an encoder), a verdict (of a guard) or a regular expression.",
    )


def reward_models(settings: Any, own: str) -> Mapping[str, str]:
    """Return role -> folder or hub ID of the models that the reward of a config loads."""
    found = {"reward model": settings.reward.model_path}
    if _named(settings, own) == VICTIM:
        found |= {"victim": _victim_path(settings), "classifier": settings.classifier.path}
    return {role: path for role, path in found.items() if path}


def make_source(
    settings: Any,
    own: str,
    row: Row,
    tokenizer: "Tokenizer",
    sites: "Sequence[Site]",
    logs: Path | None = None,
) -> "RewardSource | None":
    """Make the reward source of a config; None if the environment gives the rewards.

    Args:
        settings: config of the run.
        own: the task's own reward.
        tokenizer: tokenizer of the responses.
        sites: devices of the searchers, for models.
        logs: folder of the log files of reward processes; None: their output is that of this
            process.

    Raises:
        ValueError: the source cannot be used.
    """
    from tba_jax.rewards.batches import judge_dtype
    from tba_jax.rewards.reward_models import RewardModel

    named, reward = _named(settings, own), settings.reward
    sources: dict[str, RewardSource] = {}
    if named in LEARNED:
        sources[named] = _make_victim(settings, sites)
    elif named:
        sources |= _make_functions(settings, named, row, logs)
    if reward.model_path:
        sources["reward_model"] = RewardModel.load(
            reward.model_path,
            site=sites[0],
            param_dtype=judge_dtype(sites[0]),
            policy_tokenizer=tokenizer,
            missing_eos=None if reward.missing_eos == math.inf else reward.missing_eos,
        )
    if len(sources) < 2 and (not named or named in LEARNED):
        return next(iter(sources.values()), None)
    is_part = bool(settings.task.environment)
    return _sum(settings, sources, settings.task.reward_weights, is_part=is_part)


def make_judge(settings: Any, functions: str, row: Row, logs: Path | None) -> "RewardSource":
    """Make the sum of reward functions that judge an evaluation; arguments as of `make_source`."""
    return _sum(settings, _make_functions(settings, functions, row, logs), ())


def _sum(
    settings: Any,
    sources: "Mapping[str, RewardSource]",
    weights: Sequence[float],
    is_part: bool = False,
) -> "RewardSource":
    from tba_jax.rewards.source import WeightedSum

    return WeightedSum(
        tuple(sources),
        tuple(sources.values()),
        weights or (1.0,) * len(sources),
        # A victim rejects attacks that are too long, which is no failure.
        1.0 if VICTIM in sources else settings.reward.max_failure_rate,
        is_part,
    )


def _make_functions(
    settings: Any, functions: str, row: Row, logs: Path | None
) -> "dict[str, RewardSource]":
    from tba_jax.rewards.pool import RewardPool, start_workers

    names = split_functions(functions)
    is_importable = GIVEN.keys().isdisjoint(names)
    num_workers = (settings.reward.num_workers or workers_by_cores()) if is_importable else 0
    workers, timeout_s = start_workers(functions, num_workers, logs), settings.reward.timeout_s
    return {
        part: RewardPool(name, timeout_s=timeout_s, row=row, workers=workers)
        for part, name in zip(part_names(names), names, strict=True)
    }


def workers_by_cores() -> int:
    """Return the default number of reward processes: half of the cores, within limits.

    The other cores serve the threads that feed devices: an idle device costs more than a late
    reward.
    """
    # Only on Linux the cores of this process are known.
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own // 2, DEFAULT_MAX_WORKERS))


def _named(settings: Any, own: str) -> str:
    """Return the reward beside the reward model; a reward model replaces the task's own reward."""
    return settings.task.reward or ("" if settings.reward.model_path else own)


def _victim_path(settings: Any) -> str:
    return settings.victim.path or START_MODEL


def _make_victim(settings: Any, sites: "Sequence[Site]") -> "RewardSource":
    from tba_jax.rewards.batches import judge_dtype
    from tba_jax.rewards.victim import LIMITS, START_MODEL_LIMITS, VictimReward

    path = _victim_path(settings)
    return VictimReward(
        path,
        settings.victim.template,
        START_MODEL_LIMITS if path == START_MODEL else LIMITS,
        classifier=settings.classifier,
        dtype=judge_dtype(sites[0]),
        devices=[site.mesh.devices.flat[0] for site in sites],
        seed=settings.seed,
    )
