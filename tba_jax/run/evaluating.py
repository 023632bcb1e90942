# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a run as its config asks for it: evaluator and metrics."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.evaluation.attacks import make_attack_metrics
from tba_jax.evaluation.config import EvalSettings
from tba_jax.evaluation.evaluator import Evaluator, MetricFunction
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.rewards.source import RewardSource
from tba_jax.run.modeling import make_padding, make_rollout_scoring, start_weights
from tba_jax.run.rewarding import make_grader
from tba_jax.run.shared import Shared
from tba_jax.search.prompts import eval_prompts
from tba_jax.search.reference import Reference
from tba_jax.tasks.registry import Task, entry_of


def make_metrics(
    config: Config,
    tokenizer: Tokenizer,
    model_config: TransformerConfig,
    gold: RewardSource | None,
    reference_params: Callable[[], Any],
    site: Site = ANY_DEVICE,
) -> list[MetricFunction]:
    """The metric functions that the config asks for.

    Args:
        config: the config.
        tokenizer: of the policy.
        model_config: architecture of policy and reference.
        gold: judge of the win rate, if any.
        reference_params: gives the start model's weights on the device that evaluates.
        site: of the searcher that evaluates.
    """
    metrics: list[MetricFunction] = []
    if gold is not None:
        metrics.append(WinRate(gold, tokenizer))
    if config.eval.reference_metrics:
        metrics.append(
            ReferenceDistance(
                model_config,
                reference_params,
                scoring=make_rollout_scoring(config, tokenizer.eos_ids),
                padding=make_padding(config, tokenizer.pad_id, config.eval.max_new_tokens),
                site=site,
            )
        )
    return metrics


TASK_METRICS: dict[str, Callable[[EvalSettings], MetricFunction]] = {
    "attacks": make_attack_metrics,
}
"""Name in a task's entry -> its metric function."""


def make_evaluator(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    decoder: Decoder,
    rewards: RewardSource,
    metrics: Sequence[MetricFunction] = (),
) -> Evaluator:
    """Held-out evaluation as the config says; `metrics` beyond those of the task.

    Raises:
        ValueError: a model that the task's metrics need is not usable.
    """
    own = entry_of(config.task.name).metrics
    prompts, num_skipped = eval_prompts(
        task,
        tokenizer,
        config.task.num_eval_prompts,
        config.task.max_prompt_tokens,
        config.task.long_prompts,
    )
    return Evaluator(
        prompts=prompts,
        num_skipped=num_skipped,
        decoder=decoder,
        grader=make_grader(task, tokenizer, rewards),
        settings=config.eval,
        metric=task.metric,
        min_new_tokens=config.search.min_new_tokens,
        metrics=(*(TASK_METRICS[name](config.eval) for name in own), *metrics),
    )


def build_evaluator(
    shared: Shared,
    decoder: Decoder,
    references: Mapping[Site, Reference],
    note: Callable[[str], None],
) -> Evaluator:
    """The evaluator of a run, on the devices of searcher 0.

    Args:
        shared: what it stands on.
        decoder: of those devices.
        references: by site; where there is one it also is the start model of the metrics.
        note: told how many prompts are skipped.
    """
    config, site, gold = shared.config, shared.sites.evaluation, shared.rewards.gold

    @functools.cache
    def start_params() -> Any:
        return references[site].params if site in references else load_start_weights(shared)

    metrics = make_metrics(config, shared.tokenizer, shared.model.config, gold, start_params, site)
    evaluator = make_evaluator(
        config, shared.task, shared.tokenizer, decoder, shared.rewards.source, metrics
    )
    if evaluator.num_skipped:
        note(f"{evaluator.num_skipped} held-out prompts exceed task.max_prompt_tokens: skipped")
    return evaluator


def load_start_weights(shared: Shared) -> Any:
    """The start model's weights where searcher 0 decodes."""
    # From devices of this process: only one evaluates, and the others go on meanwhile.
    source = shared.sites.reading(shared.model.config)
    load = source.in_turn(start_weights)
    return load(shared.config, shared.model.config, source.mesh, shared.sites.evaluation.mesh)
