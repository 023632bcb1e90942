# SPDX-License-Identifier: Apache-2.0
"""Parts that depend on task and rewards: data, graders, environments, judges, evaluator.

Invariant: a reward, judge or environment that cannot be used is refused before the first decode
step (tests/run/test_rewarding.py).
"""

import contextlib
import functools
import importlib.util
import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.config.resolved import asked
from tba_jax.config.rules import validate
from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.placement import divide
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.environments.pool import DEFAULT_WORKERS, EnvironmentPool
from tba_jax.evaluation.attacks import make_attack_metrics
from tba_jax.evaluation.evaluator import Evaluator, Measure, MetricFunction, ShardEvaluator
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate, reference_distance
from tba_jax.models.hf import folders
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.report.writers import TRACKER_PACKAGES
from tba_jax.rewards.batches import judge_dtype
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.kinds import (
    LEARNED,
    make_judge,
    make_source,
    reward_models,
    workers_by_cores,
)
from tba_jax.rewards.reward_models import RewardModel
from tba_jax.rewards.source import RewardSource
from tba_jax.run import model_parts
from tba_jax.run.model_parts import end_ids, make_padding, make_scoring
from tba_jax.run.peers import start_cluster
from tba_jax.search.prompts import PromptReader, text_of
from tba_jax.search.sampler import sampling_settings
from tba_jax.serving.chat import make_chat_format
from tba_jax.serving.protocol import Served
from tba_jax.serving.vllm import InferenceServer
from tba_jax.settings import ConfigError
from tba_jax.tasks.mixture import Mixture
from tba_jax.tasks.registry import get_task, task_class
from tba_jax.tasks.task import Task

TASK_METRICS = {"attacks": make_attack_metrics}
"""Factory of the metric function for each name in a task's entry."""


def make_task(config: Config) -> Task:
    """Return the task of a config; its data is read at first use.

    Raises:
        ValueError: the task is unknown, or does not accept this data.
    """
    task = config.task
    return get_task(
        task.name, task.data_path, task.num_eval_prompts, chat=task.chat, columns=task.columns
    )


def make_reader(config: Config, task: Task, tokenizer: Tokenizer) -> PromptReader:
    """Return the reader of the task's prompts."""
    return PromptReader(task, tokenizer, config.task.max_prompt_tokens)


def first_row(task: Task) -> tuple[str, Mapping[str, Any]]:
    """Return prompt text and columns of the first held-out row; a chat is the column `prompt`."""
    prompt, columns = task.problem("eval", 0)
    return prompt if isinstance(prompt, str) else prompt[-1]["content"], columns


# Rewards.


def make_rewards(
    config: Config,
    task: Task,
    policy_tokenizer: Tokenizer,
    sites: Sequence[Site],
    logs: Path | None = None,
) -> RewardSource | None:
    """Make the source of rewards for training and evaluation; the caller closes it.

    Args:
        sites: sites of the searchers, for models that rewards need. A reward model is divided over
            the first site; `RewardSource.on` gives copies for the others. A victim has a copy on
            one device of each site.
        logs: folder of the log files of reward processes; None: their output is that of this
            process.

    Returns:
        The source; None if the environment gives the rewards.

    Raises:
        ValueError: the reward function or model cannot be used, or no reward is set.
    """
    return make_source(config, task.reward, first_row(task), policy_tokenizer, sites, logs)


def make_grader(
    config: Config, task: Task, tokenizer: Tokenizer, rewards: RewardSource | None
) -> Grader:
    """Make the grader of a task, with these rewards.

    Rewards that the user names are added to those of an environment, as in TRL; a task's own reward
    is not.
    """
    adds = bool(config.task.reward or config.reward.model_path)
    first_kind = task.response_kinds[0] if task.response_kinds else ""
    data_sets = task.data_sets if isinstance(task, Mixture) else ()
    return Grader(rewards, tokenizer.batch_decode, task.response_kind, first_kind, data_sets, adds)


def make_gold(
    config: Config, task: Task, tokenizer: Tokenizer, site: Site, logs: Path | None = None
) -> RewardSource | None:
    """Make the judge of the win rate, on the site of a searcher; None without eval.gold.

    Raises:
        ValueError: the judge cannot be used or is missing, or the data has no reference responses.
    """
    if not config.eval.gold:
        if task.metric == "win_rate":
            raise ValueError(
                f"task {task.name} has the metric win rate, which needs a judge; set "
                "--config.eval.gold to a reward model other than the one that trains, or to "
                "package.module:function"
            )
        return None
    if "answer" not in task.problem("eval", 0)[1]:
        raise ValueError(
            f"{config.eval.gold} judges the win rate over reference responses, which are the "
            f"column `answer` of a prompt, and task {task.name} has no such column; add it to the "
            "data, or leave eval.gold empty"
        )
    if config.eval.gold_model:
        return RewardModel.load(
            config.eval.gold_model,
            site=site,
            param_dtype=judge_dtype(site),
            policy_tokenizer=tokenizer,
        )
    return make_judge(config, config.eval.gold_reward, first_row(task), logs)


def try_rewards(config: Config, task: Task) -> None:
    """Load the reward functions and the judge in processes, and try them on a row of the task.

    Raises:
        ValueError, RewardFailure: a function cannot be used.
    """
    own = "" if config.reward.model_path else task_class(config.task.name).reward
    for names in (config.task.reward or own, config.eval.gold_reward):
        if names and names not in LEARNED:
            with contextlib.closing(make_judge(config, names, first_row(task), None)) as source:
                source.check()


# Environments and servers.


def make_environments(
    config: Config, tokenizer: Tokenizer, logs: Path | None = None
) -> EnvironmentPool | None:
    """Return the processes of the configured environment; None without one."""
    if not config.task.environment:
        return None
    search, renderer = config.search, config.task.renderer
    served = Served(
        "policy",
        tokenizer,
        make_chat_format(tokenizer, renderer),
        end_ids(config, tokenizer.eos_ids),
        1 + search.max_new_tokens,
        sampling_settings(search),
    )
    return EnvironmentPool(
        config.task.environment,
        served,
        max_turns=search.max_turns,
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers or max(DEFAULT_WORKERS, workers_by_cores()),
        has_schemas=bool(renderer),
        logs=logs,
    )


def check_environments(config: Config, task: Task, environments: EnvironmentPool | None) -> None:
    """Refuse an environment that cannot be used with this task; None is accepted.

    Raises:
        ValueError: the environment, or the chat format with it, cannot be used.
    """
    if environments is None:
        return
    environments.check()
    has_other = config.task.reward or task.reward or config.reward.model_path
    if not (environments.has_reward or has_other):
        raise ValueError(
            f"task.environment = {environments.name!r} has no get_reward(), and no other reward is "
            "set. Add the method, or set --config.task.reward=my_rewards.py:score"
        )
    is_chat = not environments.is_agent and isinstance(task.problem("eval", 0)[0], list)
    if environments.has_tools and not (is_chat and config.task.renderer):
        raise ValueError(
            f"task.environment = {environments.name!r} has tools, which need chat prompts and the "
            "tool format of the model. Set --config.task.chat=True, and --config.task.renderer="
            "qwen3 or another format of the library renderers"
        )
    served = environments.served
    missing = tuple(sorted(set(served.chat.stop_ids) - set(served.eos_ids)))
    if missing:
        raise ValueError(
            f"task.renderer = {config.task.renderer!r}: a message also ends with the tokens "
            f"{list(missing)}. Set --config.search.stop_ids={missing}"
        )
    if environments.first_token_only and config.objective.built.needs.head == "log_z":
        raise ValueError(
            "objective.log_z = learned reads the prompt, which is one token for agents and for "
            "tools of chat models: log Z would be equal for all prompts. Set "
            "--config.objective.log_z=vargrad"
        )


def make_server(
    config: Config, policy: TransformerConfig, tokenizer: Tokenizer, workdir: Path
) -> InferenceServer | None:
    """Return the server that samples responses, if the config names one.

    Args:
        workdir: folder to which adapters are written; the server reads them there.
    """
    if not config.search.server:
        return None
    return InferenceServer(
        config.search.server,
        policy,
        model_parts.model_path(config),
        workdir / "adapters",
        longest=config.task.max_prompt_tokens + config.search.max_new_tokens,
        eos_ids=end_ids(config, tokenizer.eos_ids),
        stop_strings=model_parts.stop_strings(config, tokenizer),
        timeout_s=config.log.watchdog_s / 4,
    )


# Evaluation.


class Judging(NamedTuple):
    """Evaluation metrics beyond rewards.

    Attributes:
        measures: for each searcher, functions that measure responses.
        metrics: functions that summarise all measurements.
    """

    measures: list[tuple[Measure, ...]]
    metrics: tuple[MetricFunction, ...]


def make_judging(
    config: Config,
    tokenizer: Tokenizer,
    model_config: TransformerConfig,
    gold: RewardSource | None,
    reference_params: Callable[[Site], Any],
    sites: Sequence[Site] = (ANY_DEVICE,),
) -> Judging:
    """Make the measures and metrics that the config names, besides those of the task.

    Args:
        gold: reward source that judges the win rate; None: other processes judge.
        reference_params: function that returns the start model's weights on a site's devices.
        sites: site of each searcher that evaluates; searchers may share a site.
    """
    measures: dict[Site, list[Measure]] = {site: [] for site in sites}
    metrics: list[MetricFunction] = []
    lock, load = threading.Lock(), functools.cache(reference_params)

    def params_on(site: Site) -> Any:  # searchers that share devices load only one copy
        with lock:
            return load(site)

    if config.eval.gold:
        win_rate = WinRate(gold, tokenizer)
        metrics.append(win_rate)
        for own in measures.values():
            own.append(win_rate.measure)
    if config.eval.reference_metrics:
        metrics.append(reference_distance)
        for site, own in measures.items():
            distance = ReferenceDistance(
                model_config,
                functools.partial(params_on, site),
                scoring=make_scoring(config, tokenizer.eos_ids),
                padding=make_padding(config, tokenizer.pad_id),
                site=site,
            )
            own.append(distance.measure)
    return Judging([tuple(measures[site]) for site in sites], tuple(metrics))


def make_shard_evaluator(
    config: Config,
    decoder: Decoder,
    grader: Grader,
    measures: tuple[Measure, ...],
    environments: EnvironmentPool | None,
) -> ShardEvaluator:
    """Make the evaluator of shards on one set of devices."""
    sampling = SamplingSettings(
        config.search.max_new_tokens,
        temperature=config.eval.temperature,
        min_new_tokens=config.search.min_new_tokens,
    )
    n, slots = config.eval.num_samples, config.search.slots
    num_slots = min(max(1, slots // n) * n, slots)
    return ShardEvaluator(decoder, grader, sampling, n, num_slots, measures, environments)


def make_evaluator(
    config: Config, task: Task, tokenizer: Tokenizer, metrics: Sequence[MetricFunction] = ()
) -> Evaluator:
    """Make the evaluator of a config; `metrics` are added to those of the task.

    A shard has as many prompts as fill the slots of a searcher.

    Raises:
        ValueError: a model that the task's metrics need is not usable.
    """
    reader = make_reader(config, task, tokenizer)
    prompts, num_skipped = reader.held_out(config.task.num_eval_prompts)
    per_shard = max(1, config.search.slots // config.eval.num_samples)
    own = [TASK_METRICS[name](config.eval) for name in task_class(config.task.name).metrics]
    return Evaluator(
        prompts=prompts,
        num_skipped=num_skipped,
        shard_size=min(per_shard, len(prompts)),
        metric=task.metric,
        metrics=(*own, *metrics),
    )


# Checks before a run.


def preflight(config: Config) -> None:
    """Check config, packages, data, model, rewards and devices, in this order.

    Weights are not read. The reward functions are tried on one row, in separate processes.

    Raises:
        ConfigError, ValueError, RewardFailure, OSError: the first problem.
    """
    validate(config)
    kind = config.log.tracker.partition(":")[0]
    wanted = {kind: TRACKER_PACKAGES[kind]} if kind else {}
    wanted |= {"fleet": "ray"} if config.placement == "fleet" else {}
    for extra, package in wanted.items():
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"config.{'placement' if extra == 'fleet' else 'log.tracker'} needs the package "
                f"{package}: pip install 'tba_jax[{extra}]'"
            )
    task = make_task(config)
    task.size("train")
    model = model_parts.describe_model(config, with_weights=False)
    policy = model_parts.policy_config(config, model.config)
    model_parts.longest_sequence(config, model.config)
    tokenizer = model.load_tokenizer()
    text_of(task, tokenizer, "train", 0)
    try_rewards(config, task)
    models = reward_models(config, task_class(config.task.name).reward)
    for path in filter(None, (*models.values(), config.eval.gold_model)):
        folders.load_config(folders.resolve(path, with_weights=False))
    server = make_server(config, policy, tokenizer, Path())
    if server is not None:
        server.check()
    if config.placement != "hosts":  # the devices of other hosts are not known here
        start_cluster(config)
        import jax

        divide(config.placement, jax.local_devices(), asked(config), jax.process_index())
