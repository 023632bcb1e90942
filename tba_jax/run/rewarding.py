# SPDX-License-Identifier: Apache-2.0
"""The task of a run and its sources of rewards, as its config asks for them.

Text rewards in processes, reward models, and the victim of red-teaming with its classifier. Models
lie where searchers decode: a reward model is divided over the devices of each, a victim and its
classifier have a copy on the first one of each. It knows the config and every kind of source; it
does not know who asks them or what for. Invariant: a config whose rewards or judge cannot be used
is refused here, before anything is decoded.
"""

import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp

from tba_jax.config.schema import Config
from tba_jax.devices.site import Site
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.classifiers import ClassifierSettings, make_classifier
from tba_jax.rewards.pool import RewardPool
from tba_jax.rewards.reward_models import RewardModel
from tba_jax.rewards.source import RewardSource
from tba_jax.rewards.victim import Victim, VictimReward, VictimSettings
from tba_jax.run.modeling import START_MODEL
from tba_jax.tasks.registry import Task, get_task


def make_task(config: Config) -> Task:
    """The task of a config; its data is read when first used.

    Raises:
        ValueError: no such task, or not with this data.
    """
    task = config.task
    return get_task(task.name, task.data_path, num_held_out=task.num_eval_prompts, chat=task.chat)


def make_rewards(
    config: Config,
    task: Task,
    policy_tokenizer: Tokenizer,
    sites: Sequence[Site],
) -> RewardSource:
    """The source of rewards for training and evaluation; close it after use.

    Args:
        config: the config.
        task: its task.
        policy_tokenizer: of the responses.
        sites: of the searchers, for models that rewards need; a reward model is divided over the
            first (`rewards_on` makes those of the others), a victim has a copy on a device of each.

    Raises:
        ValueError: the reward function or model cannot be used, or there is none.
    """
    if config.reward.model_path:
        missing_eos = config.reward.missing_eos
        return RewardModel.load(
            config.reward.model_path,
            site=sites[0],
            param_dtype=jnp.dtype(config.reward.dtype),
            policy_tokenizer=policy_tokenizer,
            batch_size=config.reward.batch_size,
            missing_eos=None if missing_eos == math.inf else missing_eos,
            offset=config.reward.offset,
        )
    function = config.task.reward or task.reward
    if not function and task.name == "redteam":
        return make_victim_reward(config, [site.mesh.devices.flat[0] for site in sites])
    if not function:
        raise ValueError(
            f"task {task.name} has no reward of its own; set --config.reward.model_path to a "
            "reward model, or --config.task.reward=package.module:function"
        )
    return _reward_pool(config, task, function, config.task.reward_weights)


def _reward_pool(
    config: Config, task: Task, function: str, weights: Sequence[float] = ()
) -> RewardPool:
    return RewardPool(
        function,
        num_workers=config.reward.num_workers,
        timeout_s=config.reward.timeout_s,
        max_failure_rate=config.reward.max_failure_rate,
        weights=weights,
        columns=tuple(task.eval_problem(0)[1]),
    )


def rewards_on(rewards: RewardSource, site: Site) -> RewardSource:
    """A reward model on a searcher's devices; other sources as they are."""
    return rewards.on(site) if isinstance(rewards, RewardModel) else rewards


def make_gold(
    config: Config,
    task: Task,
    policy_tokenizer: Tokenizer,
    site: Site,
) -> RewardSource | None:
    """The judge of the win rate, None where the config names none; close it after use.

    Args:
        config: the config.
        task: its task.
        policy_tokenizer: of the responses.
        site: of the searcher that evaluates; a model is divided over it.

    Raises:
        ValueError: it cannot be used, there is nothing to compare responses with, or the task's
            headline is the win rate and there is no judge.
    """
    judge = config.eval.gold_model or config.eval.gold_reward
    if judge and "answer" not in task.eval_problem(0)[1]:
        raise ValueError(
            f"{judge} judges the win rate over reference responses, which are the column `answer` "
            f"of a prompt, and task {task.name} has no such column; add it to the data, or leave "
            "eval.gold_model and eval.gold_reward empty"
        )
    if config.eval.gold_model:
        return RewardModel.load(
            config.eval.gold_model,
            site=site,
            param_dtype=jnp.dtype(config.eval.gold_dtype),
            policy_tokenizer=policy_tokenizer,
            batch_size=config.reward.batch_size,
        )
    if config.eval.gold_reward:
        return _reward_pool(config, task, config.eval.gold_reward)
    if task.metric == "win_rate":
        raise ValueError(
            f"task {task.name} is judged by its win rate, and nothing judges; set "
            "--config.eval.gold_model to a reward model other than the one that trains, or "
            "--config.eval.gold_reward=package.module:function"
        )
    return None


def make_victim_reward(config: Config, devices: Sequence[Any]) -> VictimReward:
    """Victim and classifier, one copy on each of the devices.

    Raises:
        ValueError: one of the two is not usable; says which.
    """
    v, c = config.victim, config.classifier
    settings = VictimSettings(
        template=v.template,
        num_samples=v.num_samples,
        temperature=v.temperature,
        top_p=v.top_p,
        max_new_tokens=v.max_new_tokens,
        max_prompt_tokens=v.max_prompt_tokens,
        num_slots=v.num_slots,
    )
    victim = Victim(v.path or str(START_MODEL), settings, devices=devices, dtype=v.dtype)
    judge = ClassifierSettings(
        kind=c.kind,
        path=c.path,
        target=c.target,
        dtype=c.dtype,
        max_tokens=c.max_tokens,
        batch_rows=c.batch_rows,
    )
    classifiers = {device: make_classifier(judge, device) for device in dict.fromkeys(devices)}
    return VictimReward(
        victim, classifiers, replicas=devices, num_samples=v.num_samples, seed=config.seed
    )
