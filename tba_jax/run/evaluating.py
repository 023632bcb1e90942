# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a run as its config asks for it: evaluator and metrics."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.evaluation.attacks import make_attack_metrics
from tba_jax.evaluation.config import EvalSettings
from tba_jax.evaluation.evaluator import Evaluator, Measure, MetricFunction, Station
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate, reference_distance
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import RewardSource
from tba_jax.run.modeling import make_padding, make_rollout_scoring, start_weights
from tba_jax.run.shared import Shared
from tba_jax.search.prompts import eval_prompts
from tba_jax.search.reference import Reference
from tba_jax.tasks.registry import Task, entry_of


class Judging(NamedTuple):
    """What the config asks for beside rewards.

    Attributes:
        measures: of each place where responses are drawn.
        metrics: made of all that was measured.
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
    """The measures and metrics that the config asks for.

    Args:
        config: the config.
        tokenizer: of the policy.
        model_config: architecture of policy and reference.
        gold: judge of the win rate, if any.
        reference_params: gives the start model's weights at a site.
        sites: that evaluate, equal ones more than once.
    """
    measures: dict[Site, list[Measure]] = {site: [] for site in sites}
    metrics: list[MetricFunction] = []
    if gold is not None:
        win_rate = WinRate(gold, tokenizer)
        metrics.append(win_rate)
        for own in measures.values():
            own.append(win_rate.measure)
    if config.eval.reference_metrics:
        metrics.append(reference_distance)
        for site, own in measures.items():
            distance = ReferenceDistance(
                model_config,
                functools.partial(reference_params, site),
                scoring=make_rollout_scoring(config, tokenizer.eos_ids),
                padding=make_padding(config, tokenizer.pad_id, config.eval.max_new_tokens),
                site=site,
            )
            own.append(distance.measure)
    return Judging([tuple(measures[site]) for site in sites], tuple(metrics))


TASK_METRICS: dict[str, Callable[[EvalSettings], MetricFunction]] = {
    "attacks": make_attack_metrics,
}
"""Name in a task's entry -> its metric function."""


def make_evaluator(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    stations: Sequence[Station],
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
        stations=stations,
        settings=config.eval,
        metric=task.metric,
        min_new_tokens=config.search.min_new_tokens,
        metrics=(*(TASK_METRICS[name](config.eval) for name in own), *metrics),
    )


def build_evaluator(
    shared: Shared,
    decoders: Mapping[Site, Decoder],
    graders: Sequence[Grader],
    references: Mapping[Site, Reference],
    note: Callable[[str], None],
) -> Evaluator:
    """The evaluator of a run, with a station for each searcher of this process.

    Args:
        shared: what it stands on.
        decoders: by site.
        graders: of the searchers.
        references: by site; where there is one it also is the start model of the metrics.
        note: told how many prompts are skipped.
    """
    config, sites = shared.config, shared.sites.searchers
    start_params = functools.cache(functools.partial(load_start_weights, shared))
    lock = threading.Lock()  # searchers that share devices load once

    def reference_params(site: Site) -> Any:
        if site in references:
            return references[site].params
        with lock:
            return start_params(site)

    judging = make_judging(
        config,
        shared.tokenizer,
        shared.model.config,
        shared.rewards.gold,
        reference_params,
        sites,
    )
    stations = [
        Station(decoders[site], grader, measures)
        for site, grader, measures in zip(sites, graders, judging.measures, strict=True)
    ]
    evaluator = make_evaluator(config, shared.task, shared.tokenizer, stations, judging.metrics)
    if evaluator.num_skipped:
        note(f"{evaluator.num_skipped} held-out prompts exceed task.max_prompt_tokens: skipped")
    return evaluator


def load_start_weights(shared: Shared, site: Site) -> Any:
    """The start model's weights where a searcher decodes."""
    # From devices of this process: the others go on meanwhile.
    source = shared.sites.reading(shared.model.config)
    load = source.in_turn(start_weights)
    return load(shared.config, shared.model.config, source.mesh, site.mesh)
