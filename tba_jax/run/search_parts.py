# SPDX-License-Identifier: Apache-2.0
"""The searchers of a process: decoders, prompts, weights, and the evaluator.

All of these are built from the shared parts, without the trainer.
"""

import dataclasses
import functools
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import ANY_DEVICE, Site, Sites
from tba_jax.environments.episode import Sessions
from tba_jax.environments.episodes import Episodes
from tba_jax.evaluation.attacks import make_attack_metrics
from tba_jax.evaluation.config import EvalSettings
from tba_jax.evaluation.evaluator import Evaluator, Measure, MetricFunction, ShardEvaluator
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate, reference_distance
from tba_jax.flow.tickets import Ticket
from tba_jax.models import lora
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import RewardSource
from tba_jax.run.model_parts import (
    adapter_shardings,
    make_decoder,
    make_padding,
    make_publication,
    make_scoring,
    searcher_shardings,
    start_weights,
    swaps_in_flight,
)
from tba_jax.run.object_store import storage_of
from tba_jax.run.shared import Shared, make_episodes, make_grader
from tba_jax.search.prompts import PromptReader, Prompts
from tba_jax.search.sampler import Sampler, StateValues
from tba_jax.search.searcher import SearchParts
from tba_jax.search.start_data import GivenScorer, load_start_tickets, make_start_program
from tba_jax.serving.inference_server import InferenceServer
from tba_jax.serving.server_session import ServerDecoder
from tba_jax.storage.steps import delete_own
from tba_jax.tasks.registry import Task, entry_of
from tba_jax.weights.folder import FOLDER, StoredWeights, WeightFolder
from tba_jax.weights.memory import OnDevices, Weights
from tba_jax.weights.publication import Published, make_publish_program


def make_reader(config: Config, task: Task, tokenizer: Tokenizer) -> PromptReader:
    """Return the reader of the task's prompts."""
    limit, long_prompts = config.task.max_prompt_tokens, config.task.long_prompts
    return PromptReader(task, tokenizer, limit, long_prompts)


def make_prompts(shared: Shared) -> Prompts:
    """Return the training prompts in the order of tickets."""
    return Prompts(make_reader(shared.config, shared.task, shared.tokenizer), shared.config.seed)


def read_start_tickets(shared: Shared) -> list[Ticket]:
    """Return the tickets of the given responses in task.start_path, if it is set."""
    config = shared.config
    if not config.task.start_path:
        return []
    reader = PromptReader(shared.task, shared.tokenizer, config.task.max_prompt_tokens, "skip")
    return load_start_tickets(config.task.start_path, reader, shared.tokenizer, config.search)


def make_given_scorer(shared: Shared, site: Site) -> GivenScorer | None:
    """Return the scorer of given responses on a site; None without task.start_path."""
    config, tokenizer = shared.config, shared.tokenizer
    if not config.task.start_path:
        return None
    program = make_start_program(
        shared.model.config,
        make_scoring(config, tokenizer.eos_ids),
        max_new_tokens=config.search.max_new_tokens,
        site=site,
    )
    return GivenScorer(
        program,
        samples_per_prompt=config.search.samples_per_prompt,
        temperature=config.search.sampling_temperature,
        padding=make_padding(config, tokenizer.pad_id),
    )


class Arrival(NamedTuple):
    """Conversion of published weights for searchers.

    Attributes:
        layout: converts weights from files to the decoder's layout; None: no conversion.
        shardings: shardings for each searcher.
        merges: for each searcher, a function that merges adapters into the base weights; empty
            without adapters.
    """

    layout: Callable[[Any], Any] | None
    shardings: list[Any]
    merges: list[Callable[[Any], Any]]


def make_arrival(config: Config, policy: TransformerConfig, sites: Sites, base: Any) -> Arrival:
    """Return the conversion of published weights; for the arguments see `make_weights`."""
    plain = dataclasses.replace(policy, adapters=None)
    dtype = jnp.dtype(config.model.compute_dtype)
    quantization, mesh = config.search.quantization, sites.publication.mesh
    layout, published = make_publication(plain, mesh, quantization)
    rounded = functools.partial(
        make_publish_program, quantization=quantization, float32_leaves=plain.float32_leaves
    )
    wanted = [searcher_shardings(plain, site.mesh, quantization) for site in sites.searchers]
    if policy.adapters is None:
        # Files have the trainer's layout: convert and quantise after reading.
        arrange = rounded(dtype, layout, published)
        return Arrival(sites.trainer.locked(arrange), wanted, [])
    # One base for each set of devices, in the decoder's layout and in full precision: adapters are
    # added before rounding.
    exact = rounded(dtype, *make_publication(plain, mesh), quantization="none")(base)
    held = exact
    if quantization != "none":
        held = rounded(dtype, layout, published)(base)
    kernels, rest = lora.adapted(exact, policy), lora.unadapted(held, policy)
    merges: dict[Site, Callable[[Any], Any]] = {}
    for site, shardings in zip(sites.searchers, wanted, strict=True):
        if site not in merges:
            of_kernels = lora.adapted(searcher_shardings(plain, site.mesh), policy)
            own = lora.Base(
                hand_over(kernels, of_kernels),
                hand_over(rest, lora.unadapted(shardings, policy)),
            )
            merge = functools.partial(
                lora.merge_into, own, config=policy, quantization=quantization
            )
            merges[site] = site.locked(merge)
    adapters = [adapter_shardings(policy, site.mesh) for site in sites.searchers]
    return Arrival(None, adapters, [merges[site] for site in sites.searchers])


def make_weights(shared: Shared, base: Any, publish: Callable[[Any], Any]) -> Weights:
    """Make the weights that a trainer process publishes in memory; with adapters, only adapters.

    Args:
        base: frozen parameters under adapters; None without adapters.
        publish: program of a publication.
    """
    arrival = make_arrival(shared.config, shared.policy, shared.sites, base)
    program = shared.sites.trainer.locked(publish)
    return Weights(program, arrival.shardings, arrival.merges)


def make_stored_weights(shared: Shared, base: Any) -> StoredWeights:
    """Make the weights of a process that only searches; for `base` see `make_weights`."""
    sites = shared.sites
    arrival = make_arrival(shared.config, shared.policy, sites, base)
    return StoredWeights(
        storage_of(shared.workdir),
        published_files(shared.config, shared.policy, sites.publication.mesh),
        arrival.shardings,
        arrival.merges,
        layout=arrival.layout,
        start=lambda i: load_start_weights(shared, sites.searchers[i]),
    )


def make_weight_folder(
    shared: Shared, publish: Callable[[Any], Any], wanted: Callable[[], Collection[int]]
) -> WeightFolder:
    """Make the writer of published weights; all trainer processes call this.

    Args:
        wanted: returns versions that stay on disk in addition to the newest ones.
    """
    cluster, run_id = shared.cluster, shared.facts.run_id
    storage = storage_of(shared.workdir)
    if cluster.is_primary:  # steps are made again, and their versions with them
        delete_own(storage / FOLDER, run_id)
    cluster.broadcast_json(None)  # the others list the folder after that
    members = cluster.members
    return WeightFolder(storage, publish, run_id=run_id, members=members, wanted=wanted)


def published_files(config: Config, policy: TransformerConfig, mesh: Mesh) -> Any:
    """Return shapes and shardings of published weights in files, for a reader's mesh."""
    dtype = jnp.dtype(config.model.compute_dtype)
    if policy.adapters is None:
        shapes, shardings = abstract_params(policy, dtype), param_shardings(policy, mesh)
    else:
        shapes = jax.tree.map(lambda x: x.update(dtype=dtype), lora.abstract_adapters(policy))
        shardings = lora.split(param_shardings(policy, mesh))[1]
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        shapes,
        on_mesh(mesh, shardings),
    )


def make_decoders(shared: Shared) -> dict[Site, Decoder]:
    """Make a decoder for each set of searcher devices; single devices share one decoder."""
    sites = shared.sites.searchers
    programs = {
        key: make_decoder(shared.config, shared.model.config, shared.tokenizer, key)
        for key in dict.fromkeys(site.program_site for site in sites)
    }
    return {site: programs[site.program_site] for site in sites}


@dataclasses.dataclass(frozen=True)
class Search:
    """Parts of the searchers of a process.

    Attributes:
        parts: parts of each searcher of this process.
        decoders: decoder of each site.
        server: server that samples for the searchers of this process; None: their devices sample.
    """

    parts: tuple[SearchParts, ...] = ()
    decoders: Mapping[Site, Decoder] = dataclasses.field(default_factory=dict)
    server: InferenceServer | None = None

    @property
    def num_compiled(self) -> int:
        """Return the number of decode programs compiled for the first searcher."""
        return next((decoder.compile_count for decoder in self.decoders.values()), 0)

    def take_failures(self) -> dict[str, int]:
        """Return the failed requests of searchers to their server since the last call."""
        return {} if self.server is None else self.server.failures.take()


def build_searchers(
    shared: Shared,
    weights: OnDevices | WeightFolder,
    judging: "Judging",
) -> Search:
    """Build the parts of the searchers of this process, if it has searchers."""
    if not shared.sites.searchers:
        return Search()
    assert isinstance(weights, OnDevices), "a process that writes versions has no searchers"
    config, sites, server = shared.config, shared.sites.searchers, shared.rewards.server
    decoders = make_decoders(shared)
    key = jax.random.key(config.seed)
    episodes = make_episodes(config, shared.task, shared.tokenizer, shared.rewards.environments)
    objective, source = config.objective.built, shared.rewards.source
    states = StateValues(objective.value("vine_tokens", 0), objective.value("vine_samples", 0))
    given = {site: make_given_scorer(shared, site) for site in dict.fromkeys(sites)}
    parts = []
    for i, site in enumerate(sites):
        engine: Sessions = decoders[site]
        latest = functools.partial(weights.latest, i)
        if server is not None:
            # The server receives adapters. Weights are merged for evaluations only.
            latest = functools.partial(weights.adapters, i)
            engine = ServerDecoder(server, decoders[site].eos_ids, decoders[site].stop_strings)
        rewards = source and source.on(site)
        grader = make_grader(shared.config, shared.task, shared.tokenizer, rewards)
        parts.append(
            SearchParts(
                index=shared.sites.first_searcher + i,
                weights=latest,
                evaluated=functools.partial(_evaluated, shared, weights, i),
                sampler=Sampler(engine, config.search, key, episodes, states),
                grader=grader,
                evaluator=make_shard_evaluator(
                    config, decoders[site], grader, judging.measures[i], episodes
                ),
                given=given[site],
                clock=shared.clock,
                swaps_in_flight=swaps_in_flight(config),
                waits_for_all=config.driver == "sync" and episodes is not None,
            )
        )
    return Search(tuple(parts), decoders, server)


def _evaluated(shared: Shared, weights: OnDevices, i: int, version: int) -> Published | None:
    """Return a version under evaluation for searcher i; None if it was dropped."""
    found = weights.at(version, i)
    if found is None and version == 0:  # a resumed run evaluates the start model
        found = Published(0, load_start_weights(shared, shared.sites.searchers[i]))
    return found


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
    if config.eval.gold_model or config.eval.gold_reward:
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
                scoring=make_scoring(config, tokenizer.eos_ids),
                padding=make_padding(config, tokenizer.pad_id),
                site=site,
            )
            own.append(distance.measure)
    return Judging([tuple(measures[site]) for site in sites], tuple(metrics))


TASK_METRICS: dict[str, Callable[[EvalSettings], MetricFunction]] = {
    "attacks": make_attack_metrics,
}
"""Factory of the metric function for each name in a task's entry."""


def shard_size(config: Config, num_prompts: int) -> int:
    """Return the number of prompts of an evaluation shard, which fills the slots."""
    return min(max(1, config.search.slots // config.eval.num_samples), num_prompts)


def make_shard_evaluator(
    config: Config,
    decoder: Decoder,
    grader: Grader,
    measures: tuple[Measure, ...],
    episodes: Episodes | None,
) -> ShardEvaluator:
    """Make the evaluator of shards on one set of devices."""
    sampling = SamplingSettings(
        config.search.max_new_tokens,
        temperature=config.eval.temperature,
        min_new_tokens=config.search.min_new_tokens,
    )
    n = config.eval.num_samples
    num_slots = max(1, config.search.slots // n) * n
    return ShardEvaluator(
        decoder, grader, sampling, n, min(num_slots, config.search.slots), measures, episodes
    )


def make_evaluator(
    config: Config, task: Task, tokenizer: Tokenizer, metrics: Sequence[MetricFunction] = ()
) -> Evaluator:
    """Make the evaluator of a config; `metrics` are added to those of the task.

    Raises:
        ValueError: a model that the task's metrics need is not usable.
    """
    own = entry_of(config.task.name).metrics
    reader = make_reader(config, task, tokenizer)
    prompts, num_skipped = reader.held_out(config.task.num_eval_prompts)
    return Evaluator(
        prompts=prompts,
        num_skipped=num_skipped,
        shard_size=shard_size(config, len(prompts)),
        metric=task.metric,
        metrics=(*(TASK_METRICS[name](config.eval) for name in own), *metrics),
    )


def build_judging(shared: Shared) -> Judging:
    """Make the measures of each searcher of this process, and the metrics of the run."""
    start_params = functools.cache(functools.partial(load_start_weights, shared))
    lock = threading.Lock()  # searchers that share devices load only one copy

    def reference_params(site: Site) -> Any:
        with lock:
            return start_params(site)

    return make_judging(
        shared.config,
        shared.tokenizer,
        shared.model.config,
        shared.rewards.gold,
        reference_params,
        shared.sites.searchers,
    )


def load_start_weights(shared: Shared, site: Site) -> Any:
    """Load the start model's weights in the layout and on the devices of a searcher."""
    # This function uses only devices of this process, so a single process may call it.
    source = shared.sites.reading(shared.model.config.hidden_size)
    load = source.locked(start_weights)
    return load(shared.config, shared.model.config, source.mesh, site.mesh)
