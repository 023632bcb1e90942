# SPDX-License-Identifier: Apache-2.0
"""The task of a run and its sources of rewards, as its config asks for them.

Models lie where searchers decode: a reward model is divided over the devices of each, a victim and
its classifier have a copy on the first one of each. It knows the config; it does not know the kinds
of sources (`rewards.kinds` does), who asks them or what for. Invariant: a config whose rewards or
judge cannot be used is refused here, before anything is decoded.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax.numpy as jnp

from tba_jax.config.schema import Config
from tba_jax.devices.site import Site
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.kinds import FUNCTIONS, Use, kind_of
from tba_jax.rewards.reward_models import RewardModel
from tba_jax.rewards.source import Elsewhere, RewardSource
from tba_jax.run.placing import Sites
from tba_jax.search.rollout import Sampler
from tba_jax.search.vine import Vine
from tba_jax.tasks.registry import Task, get_task


def make_task(config: Config) -> Task:
    """The task of a config; its data is read when first used.

    Raises:
        ValueError: no such task, or not with this data.
    """
    task = config.task
    return get_task(
        task.name, task.data_path, task.num_eval_prompts, chat=task.chat, columns=task.columns
    )


class Rewards(NamedTuple):
    """What gives rewards and what judges.

    Attributes:
        source: what training learns from and evaluation reports.
        gold: the judge of the win rate, None where the config names none.
    """

    source: RewardSource
    gold: RewardSource | None

    def check(self) -> None:
        """Raise RuntimeError where one of them cannot be used."""
        for source in filter(None, self):
            source.check()

    def close(self) -> None:
        """Stop what computes rewards."""
        for source in filter(None, self):
            source.close()


def open_rewards(config: Config, task: Task, tokenizer: Tokenizer, sites: Sites) -> Rewards:
    """Rewards and judge of a run; raises ValueError as `make_rewards` and `make_gold`.

    Where nobody searches nothing is asked for: those that are elsewhere have them.
    """
    if not sites.searchers:
        judges = config.eval.gold_model or config.eval.gold_reward
        return Rewards(Elsewhere(), Elsewhere() if judges else None)
    return Rewards(
        make_rewards(config, task, tokenizer, sites.searchers),
        make_gold(config, task, tokenizer, sites.evaluation),
    )


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
            first (`RewardSource.on` gives those of the others), a victim has a copy on a device of
            each.

    Raises:
        ValueError: the reward function or model cannot be used, or there is none.
    """
    reward = config.task.reward or task.reward
    kind = kind_of(config, config.task.reward, task.reward, task.name)
    use = _use(task, policy_tokenizer, sites, reward, config.task.reward_weights)
    return kind.make(config, use)


def _use(
    task: Task,
    policy_tokenizer: Tokenizer,
    sites: Sequence[Site],
    functions: str,
    weights: Sequence[float] = (),
) -> Use:
    return Use(functions, weights, first_row(task), policy_tokenizer, sites)


def first_row(task: Task) -> tuple[str, Mapping[str, Any]]:
    """Prompt text and columns of the first held-out row; a chat is the column `prompt`."""
    prompt, columns = task.eval_problem(0)
    return prompt if isinstance(prompt, str) else prompt[-1]["content"], columns


def make_grader(task: Task, tokenizer: Tokenizer, rewards: RewardSource) -> Grader:
    """Grades as the task's kinds and these rewards want it."""
    first_kind = task.response_kinds[0] if task.response_kinds else ""
    return Grader(rewards, tokenizer.batch_decode, task.response_kind, first_kind)


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
        use = _use(task, policy_tokenizer, [site], config.eval.gold_reward)
        return FUNCTIONS.make(config, use)
    if task.metric == "win_rate":
        raise ValueError(
            f"task {task.name} is judged by its win rate, and nothing judges; set "
            "--config.eval.gold_model to a reward model other than the one that trains, or "
            "--config.eval.gold_reward=package.module:function"
        )
    return None


def make_vine(config: Config, sampler: Sampler, grader: Grader) -> Vine | None:
    """What estimates values of states; None where the objective reads none."""
    if not config.search.vine_tokens:
        return None
    return Vine(sampler, grader, config.search.vine_tokens, config.search.vine_samples)
