# SPDX-License-Identifier: Apache-2.0
"""What searchers stand on: references, decoders, start data, weight transport."""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import Array

from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.devices import device_turns, sharding
from tba_jax.models import lora
from tba_jax.models.shardings import param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig
from tba_jax.run.modeling import (
    adapter_shardings,
    make_decoder,
    make_publication,
    reference_shardings,
    searcher_shardings,
)
from tba_jax.search.reference import Reference, make_reference_program
from tba_jax.search.start_data import StartData, load_start_groups, make_start_program
from tba_jax.tasks.registry import Task
from tba_jax.weights.transport import (
    CheckpointTransport,
    MemoryTransport,
    MergingTransport,
    Transport,
    make_publish_program,
)


def make_reference_program_from(
    config: Config, model_config: TransformerConfig, eos_ids: tuple[int, ...], mesh: Mesh
) -> Callable[..., Array]:
    """The reference scorer's program on a searcher's mesh."""
    return make_reference_program(
        model_config,
        temperature=config.search.sampling_temperature,
        compute_dtype=config.model.compute_dtype,
        chunk_tokens=config.batch.logprob_chunk_tokens,
        eos_ids=eos_ids,
        mask_eos=config.objective.mask_eos,
        min_new_tokens=config.search.min_new_tokens,
        mesh=mesh,
    )


def make_references(
    config: Config,
    policy: TransformerConfig,
    eos_ids: tuple[int, ...],
    placement: sharding.Placement,
    turns: device_turns.DeviceTurns | None,
    params: Any,
) -> dict[Mesh, Reference]:
    """A reference scorer for each set of searcher devices.

    Its parameters are its own; with adapters they are frozen and those of the trainer's devices are
    shared with the trainer.
    """
    plain = dataclasses.replace(policy, adapters=None)
    mesh = placement.publication_mesh
    if policy.adapters is None or mesh != placement.trainer_mesh:
        # A copy, because the train state will be made of `params` and then donated; or because
        # they span processes.
        copy = make_publish_program(
            jnp.dtype(config.model.param_dtype), None, param_shardings(plain, mesh)
        )
        params = copy(params)
    programs: dict[Any, Callable[..., Array]] = {}
    references = {}
    for mesh in dict.fromkeys(placement.searcher_meshes):
        key = mesh if mesh.size > 1 else None  # one program serves any one device
        if key not in programs:
            program = make_reference_program_from(config, plain, eos_ids, mesh)
            programs[key] = device_turns.on(turns, mesh)(program)
        own = sharding.hand_over(params, reference_shardings(plain, mesh))
        references[mesh] = Reference(programs[key], own)
    return references


def make_start_data(
    config: Config,
    task: Task,
    tokenizer: Tokenizer,
    model_config: TransformerConfig,
    placement: sharding.Placement,
    turns: device_turns.DeviceTurns | None,
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
        temperature=search.sampling_temperature,
        compute_dtype=config.model.rollout_dtype,
        chunk_tokens=config.batch.logprob_chunk_tokens,
        eos_ids=tokenizer.eos_ids,
        min_new_tokens=search.min_new_tokens,
        max_new_tokens=search.max_new_tokens,
        in_turn=device_turns.on(turns, placement.searcher_meshes[0]),
    )
    return StartData(
        groups,
        program,
        prompts_per_round=search.prompts_per_round,
        samples_per_prompt=search.samples_per_prompt,
        prompt_length=config.task.max_prompt_tokens,
        max_new_tokens=search.max_new_tokens,
        pad_id=tokenizer.pad_id,
    )


def make_transport(
    config: Config,
    policy: TransformerConfig,
    placement: sharding.Placement,
    turns: device_turns.DeviceTurns | None,
    workdir: Path,
    base: Any,
) -> Transport:
    """The weight transport; where adapters are trained they alone travel, and `base` stays."""
    plain = dataclasses.replace(policy, adapters=None)
    dtype = jnp.dtype(config.model.rollout_dtype)
    meshes = placement.searcher_meshes
    layout, published = make_publication(config, plain, placement.publication_mesh)
    wanted = [searcher_shardings(plain, mesh) for mesh in meshes]
    merges = {}
    if policy.adapters is not None:
        # Each set of devices has the base once, in the decoder's layout.
        weights = make_publish_program(dtype, layout, published)(base)
        for mesh, where in zip(meshes, wanted, strict=True):
            if mesh not in merges:
                own = sharding.hand_over(weights, where)
                merge = functools.partial(lora.merge, own, config=policy)
                merges[mesh] = device_turns.on(turns, mesh)(merge)
        layout = None
        published = lora.split(param_shardings(policy, placement.publication_mesh))[1]
        wanted = [adapter_shardings(policy, mesh) for mesh in meshes]
    in_turn = device_turns.on(turns, placement.trainer_mesh)
    transport: Transport
    if config.sync.transport == "memory":
        transport = MemoryTransport(dtype, wanted, layout, published, in_turn)
    else:
        transport = CheckpointTransport(
            str(workdir),
            keep=config.sync.keep,
            dtype=dtype,
            shardings=wanted,
            layout=layout,
            published=published,
            in_turn=in_turn,
        )
    return MergingTransport(transport, [merges[mesh] for mesh in meshes]) if merges else transport


def make_decoders(
    config: Config,
    model_config: TransformerConfig,
    tokenizer: Tokenizer,
    placement: sharding.Placement,
    turns: device_turns.DeviceTurns | None,
) -> dict[Mesh, Decoder]:
    """The decoder of each set of searcher devices; one serves all that have one device each."""
    decoders: dict[Any, Decoder] = {}
    for mesh in placement.searcher_meshes:
        key = mesh if mesh.size > 1 else None
        if key not in decoders:
            in_turn = device_turns.on(turns, mesh)
            decoders[key] = make_decoder(config, model_config, tokenizer, mesh, in_turn)
    return {m: decoders[m if m.size > 1 else None] for m in placement.searcher_meshes}
