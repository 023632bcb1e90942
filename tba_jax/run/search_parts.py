# SPDX-License-Identifier: Apache-2.0
"""The searchers of a process: references, decoders, given responses, transport, and the evaluator.

All of these are built from the shared parts, without the trainer.
"""

import dataclasses
import functools
import sys
import threading
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from tba_jax.config.resolved import ownership_of, shares_prompts, transport_of
from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import ANY_DEVICE, Site, Sites
from tba_jax.environments.episode import Sessions
from tba_jax.evaluation.attacks import make_attack_metrics
from tba_jax.evaluation.config import EvalSettings
from tba_jax.evaluation.evaluator import Evaluator, Measure, MetricFunction, ShardEvaluator
from tba_jax.evaluation.metrics import ReferenceDistance, WinRate, reference_distance
from tba_jax.flow.state import Saveable
from tba_jax.models import lora
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.remote.searcher_table import RemoteSearcher
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.grader import Grader
from tba_jax.rewards.source import RewardSource
from tba_jax.run.model_parts import (
    adapter_shardings,
    make_decoder,
    make_padding,
    make_publication,
    make_scoring,
    reference_shardings,
    searcher_shardings,
    start_weights,
)
from tba_jax.run.shared import Shared, make_episodes, make_grader
from tba_jax.search.prompts import PromptStream, eval_prompts
from tba_jax.search.reference import Reference, make_reference_program
from tba_jax.search.sampler import Sampler, StateValues
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.search.start_data import StartData, load_start_groups, make_start_program
from tba_jax.serving.inference_server import InferenceServer
from tba_jax.serving.server_session import ServerDecoder
from tba_jax.tasks.registry import Task, entry_of
from tba_jax.weights.merged_adapters import MergingTransport
from tba_jax.weights.transport import MemoryTransport, Transport, make_publish_program
from tba_jax.weights.version_reader import VersionReader
from tba_jax.weights.version_writer import CheckpointTransport, Members, VersionWriter
from tba_jax.weights.versions import Versions


def make_references(
    config: Config,
    policy: TransformerConfig,
    eos_ids: tuple[int, ...],
    sites: Sites,
    params: Any,
) -> dict[Site, Reference]:
    """Make a reference scorer for each set of searcher devices.

    Each scorer has its own parameters. With adapters a trainer on the same devices shares the
    frozen parameters.
    """
    plain = dataclasses.replace(policy, adapters=None)
    mesh = sites.publication.mesh
    if policy.adapters is None or mesh != sites.trainer.mesh:
        # Copy, because the train state consists of `params` and is donated, or because the
        # parameters span processes.
        copy = make_publish_program(
            jnp.dtype(config.model.param_dtype),
            None,
            param_shardings(plain, mesh),
            float32_leaves=plain.float32_leaves,
        )
        params = copy(params)
    programs: dict[Site, Callable[..., Array]] = {}
    references = {}
    for site in dict.fromkeys(sites.searchers):
        key = site.program_site
        if key not in programs:
            programs[key] = make_reference_program(plain, make_scoring(config, eos_ids), key)
        own = hand_over(params, reference_shardings(plain, site.mesh))
        references[site] = Reference(programs[key], own)
    return references


def make_start_data(shared: Shared) -> StartData | None:
    """Return the given responses with which searcher 0 begins; None without task.start_path."""
    config, tokenizer = shared.config, shared.tokenizer
    if not config.task.start_path:
        return None
    search = config.search
    groups = load_start_groups(
        config.task.start_path,
        shared.task,
        tokenizer,
        max_prompt_tokens=config.task.max_prompt_tokens,
        min_new_tokens=search.min_new_tokens,
        max_new_tokens=search.max_new_tokens,
        samples_per_prompt=search.samples_per_prompt,
    )
    program = make_start_program(
        shared.model.config,
        make_scoring(config, tokenizer.eos_ids),
        max_new_tokens=search.max_new_tokens,
        site=shared.sites.searchers[0],
    )
    return StartData(
        groups,
        program,
        prompts_per_round=search.prompts_per_round,
        samples_per_prompt=search.samples_per_prompt,
        temperature=search.sampling_temperature,
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
    """Return the conversion of published weights; for the arguments see `make_transport`."""
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


def make_transport(
    config: Config,
    policy: TransformerConfig,
    sites: Sites,
    workdir: Path,
    base: Any,
    publish: Callable[[Any], Any] | None,
) -> Transport:
    """Make the weight transport; with adapters, only the adapters are published.

    Args:
        base: frozen parameters under adapters; None without adapters.
        publish: program of a publication; None in a process that only reads.
    """
    arrival = make_arrival(config, policy, sites, base)
    wanted, merges = arrival.shardings, arrival.merges
    transport: Transport
    way = transport_of(config)
    if publish is None:
        files = published_files(config, policy, sites.publication.mesh)
        # Restricted to this process, because Orbax's barriers would wait for the others.
        number = jax.process_index()
        versions = Versions(workdir, readers=Members(number, (number,)).options)
        transport = VersionReader(versions, files, wanted, layout=arrival.layout)
    elif way == "memory":
        program = sites.trainer.locked(publish)
        transport = MemoryTransport(program, wanted)
    else:
        transport = CheckpointTransport(
            str(workdir),
            sites.trainer.locked(publish),
            wanted,
            layout=arrival.layout,
        )
    return MergingTransport(transport, merges) if merges else transport


def make_version_writer(
    shared: Shared, publish: Callable[[Any], Any], kept: Callable[[], Collection[int]]
) -> VersionWriter:
    """Make the writer of published weights; all trainer processes call this.

    Args:
        kept: returns versions that stay on disk in addition to the newest ones.
    """
    cluster = shared.cluster
    return VersionWriter(
        str(shared.workdir),
        publish,
        session=cluster.broadcast_json(uuid.uuid4().hex[:16]),
        members=Members(cluster.number, cluster.members),
        kept=kept,
    )


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
    """Searchers of a process, with their weights and prompts.

    Attributes:
        transport: delivers weights to searchers of this process, or writes them to files.
        local: searchers of this process.
        streams: prompt stream of each local searcher.
        decoders: decoder of each site.
        remote: counters of searchers in other processes; empty except in the owner of the buffer.
        server: server that samples for the local searchers; None: their devices sample.
    """

    transport: Transport
    local: tuple[Searcher, ...] = ()
    streams: tuple[PromptStream, ...] = ()
    decoders: Mapping[Site, Decoder] = dataclasses.field(default_factory=dict)
    remote: tuple[RemoteSearcher, ...] = ()
    server: InferenceServer | None = None

    @property
    def searchers(self) -> tuple[Searcher | RemoteSearcher, ...]:
        """Return the searchers whose responses come to this process, in order."""
        return (*self.local, *self.remote)

    @property
    def outboxes(self) -> tuple[Outbox, ...]:
        """Return the outboxes of `searchers`."""
        return tuple(searcher.outbox for searcher in self.searchers)

    @property
    def num_skipped(self) -> int:
        """Return the number of prompts that were too long."""
        positions = [searcher.outbox.committed[1] for searcher in self.remote]
        skipped = sum(each["num_skipped"] for each in positions if each is not None)
        return skipped + sum(stream.num_skipped for stream in self.streams)

    @property
    def num_compiled(self) -> int:
        """Return the number of decode programs compiled for the first searcher."""
        return next((decoder.compile_count for decoder in self.decoders.values()), 0)

    def take_failures(self) -> dict[str, int]:
        """Return the failed requests of local searchers to their server since the last call."""
        return {} if self.server is None else self.server.failures.take()

    @property
    def num_drawn(self) -> int:
        """Return the number of sampled responses, without given responses."""
        generated = sum(outbox.counts.generated for outbox in self.outboxes)
        return generated - sum(searcher.num_given for searcher in self.searchers)

    def parts(self) -> dict[str, Saveable]:
        """Return all parts with state; outboxes come first, because they have prompt positions."""
        return {
            **{f"outbox_{s.index}": s.outbox for s in self.searchers},
            **{f"searcher_{s.index}": s for s in self.searchers},
        }


def remote_searchers(config: Config, indices: Iterable[int]) -> tuple[RemoteSearcher, ...]:
    """Return counters for searchers in other processes."""
    max_bytes = outbox_bytes(config)
    return tuple(RemoteSearcher(i, Outbox(max_bytes)) for i in indices)


def outbox_bytes(config: Config) -> int:
    """Return the size in bytes of an outbox at which its searcher waits.

    The size is unlimited with driver=sync: a full outbox would hold back responses that the trainer
    waits for.
    """
    return config.search.outbox_bytes if config.driver == "async" else sys.maxsize


def build_searchers(
    shared: Shared,
    *,
    transport: Transport,
    references: Mapping[Site, Reference],
    wants_given: bool,
    note: Callable[[str], None],
) -> Search:
    """Build the searchers of this process with streams, outboxes and decoders.

    Args:
        references: reference of each site; empty if the trainer scores the reference.
        wants_given: whether given responses are read; True before the first step.
    """
    config, sites, first = shared.config, shared.sites, shared.sites.first_searcher
    decoders = make_decoders(shared)
    outboxes = tuple(Outbox(outbox_bytes(config)) for _ in sites.searchers)
    given = None
    if wants_given and first == 0:
        given = make_start_data(shared)
    if given is not None:
        note(f"{given.num_responses:,} given responses come first, in {given.num_rounds:,} rounds")
    key = jax.random.key(config.seed)
    episodes = make_episodes(config, shared.task, shared.tokenizer, shared.rewards.environments)
    first_token_only = episodes is not None and episodes.first_token_only
    streams = tuple(_stream(shared, i, first_token_only) for i in range(len(sites.searchers)))
    objective = config.objective.built
    states = StateValues(objective.vine_tokens, objective.vine_samples)
    weights = [functools.partial(transport.latest, i) for i in range(len(sites.searchers))]
    engines: list[Sessions] = [decoders[site] for site in sites.searchers]
    if (server := shared.rewards.server) is not None:
        # The server receives adapters. Weights are merged for evaluations only.
        assert isinstance(transport, MergingTransport), "config.rules wants adapters"
        weights = [functools.partial(transport.source.latest, i) for i in range(len(weights))]
        engines = [
            ServerDecoder(server, decoders[site].eos_ids, decoders[site].stop_strings)
            for site in sites.searchers
        ]
    samplers = [
        Sampler(engine, config.search, key, first + i, episodes, states)
        for i, engine in enumerate(engines)
    ]
    source = shared.rewards.source
    graders = [
        make_grader(shared.task, shared.tokenizer, source and source.on(site))
        for site in sites.searchers
    ]
    searchers = tuple(
        Searcher(
            SearchParts(
                index=first + i,
                stream=streams[i],
                weights=weights[i],
                sampler=samplers[i],
                grader=graders[i],
                reference=references.get(site),
                padding=make_padding(config, shared.tokenizer.pad_id),
                outbox=outboxes[i],
                clock=shared.clock,
                shares_prompts=shares_prompts(config),
            ),
            given if first + i == 0 else None,
        )
        for i, site in enumerate(sites.searchers)
    )
    return Search(transport, searchers, streams, decoders, server=shared.rewards.server)


def _stream(shared: Shared, i: int, first_token_only: bool) -> PromptStream:
    config = shared.config
    return PromptStream(
        shared.task,
        shared.tokenizer,
        searcher=shared.sites.first_searcher + i,
        num_searchers=shared.sites.num_searchers,
        ownership=ownership_of(config),
        seed=config.seed,
        max_prompt_tokens=config.task.max_prompt_tokens,
        long_prompts=config.task.long_prompts,
        first_token_only=first_token_only,
    )


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


def make_evaluator(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    shard_evaluators: Sequence[ShardEvaluator],
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
        shard_evaluators=shard_evaluators,
        sampling=SamplingSettings(
            config.search.max_new_tokens,
            temperature=config.eval.temperature,
            min_new_tokens=config.search.min_new_tokens,
        ),
        num_samples=config.eval.num_samples,
        num_slots=config.search.slots,
        metric=task.metric,
        metrics=(*(TASK_METRICS[name](config.eval) for name in own), *metrics),
    )


def build_evaluator(
    shared: Shared,
    decoders: Mapping[Site, Decoder],
    graders: Sequence[Grader],
    references: Mapping[Site, Reference],
    note: Callable[[str], None],
) -> Evaluator:
    """Make the evaluator of a run, with a shard evaluator for each searcher of this process.

    Args:
        references: reference scorer of each site; metrics use its weights as the start model.
    """
    config, sites = shared.config, shared.sites.searchers
    start_params = functools.cache(functools.partial(load_start_weights, shared))
    lock = threading.Lock()  # searchers that share devices load only one copy

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
    episodes = make_episodes(config, shared.task, shared.tokenizer, shared.rewards.environments)
    shard_evaluators = [
        ShardEvaluator(decoders[site], grader, measures, episodes)
        for site, grader, measures in zip(sites, graders, judging.measures, strict=True)
    ]
    evaluator = make_evaluator(
        config, shared.task, shared.tokenizer, shard_evaluators, judging.metrics
    )
    if evaluator.num_skipped:
        note(
            f"{evaluator.num_skipped} held-out prompts exceed task.max_prompt_tokens and "
            "are skipped"
        )
    return evaluator


def load_start_weights(shared: Shared, site: Site) -> Any:
    """Load the start model's weights in the layout and on the devices of a searcher."""
    # This function uses only devices of this process, so a single process may call it.
    source = shared.sites.reading(shared.model.config.hidden_size)
    load = source.locked(start_weights)
    return load(shared.config, shared.model.config, source.mesh, site.mesh)
