# SPDX-License-Identifier: Apache-2.0
"""The searchers of a process and what they stand on: references, decoders, start data, transport.

Searchers are made of what all parts share and of the start; they never see the trainer.
"""

import dataclasses
import functools
import sys
import uuid
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from tba_jax.config.resolved import ownership_of, transport_of
from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import Site
from tba_jax.flow.state import PartState, Saveable
from tba_jax.models import lora
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.replay.admission import Demand
from tba_jax.replay.outbox import Outbox
from tba_jax.run.model_parts import (
    adapter_shardings,
    make_decoder,
    make_padding,
    make_publication,
    make_rollout_scoring,
    make_scoring,
    reference_shardings,
    searcher_shardings,
)
from tba_jax.run.shared import Shared, Sites, make_grader, make_vine
from tba_jax.search.continuous import ContinuousSearch, TicketOffice
from tba_jax.search.prompts import PromptStream
from tba_jax.search.reference import Reference, make_reference_program
from tba_jax.search.rollout import Sampler
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.search.start_data import StartData, load_start_groups, make_start_program
from tba_jax.tasks.registry import Task
from tba_jax.weights.checkpoints import CheckpointTransport
from tba_jax.weights.merging import MergingTransport
from tba_jax.weights.reading import VersionReader
from tba_jax.weights.remote import Members, VersionWriter
from tba_jax.weights.transport import MemoryTransport, Transport, make_publish_program
from tba_jax.weights.versions import Versions


def make_references(
    config: Config,
    policy: TransformerConfig,
    eos_ids: tuple[int, ...],
    sites: Sites,
    params: Any,
) -> dict[Site, Reference]:
    """A reference scorer for each set of searcher devices.

    Its parameters are its own; with adapters they are frozen and those of the trainer's devices are
    shared with the trainer.
    """
    plain = dataclasses.replace(policy, adapters=None)
    mesh = sites.publication.mesh
    if policy.adapters is None or mesh != sites.trainer.mesh:
        # A copy, because the train state will be made of `params` and then donated; or because
        # they span processes.
        copy = make_publish_program(
            jnp.dtype(config.model.param_dtype), None, param_shardings(plain, mesh)
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


def make_start_data(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    model_config: TransformerConfig,
    sites: Sites,
) -> StartData | None:
    """The responses that searcher 0 begins with, if the config gives any."""
    if not config.task.start_path:
        return None
    search = config.search
    groups = load_start_groups(
        config.task.start_path,
        task,
        tokenizer,
        max_prompt_tokens=config.task.max_prompt_tokens,
        min_new_tokens=search.min_new_tokens,
        max_new_tokens=search.max_new_tokens,
        samples_per_prompt=search.samples_per_prompt,
    )
    program = make_start_program(
        model_config,
        make_rollout_scoring(config, tokenizer.eos_ids),
        max_new_tokens=search.max_new_tokens,
        site=sites.searchers[0],
    )
    return StartData(
        groups,
        program,
        prompts_per_round=search.prompts_per_round,
        samples_per_prompt=search.samples_per_prompt,
        padding=make_padding(config, tokenizer.pad_id),
    )


class Arrival(NamedTuple):
    """What becomes of weights that were read from files, or of adapters however they came.

    Attributes:
        layout: makes of what is read what the readers want, on the devices that it was read on;
            None: it is that.
        shardings: where each searcher wants it.
        merges: of each searcher: adapters there -> whole weights; empty without adapters.
    """

    layout: Callable[[Any], Any] | None
    shardings: list[Any]
    merges: list[Callable[[Any], Any]]


def make_arrival(config: Config, policy: TransformerConfig, sites: Sites, base: Any) -> Arrival:
    """How weights arrive at the searchers of a process; arguments as in `make_transport`."""
    plain = dataclasses.replace(policy, adapters=None)
    dtype = jnp.dtype(config.model.rollout_dtype)
    quantization, mesh = config.search.quantization, sites.publication.mesh
    layout, published = make_publication(plain, mesh, quantization)
    wanted = [searcher_shardings(plain, site.mesh, quantization) for site in sites.searchers]
    if policy.adapters is None:
        # Files have the trainer's layout; what is read is arranged and quantised then.
        arrange = make_publish_program(dtype, layout, published, quantization)
        return Arrival(sites.trainer.in_turn(arrange), wanted, [])
    # Each set of devices has the base once, in the decoder's layout: what adapters are added to is
    # exact, and rounded with them.
    exact = make_publish_program(dtype, *make_publication(plain, mesh))(base)
    held = exact
    if quantization != "none":
        held = make_publish_program(dtype, layout, published, quantization)(base)
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
            merges[site] = site.in_turn(merge)
    adapters = [adapter_shardings(policy, site.mesh) for site in sites.searchers]
    return Arrival(None, adapters, [merges[site] for site in sites.searchers])


def make_transport(
    config: Config,
    policy: TransformerConfig,
    sites: Sites,
    workdir: Path,
    base: Any,
    publish: Callable[[Any], Any] | None,
    confirm: Callable[[], None] = lambda: None,
) -> Transport:
    """The weight transport; where adapters are trained they alone travel, and `base` stays.

    Args:
        config: of the run.
        policy: the architecture as it is trained.
        sites: where trainer and searchers are.
        workdir: of the run.
        base: frozen parameters under adapters; None without adapters.
        publish: as `make_publication_program` makes it; None in a process that only reads.
        confirm: raises where this process no longer holds the work directory.
    """
    arrival = make_arrival(config, policy, sites, base)
    wanted, merges = arrival.shardings, arrival.merges
    transport: Transport
    timeout_s = config.checkpoint.timeout_s
    way = transport_of(config)
    if publish is None:
        files = published_files(config, policy, sites.publication.mesh)
        # In a job of several processes Orbax's barriers would wait for the others.
        number = jax.process_index()
        versions = Versions(workdir, readers=Members(number, (number,)).options)
        transport = VersionReader(
            versions, files, wanted, timeout_s=timeout_s, layout=arrival.layout
        )
    elif way == "memory":
        program = sites.trainer.in_turn(publish)
        transport = MemoryTransport(program, wanted, timeout_s=timeout_s)
    else:
        transport = CheckpointTransport(
            str(workdir),
            sites.trainer.in_turn(publish),
            wanted,
            keep=config.sync.keep,
            timeout_s=timeout_s,
            layout=arrival.layout,
            reads_back=config.placement != "fleet",
            confirm=confirm,
        )
    return MergingTransport(transport, merges) if merges else transport


def make_version_writer(
    shared: Shared, publish: Callable[[Any], Any], kept: Callable[[], Collection[int]]
) -> VersionWriter:
    """Weights as files, written by all trainer processes together; a call of all of them.

    Args:
        shared: what it stands on.
        publish: copy and cast of the weights.
        kept: versions that stay on disk beyond the newest.
    """
    config, cluster = shared.config, shared.cluster
    return VersionWriter(
        str(shared.workdir),
        publish,
        session=cluster.broadcast_json(uuid.uuid4().hex[:16]),
        members=Members(cluster.number, cluster.members),
        keep=config.sync.keep,
        timeout_s=config.checkpoint.timeout_s,
        kept=kept,
    )


def published_files(config: Config, policy: TransformerConfig, mesh: Mesh) -> Any:
    """What a publication through Orbax holds, as a process reads it on its own mesh."""
    dtype = jnp.dtype(config.model.rollout_dtype)
    if policy.adapters is None:
        shapes, shardings = abstract_params(policy, dtype), param_shardings(policy, mesh)
    else:
        shapes = lora.abstract_adapters(policy)
        shardings = lora.split(param_shardings(policy, mesh))[1]
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, dtype, sharding=sharding),
        shapes,
        on_mesh(mesh, shardings),
    )


def make_decoders(
    config: Config,
    model_config: TransformerConfig,
    tokenizer: Tokenizer,
    sites: Sites,
) -> dict[Site, Decoder]:
    """The decoder of each set of searcher devices; one serves all that have one device each."""
    programs = {
        key: make_decoder(config, model_config, tokenizer, key)
        for key in dict.fromkeys(site.program_site for site in sites.searchers)
    }
    return {site: programs[site.program_site] for site in sites.searchers}


@dataclasses.dataclass
class RemoteSearcher:
    """Counters of a searcher in another process, kept by the owner of the buffer.

    Attributes:
        index: searcher ID.
        outbox: its responses until they are merged.
        decoded_tokens, idle_s, num_chunks, num_given: as those of `Searcher`.
        num_given_rounds: rounds of given responses, which are its first.
    """

    index: int
    outbox: Outbox
    decoded_tokens: int = 0
    idle_s: float = 0.0
    num_chunks: int = 0
    num_given: int = 0
    num_given_rounds: int = 0

    @property
    def num_given_rounds_left(self) -> int:
        """Rounds of given responses that did not arrive yet."""
        return max(0, self.num_given_rounds - self.outbox.committed[0])

    def state(self) -> PartState:
        """Its counters, as `Searcher.state`."""
        names = ("decoded_tokens", "idle_s", "num_chunks")
        return PartState({}, {name: getattr(self, name) for name in names})

    def restore(self, state: PartState) -> None:
        """Count on from there."""
        vars(self).update(state.meta)


@dataclasses.dataclass(frozen=True)
class Search:
    """The searching side of one process.

    Attributes:
        transport: how weights come to its searchers, or leave for other processes.
        local: searchers that this process runs.
        streams: prompt streams, one for each of them.
        decoders: by site.
        remote: in the owner of the buffer, the searchers of other processes.
    """

    transport: Transport
    local: tuple[Searcher, ...] = ()
    streams: tuple[PromptStream, ...] = ()
    decoders: Mapping[Site, Decoder] = dataclasses.field(default_factory=dict)
    remote: tuple[RemoteSearcher, ...] = ()

    @property
    def searchers(self) -> tuple[Searcher | RemoteSearcher, ...]:
        """Counters of all searchers whose responses come to this process, in order."""
        return (*self.local, *self.remote)

    @property
    def outboxes(self) -> tuple[Outbox, ...]:
        """One for each of `searchers`."""
        return tuple(searcher.outbox for searcher in self.searchers)

    @property
    def num_skipped(self) -> int:
        """Prompts that were too long."""
        positions = [searcher.outbox.committed[1] for searcher in self.remote]
        skipped = sum(each["num_skipped"] for each in positions if each is not None)
        return skipped + sum(stream.num_skipped for stream in self.streams)

    @property
    def num_compiled(self) -> int:
        """Decode programs that were compiled for the first searcher's devices."""
        return next((decoder.compile_count for decoder in self.decoders.values()), 0)

    @property
    def num_drawn(self) -> int:
        """Responses that searchers sampled, without those that were given."""
        generated = sum(outbox.counts.generated for outbox in self.outboxes)
        return generated - sum(searcher.num_given for searcher in self.searchers)

    def parts(self) -> dict[str, Saveable]:
        """Everything with state; outboxes first, which know the position of each prompt stream."""
        return {
            **{f"outbox_{s.index}": s.outbox for s in self.searchers},
            **{f"searcher_{s.index}": s for s in self.searchers},
        }


def remote_searchers(config: Config, indices: Iterable[int]) -> tuple[RemoteSearcher, ...]:
    """Counters of searchers in other processes."""
    max_bytes = outbox_bytes(config)
    return tuple(RemoteSearcher(i, Outbox(max_bytes)) for i in indices)


def outbox_bytes(config: Config) -> int:
    """Bytes that an outbox holds before its searcher waits.

    The synchronous driver decides itself how far searchers run ahead. So does an exact lag: a full
    outbox would keep back what the trainer waits for.
    """
    is_bounded = config.driver == "async" and not config.search.exact_lag
    return config.search.outbox_bytes if is_bounded else sys.maxsize


def build_searchers(
    shared: Shared,
    *,
    transport: Transport,
    references: Mapping[Site, Reference],
    wants_given: bool,
    note: Callable[[str], None],
) -> Search:
    """This process's searchers with their streams, outboxes and decoders.

    Args:
        shared: what they stand on.
        transport: how weights come to them; its readers are they.
        references: by site; none where the trainer scores.
        wants_given: the run's first rounds are still to come, so start data is read.
        note: told how much is given.
    """
    config, sites, task = shared.config, shared.sites, shared.task
    decoders = make_decoders(config, shared.model.config, shared.tokenizer, sites)
    outboxes = tuple(Outbox(outbox_bytes(config)) for _ in sites.searchers)
    streams = tuple(_stream(shared, i) for i in range(len(sites.searchers)))
    given = None
    if wants_given and shared.first_searcher == 0:
        given = make_start_data(config, task, shared.tokenizer, shared.model.config, sites)
    if given is not None:
        note(f"{given.num_responses:,} given responses come first, in {given.num_rounds:,} rounds")
    key = jax.random.key(config.seed)
    samplers = [
        Sampler(decoders[site], config.search, key, shared.first_searcher + i)
        for i, site in enumerate(sites.searchers)
    ]
    graders = [
        make_grader(task, shared.tokenizer, shared.rewards.source.on(site))
        for site in sites.searchers
    ]
    searchers = tuple(
        Searcher(
            SearchParts(
                index=shared.first_searcher + i,
                stream=streams[i],
                weights=functools.partial(transport.latest, i),
                sampler=samplers[i],
                grader=graders[i],
                reference=references.get(site),
                padding=make_padding(config, shared.tokenizer.pad_id),
                outbox=outboxes[i],
                clock=shared.clock,
                shares_prompts=config.batch.share_prompts,
                vine=make_vine(config, samplers[i], graders[i]),
            ),
            given if shared.first_searcher + i == 0 else None,
        )
        for i, site in enumerate(sites.searchers)
    )
    return Search(transport, searchers, streams, decoders)


def _stream(shared: Shared, i: int) -> PromptStream:
    config = shared.config
    return PromptStream(
        shared.task,
        shared.tokenizer,
        searcher=shared.first_searcher + i,
        num_searchers=shared.num_searchers,
        ownership=ownership_of(config),
        seed=config.seed,
        max_prompt_tokens=config.task.max_prompt_tokens,
        long_prompts=config.task.long_prompts,
    )


def make_demand(config: Config) -> Demand:
    """What the trainer takes of the searchers."""
    return Demand(
        prompts=config.batch.num_prompts,
        share=config.replay.recency_prob,
        max_staleness=config.replay.max_staleness,
        sync_period=config.sync_period,
        initial=-(-config.search.initial_fill // config.search.samples_per_prompt),
        is_strict=config.replay.late == "wait",
    )


def swaps_in_flight(config: Config) -> bool:
    """Whether newer weights are taken between chunks: never where each has its own quota."""
    if config.search.exact_lag:
        return False
    needs_behavior = config.objective.built.needs_behavior
    swap = config.search.swap
    return swap == "in_flight" or (swap == "auto" and not needs_behavior)


def make_searches(
    config: Config,
    searchers: Sequence[Searcher],
    admission: TicketOffice,
    log_event: Callable[[Mapping[str, Any]], None],
) -> list[ContinuousSearch]:
    """Searchers of this process as they run beside a trainer."""
    in_flight = swaps_in_flight(config)
    return [
        ContinuousSearch(searcher, admission, swaps_in_flight=in_flight, log_event=log_event)
        for searcher in searchers
    ]
