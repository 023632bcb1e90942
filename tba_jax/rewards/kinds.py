# SPDX-License-Identifier: Apache-2.0
"""The rewards of a config: the weighted sum of functions, a reward model and a victim.

This module imports no jax before a model is made. Invariant: settings that pass `check_reward` make
rewards, unless a function or model cannot be used.
"""

import contextlib
import math
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_jax.rewards.config import DEFAULT_MAX_WORKERS, START_MODEL
from tba_jax.rewards.functions import RewardPool
from tba_jax.rewards.scores import RewardSource, WeightedSum
from tba_jax.settings import GIVEN, need

if TYPE_CHECKING:
    from tba_jax.devices.site import Site
    from tba_jax.models.tokenizer import Tokenizer

VICTIM = "victim"
"""The reward that is no function; tasks or `task.reward` select it by name."""


def _named(settings: Any, own: str) -> str:
    """Return the reward beside the reward model; a reward model replaces the task's own reward."""
    return settings.task.reward or ("" if settings.reward.model_path else own)


def check_reward(settings: Any, own: str, task: str) -> None:
    """Raise ConfigError if no reward is set, or its settings do not fit together.

    Args:
        own: the task's own reward, used if neither `task.reward` nor a reward model is set.
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
        victim = settings.victim.path or START_MODEL
        found |= {"victim": victim, "classifier": settings.classifier.path}
    return {role: path for role, path in found.items() if path}


def make_rewards(
    settings: Any, task: Any, tokenizer: "Tokenizer", site: "Site", logs: Path | None = None
) -> tuple[WeightedSum | None, WeightedSum | None]:
    """Make the rewards of a config, and the judge of its win rate.

    The rewards are None if the environment gives them; the judge is None without eval.gold.

    Args:
        task: the task of the config, with its own reward, and a row to try functions on.
        tokenizer: tokenizer of the responses.
        site: devices of models.
        logs: as in `WorkerPool`.

    Raises:
        ValueError: a reward cannot be used, the judge is missing, or the data of the judge has no
            reference responses.
    """
    gold, named, reward = settings.eval.gold, settings.task.name, settings.reward
    if not gold and task.metric == "win_rate":
        raise ValueError(
            f"task {named} has the metric win rate, which needs a judge; set --config.eval.gold to "
            "a reward model other than the one that trains, or to package.module:function"
        )
    if gold and "answer" not in task.first_row()[1]:
        raise ValueError(
            f"{gold} judges the win rate over reference responses, which are the column `answer` "
            f"of a prompt, and task {named} has no such column; add it to the data, or leave "
            "eval.gold empty"
        )
    trained = _named(settings, task.reward), reward.model_path, settings.task.reward_weights
    judge, made = (settings.eval.gold_reward, settings.eval.gold_model, ()), []
    for names, path, weights in (trained, judge):
        sources: dict[str, RewardSource] = {}
        if names == VICTIM:
            from tba_jax.rewards.reward_models import VictimReward

            parts = settings.victim, settings.classifier
            sources[names] = VictimReward(*parts, seed=settings.seed, site=site)
        elif names:
            sources |= _functions(settings, names, task, logs)
        if path:
            from tba_jax.rewards.reward_models import RewardModel

            missing_eos = math.inf if made else reward.missing_eos  # no penalty of the judge
            options: Any = {"policy_tokenizer": tokenizer, "missing_eos": missing_eos}
            sources["reward_model"] = RewardModel(path, site=site, **options)
        made.append(WeightedSum(sources, weights, reward.max_failure_rate) if sources else None)
    return made[0], made[1]


def try_functions(settings: Any, task: Any) -> None:
    """Load the reward functions, and those of the judge, of a config in processes."""
    for names in (_named(settings, task.reward), settings.eval.gold_reward):
        if names not in ("", VICTIM):
            with contextlib.closing(WeightedSum(_functions(settings, names, task, None))) as source:
                source.check()


def workers_by_cores() -> int:
    """Return the default number of reward processes: half of the cores; others feed devices."""
    # Only on Linux the cores of this process are known.
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own // 2, DEFAULT_MAX_WORKERS))


def _functions(settings: Any, given: str, task: Any, logs: Path | None) -> dict[str, RewardPool]:
    """Make reward functions, whose names are separated by commas."""
    names, reward = [name.strip() for name in given.split(",")], settings.reward
    options: Any = {"timeout_s": reward.timeout_s, "row": task.first_row(), "logs": logs}
    most = max(1, (reward.num_workers or workers_by_cores()) // len(names))
    options["num_workers"] = most if GIVEN.keys().isdisjoint(names) else 0
    short = [name.rpartition(":")[2] for name in names]
    labels = [part if short.count(part) == 1 else x for part, x in zip(short, names, strict=True)]
    return {x: RewardPool(name, **options) for x, name in zip(labels, names, strict=True)}
