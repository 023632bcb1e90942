# SPDX-License-Identifier: Apache-2.0
"""Held-out evaluation of a run: its evaluator and metrics, its schedule, and requests for it.

The owner of the replay buffer owns the queue of evaluation shards. Searchers of the same process
take shards from the queue; searchers of other processes lease shards from the search server.
"""

import functools
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.evaluation.attacks import make_attack_metrics
from tba_jax.evaluation.config import EvalSettings
from tba_jax.evaluation.evaluator import Evaluator, Measure, MetricFunction, Station
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate, reference_distance
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.report.user_functions import UserFunctions
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import RewardSource
from tba_jax.run.errors import FleetError
from tba_jax.run.model_parts import make_padding, make_rollout_scoring, start_weights
from tba_jax.run.peers import Owner
from tba_jax.run.run import Run
from tba_jax.run.shared import Shared, make_episodes
from tba_jax.search.prompts import eval_prompts
from tba_jax.search.reference import Reference
from tba_jax.tasks.registry import Task, entry_of

_POLL_S = 0.01


class Judging(NamedTuple):
    """Evaluation metrics beyond rewards.

    Attributes:
        measures: functions that measure responses, for each searcher.
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
    note: Callable[[str], None] = print,
) -> Judging:
    """Make the measures and metrics that the config names, besides those of the task.

    Args:
        config: the config.
        tokenizer: tokenizer of the policy.
        model_config: architecture of policy and reference.
        gold: reward source that judges the win rate; None: no win rate.
        reference_params: function that returns the start model's weights on a site's devices.
        sites: site of each searcher that evaluates; searchers may share a site.
        note: function that prints errors of user-defined metrics.

    Raises:
        ConfigError: a user-defined metric cannot be used.
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
    if config.eval.metrics:
        own_metrics = UserFunctions("eval.metrics", config.eval.metrics, ("responses",), note)
        metrics.append(own_metrics)
    return Judging([tuple(measures[site]) for site in sites], tuple(metrics))


TASK_METRICS: dict[str, Callable[[EvalSettings], MetricFunction]] = {
    "attacks": make_attack_metrics,
}
"""Factory of the metric function for each name in a task's entry."""


def make_evaluator(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    stations: Sequence[Station],
    metrics: Sequence[MetricFunction] = (),
) -> Evaluator:
    """Make the evaluator of a config; `metrics` are added to those of the task.

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
    """Make the evaluator of a run, with a station for each searcher of this process.

    Args:
        shared: parts of the run.
        decoders: decoder of each site.
        graders: grader of each searcher.
        references: reference scorer of each site; metrics use its weights as the start model.
        note: function that prints the number of skipped prompts.
    """
    config, sites = shared.config, shared.sites.searchers
    start_params = functools.cache(functools.partial(load_start_weights, shared))
    lock = threading.Lock()  # Searchers that share devices load only one copy.

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
        note,
    )
    episodes = make_episodes(config, shared.task, shared.tokenizer, shared.rewards.environments)
    stations = [
        Station(decoders[site], grader, measures, episodes)
        for site, grader, measures in zip(sites, graders, judging.measures, strict=True)
    ]
    evaluator = make_evaluator(config, shared.task, shared.tokenizer, stations, judging.metrics)
    if evaluator.num_skipped:
        note(
            f"{evaluator.num_skipped} held-out prompts exceed task.max_prompt_tokens and "
            "are skipped"
        )
    return evaluator


def load_start_weights(shared: Shared, site: Site) -> Any:
    """Load the start model's weights in the layout and on the devices of a searcher."""
    # This function uses only devices of this process, so a single process may call it.
    source = shared.sites.reading(shared.model.config)
    load = source.locked(start_weights)
    return load(shared.config, shared.model.config, source.mesh, site.mesh)


def is_due(run: Run, step: int, newest: int) -> bool:
    """Return whether the version published at `step` must be evaluated.

    Args:
        run: the run.
        step: step of the publication.
        newest: version of the last requested evaluation; -1 before the first request.
    """
    if newest < 0:
        return True
    period = run.config.eval.period
    return bool(period) and step // period > newest // period and step < run.config.num_steps


def request(run: Run, version: int) -> None:
    """Request the evaluation of a version.

    Searchers of this process that already have a newer version take no shards.
    """
    latest = [run.search.transport.latest(i) for i in range(len(run.search.local))]
    found = [p.params if p is not None and p.version == version else None for p in latest]
    run.evaluations.request(version, found or [None])


def wind_up(run: Run) -> None:
    """Record finished evaluations, and drop requested evaluations that have not started.

    Started evaluations are finished together with the evaluation of the final policy.
    """
    run.evaluations.merge()
    run.record_evaluations()
    run.evaluations.forget(after=run.evaluations.newest_begun)


def evaluate_start_model(run: Run) -> None:
    """Evaluate the start model in a run that was interrupted before this evaluation.

    Does nothing without searchers in this process: `request_start_model` covers that case.
    """
    if run.cluster.is_primary and run.search.local:
        weights = load_start_weights(run.shared, run.shared.sites.evaluation)
        run.evaluate(0, weights)


def request_start_model(run: Run) -> None:
    """Request the evaluation of the start model from searchers of other processes."""
    if run.trainer.step_index and run.evaluated.before is None and not run.search.local:
        run.evaluations.request(0, [None])


def evaluate_now(run: Run, version: int) -> None:
    """Evaluate the newest version while no searcher samples, and record the result.

    All searchers work on shards: those of this process on a thread each, with driver=sync the first
    one on this thread.

    Raises:
        FleetError: this process has no searchers, and no other process takes the shards.
    """
    server = run.link.search_server if isinstance(run.link, Owner) else None
    request(run, version)
    if server is not None:
        server.set_version(version)
    stop, has_local, is_sync = StopFlag(), bool(run.search.local), run.config.driver == "sync"
    workers = [
        Worker(f"evaluator-{i}", functools.partial(run.evaluations.step, i), stop)
        for i in range(0 if is_sync else len(run.search.local))
    ]
    limit_s = run.config.remote.owner_timeout_s
    deadline = time.monotonic() + limit_s
    try:
        for worker in workers:
            worker.start()
        while not run.evaluations.is_idle:
            stop.check()
            if is_sync and has_local and run.evaluations.step():
                continue
            stop.wait(_POLL_S)
            if has_local or server is None:
                continue
            run.evaluations.merge()
            server.lose_silent_searchers()
            if server.gives_leases:
                deadline = time.monotonic() + limit_s
            elif time.monotonic() > deadline:
                raise FleetError(
                    f"no searcher took an evaluation shard of the final policy for {limit_s:.0f} s "
                    "(10 x config.remote.heartbeat_s). The final policy is saved. Start searchers, "
                    "then run the same command again to evaluate it"
                )
    finally:
        stop.set()
        for worker in workers:
            worker.join(_POLL_S)
    stop.check()
    run.evaluations.merge()
    run.record_evaluations()


def evaluate_last(run: Run) -> None:
    """Publish and evaluate the final policy unless already evaluated; all processes call this."""
    step = run.trainer.step_index
    if step < run.config.num_steps or run.evaluated.last_eval_step >= step:
        return
    run.logs.progress.phase("evaluating the final policy")
    run.trainer.publish()
    run.search.transport.poll()
    if run.shared.is_follower:
        run.evaluated.last_eval_step = step
    else:
        evaluate_now(run, step)
