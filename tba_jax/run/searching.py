# SPDX-License-Identifier: Apache-2.0
"""The searchers of a process and what they stand on: references, decoders, start data, transport.

Searchers are made of what all parts share and of the start; they never see the trainer.
"""

import dataclasses
import functools
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import Site
from tba_jax.flow.state import Saveable
from tba_jax.models import lora
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, abstract_params
from tba_jax.replay.outbox import Outbox
from tba_jax.run.modeling import (
    adapter_shardings,
    make_decoder,
    make_padding,
    make_publication,
    make_rollout_scoring,
    make_scoring,
    reference_shardings,
    searcher_shardings,
)
from tba_jax.run.placing import Sites
from tba_jax.run.rewarding import make_grader
from tba_jax.run.shared import Shared
from tba_jax.search.prompts import PromptStream
from tba_jax.search.reference import Reference, make_reference_program
from tba_jax.search.rollout import Sampler
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.search.start_data import StartData, load_start_groups, make_start_program
from tba_jax.tasks.registry import Task
from tba_jax.weights.reading import CheckpointReader
from tba_jax.weights.transport import (
    CheckpointTransport,
    MemoryTransport,
    MergingTransport,
    Transport,
    make_publish_program,
)


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


def make_transport(
    config: Config,
    policy: TransformerConfig,
    sites: Sites,
    workdir: Path,
    base: Any,
    publish: Callable[[Any], Any] | None,
) -> Transport:
    """The weight transport; where adapters are trained they alone travel, and `base` stays.

    Args:
        config: of the run.
        policy: the architecture as it is trained.
        sites: where trainer and searchers are.
        workdir: of the run.
        base: frozen parameters under adapters; None without adapters.
        publish: as `make_publication_program` makes it; None in a process that only reads.
    """
    plain = dataclasses.replace(policy, adapters=None)
    dtype = jnp.dtype(config.model.rollout_dtype)
    where = sites.publication.mesh
    quantization = config.search.quantization
    layout, published = make_publication(plain, where, quantization)
    wanted = [searcher_shardings(plain, site.mesh, quantization) for site in sites.searchers]
    merges: dict[Site, Callable[[Any], Any]] = {}
    if policy.adapters is not None:
        # Each set of devices has the base once, in the decoder's layout.
        weights = make_publish_program(dtype, layout, published)(base)
        for site, shardings in zip(sites.searchers, wanted, strict=True):
            if site not in merges:
                own = hand_over(weights, shardings)
                merges[site] = site.in_turn(functools.partial(lora.merge, own, config=policy))
        layout = None
        wanted = [adapter_shardings(policy, site.mesh) for site in sites.searchers]
    transport: Transport
    timeout_s = config.checkpoint.timeout_s
    if layout is not None and config.sync.transport == "checkpoint":
        # Files have the trainer's layout; what is read is arranged and quantised then.
        program_of_files = make_publish_program(dtype, layout, published, quantization)
        layout = sites.trainer.in_turn(program_of_files)
    if publish is None:
        files = _published_files(policy, where, dtype)
        transport = CheckpointReader(
            str(workdir), files, wanted, timeout_s=timeout_s, layout=layout
        )
    elif config.sync.transport == "memory":
        program = sites.trainer.in_turn(publish)
        transport = MemoryTransport(program, wanted, timeout_s=timeout_s)
    else:
        transport = CheckpointTransport(
            str(workdir),
            sites.trainer.in_turn(publish),
            wanted,
            keep=config.sync.keep,
            timeout_s=timeout_s,
            layout=layout,
        )
    if not merges:
        return transport
    return MergingTransport(transport, [merges[site] for site in sites.searchers])


def _published_files(policy: TransformerConfig, mesh: Mesh, dtype: Any) -> Any:
    """What a publication through Orbax holds, as a process reads it on its own mesh."""
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


@dataclasses.dataclass(frozen=True)
class Search:
    """The searching side of one process.

    Attributes:
        searchers: this process's; streams and outboxes: one each, in the same order.
        transport: how weights come to them.
        decoders: by site.
    """

    searchers: tuple[Searcher, ...]
    streams: tuple[PromptStream, ...]
    outboxes: tuple[Outbox, ...]
    transport: Transport
    decoders: Mapping[Site, Decoder]

    def parts(self) -> dict[str, Saveable]:
        """Everything with state; outboxes first, which know where each prompt stream stands."""
        return {
            **{f"outbox_{s.index}": o for s, o in zip(self.searchers, self.outboxes, strict=True)},
            **{f"searcher_{s.index}": s for s in self.searchers},
        }


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
    # The synchronous driver itself decides how far searchers run ahead.
    outbox_bytes = config.search.outbox_bytes if config.driver == "async" else sys.maxsize
    outboxes = tuple(Outbox(outbox_bytes) for _ in sites.searchers)
    streams = tuple(_stream(shared, i) for i in range(len(sites.searchers)))
    given = None
    if wants_given:
        given = make_start_data(config, task, shared.tokenizer, shared.model.config, sites)
    if given is not None:
        note(f"{given.num_responses:,} given responses come first, in {given.num_rounds:,} rounds")
    key = jax.random.key(config.seed)
    searchers = tuple(
        Searcher(
            SearchParts(
                index=shared.first_searcher + i,
                stream=streams[i],
                weights=functools.partial(transport.latest, i),
                sampler=Sampler(decoders[site], config.search, key, shared.first_searcher + i),
                grader=make_grader(task, shared.tokenizer, shared.rewards.source.on(site)),
                reference=references.get(site),
                padding=make_padding(config, shared.tokenizer.pad_id),
                outbox=outboxes[i],
                clock=shared.clock,
                shares_prompts=config.batch.share_prompts,
            ),
            given if shared.first_searcher + i == 0 else None,
        )
        for i, site in enumerate(sites.searchers)
    )
    return Search(searchers, streams, outboxes, transport, decoders)


def _stream(shared: Shared, i: int) -> PromptStream:
    config = shared.config
    return PromptStream(
        shared.task,
        shared.tokenizer,
        searcher=shared.first_searcher + i,
        num_searchers=shared.num_searchers,
        ownership=config.search.ownership,
        seed=config.seed,
        max_prompt_tokens=config.task.max_prompt_tokens,
        long_prompts=config.task.long_prompts,
    )
