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
from tba_jax.settings import GIVEN, need

if TYPE_CHECKING:
    from tba_jax.devices.site import Site
    from tba_jax.models.tokenizer import Tokenizer
    from tba_jax.rewards.scores import RewardSource

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


def split_functions(text: str) -> tuple[str, ...]:
    """Return the function names of a config field, which separates names by commas.

    Raises:
        ValueError: a name does not have the form module:function or file.py:function.
    """
    functions = tuple(part.strip() for part in text.split(","))
    for function in functions:
        module, _, name = function.rpartition(":")
        if not module or not name or (":" in module and not module.endswith(".py")):
            raise ValueError(
                f"reward function {function!r}: want package.module:function or "
                "path/to/file.py:function, for example tba_jax.rewards.numeric:gsm8k_reward"
            )
    return functions


def make_source(
    settings: Any,
    own: str,
    row: Row,
    tokenizer: "Tokenizer",
    sites: "Sequence[Site]",
    logs: Path | None = None,
) -> "RewardSource | None":
    """Make the rewards of a config; None if the environment gives them.

    Args:
        settings: config of the run.
        own: the task's own reward.
        tokenizer: tokenizer of the responses.
        sites: devices of the searchers; models are on those of the first one.
        logs: folder of the log files of reward processes; None: their output is that of this
            process.

    Raises:
        ValueError: a reward cannot be used.
    """
    from tba_jax.rewards.reward_models import RewardModel
    from tba_jax.rewards.victim import LIMITS, START_MODEL_LIMITS, VictimReward

    named, path = _named(settings, own), settings.reward.model_path
    sources: dict[str, RewardSource] = {}
    if named == VICTIM:
        victim = _victim_path(settings)
        sources[named] = VictimReward(
            victim,
            settings.victim.template,
            START_MODEL_LIMITS if victim == START_MODEL else LIMITS,
            classifier=settings.classifier,
            seed=settings.seed,
            site=sites[0],
        )
    elif named:
        sources |= _functions(settings, named, row, logs)
    if path:
        missing_eos = settings.reward.missing_eos
        sources["reward_model"] = RewardModel(
            path,
            site=sites[0],
            policy_tokenizer=tokenizer,
            missing_eos=None if missing_eos == math.inf else missing_eos,
        )
    return _sum(settings, sources, settings.task.reward_weights) if sources else None


def make_judge(settings: Any, functions: str, row: Row, logs: Path | None) -> "RewardSource":
    """Make the sum of reward functions that judge an evaluation; arguments as of `make_source`."""
    return _sum(settings, _functions(settings, functions, row, logs), ())


def _sum(
    settings: Any, sources: "Mapping[str, RewardSource]", weights: Sequence[float]
) -> "RewardSource":
    from tba_jax.rewards.scores import WeightedSum

    return WeightedSum(sources, weights, settings.reward.max_failure_rate)


def _functions(
    settings: Any, functions: str, row: Row, logs: Path | None
) -> "dict[str, RewardSource]":
    from tba_jax.rewards.functions import RewardPool

    names = split_functions(functions)
    short = [name.rpartition(":")[2] for name in names]
    is_importable = GIVEN.keys().isdisjoint(names)
    num_workers = (settings.reward.num_workers or workers_by_cores()) if is_importable else 0
    return {
        part if short.count(part) == 1 else name: RewardPool(
            name,
            timeout_s=settings.reward.timeout_s,
            row=row,
            num_workers=is_importable * max(1, num_workers // len(names)),
            logs=logs,
        )
        for part, name in zip(short, names, strict=True)
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
