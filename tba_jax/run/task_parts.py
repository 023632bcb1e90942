# SPDX-License-Identifier: Apache-2.0
"""Parts that depend on task and rewards: graders, environments, server, evaluator.

Invariant: a reward, judge or environment that cannot be used is refused before the first decode
step (tests/run/test_rewarding.py).
"""

from pathlib import Path

from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.environments.episodes import DEFAULT_WORKERS, EnvironmentPool
from tba_jax.evaluation.attacks import make_attack_metrics
from tba_jax.evaluation.evaluator import Evaluator, Measure, MetricFunction, ShardEvaluator
from tba_jax.evaluation.metrics import reference_distance, win_rate
from tba_jax.models import model as models
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.kinds import workers_by_cores
from tba_jax.rewards.scores import Grader, RewardSource
from tba_jax.run import model_parts
from tba_jax.search.prompts import PromptReader
from tba_jax.search.sampler import sampling_settings
from tba_jax.serving.chat import make_chat_format
from tba_jax.serving.protocol import Served
from tba_jax.serving.vllm import InferenceServer
from tba_jax.tasks.task import Task


def make_grader(
    config: Config, task: Task, tokenizer: Tokenizer, rewards: RewardSource | None
) -> Grader:
    """Make the grader of a task, with these rewards.

    Rewards that the user names are added to those of an environment, as in TRL; a task's own reward
    is not.
    """
    adds = bool(config.task.reward or config.reward.model_path)
    first_kind = task.response_kinds[0] if task.response_kinds else ""
    decode, kind_of = tokenizer.batch_decode, task.response_kind
    return Grader(rewards, decode, kind_of, first_kind, task.data_sets, adds)


def make_environments(
    config: Config, tokenizer: Tokenizer, logs: Path | None = None
) -> EnvironmentPool | None:
    """Return the processes of the configured environment; None without one."""
    if not config.task.environment:
        return None
    search, task = config.search, config.task
    chat = make_chat_format(tokenizer, task.renderer, task.chat_options)
    ids = model_parts.end_ids(config, tokenizer)
    limit, sampling = 1 + search.max_new_tokens, sampling_settings(search)
    return EnvironmentPool(
        task.environment,
        Served("policy", tokenizer, chat, ids, limit, sampling),
        max_turns=search.max_turns,
        timeout_s=config.reward.timeout_s,
        num_workers=config.reward.num_workers or max(DEFAULT_WORKERS, workers_by_cores()),
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
    named = f"task.environment = {environments.name!r}"
    has_other = config.task.reward or task.reward or config.reward.model_path
    if not (environments.has_reward or has_other):
        raise ValueError(
            f"{named} has no get_reward(), and no other reward is set. Add the method, or set "
            "--config.task.reward=my_rewards.py:score"
        )
    is_chat = not environments.is_agent and isinstance(task.problem("eval", 0)[0], list)
    if environments.has_tools and not (is_chat and config.task.renderer):
        raise ValueError(
            f"{named} has tools, which need chat prompts and the tool format of the model. Set "
            "--config.task.chat=True, and --config.task.renderer=qwen3 or another format of the "
            "library renderers"
        )
    served = environments.served
    if missing := tuple(sorted(set(served.chat.stop_ids) - set(served.eos_ids))):
        raise ValueError(
            f"task.renderer = {config.task.renderer!r}: a message also ends with the tokens "
            f"{list(missing)}. Set --config.search.stop_ids={missing}"
        )
    if environments.first_token_only and config.objective.built.needs.head == "log_z":
        raise ValueError(
            "objective.log_z = learned reads the prompt, which is one token for agents, tools and "
            "openenv:URL: log Z would be equal for all prompts. Set "
            "--config.objective.log_z=vargrad"
        )


def make_server(
    config: Config, model: models.Description, tokenizer: Tokenizer, workdir: Path
) -> InferenceServer | None:
    """Return the server that samples responses, if the config names one; it reads `workdir`."""
    if not (address := config.search.server):
        return None
    return InferenceServer(
        address,
        model,
        model_parts.policy_config(config, model.config),
        config.model.compute_dtype,
        workdir.absolute() / "adapters",
        longest=config.task.max_prompt_tokens + config.search.max_new_tokens,
        eos_ids=model_parts.end_ids(config, tokenizer),
        stop_strings=model_parts.stop_strings(config, tokenizer),
        timeout_s=config.log.watchdog_s / 4,
    )


def make_shard_evaluator(
    config: Config,
    decoder: Decoder,
    grader: Grader,
    measures: tuple[Measure, ...],
    environments: EnvironmentPool | None,
) -> ShardEvaluator:
    """Make the evaluator of shards on one set of devices."""
    search, n = config.search, config.eval.num_samples
    sampling = SamplingSettings(
        search.max_new_tokens, config.eval.temperature, min_new_tokens=search.min_new_tokens
    )
    num_slots = min(max(1, search.slots // n) * n, search.slots)
    return ShardEvaluator(decoder, grader, sampling, n, num_slots, measures, environments)


def make_evaluator(config: Config, reader: PromptReader) -> Evaluator:
    """Make the evaluator of a config; a shard has as many prompts as fill a searcher's slots."""
    task = reader.task
    prompts, num_skipped = reader.held_out(config.task.num_eval_prompts)
    per_shard = max(1, config.search.slots // config.eval.num_samples)
    metrics: list[MetricFunction] = []
    metrics += [make_attack_metrics(config.eval)] if task.metric == "success_rate" else []
    metrics += [win_rate, reference_distance] if config.eval.gold else []
    shard_size = min(per_shard, len(prompts))
    return Evaluator(prompts, num_skipped, shard_size, task.metric, tuple(metrics))
