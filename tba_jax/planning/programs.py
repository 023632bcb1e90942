# SPDX-License-Identifier: Apache-2.0
"""Device programs of a run, ready to be lowered from its config and shapes alone.

The functions are those that trainer and searchers of a run call, with shapes in place of arrays.
The shapes are the largest of a run: the longest prompt and response buckets, full slots, and a full
round.

Invariant: a program lowered here is a program of the run, at sizes that the run can reach.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, SingleDeviceSharding

from tba_jax.config.resolved import remat_of, writes_versions
from tba_jax.config.schema import Config
from tba_jax.decoding import lowering
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.session import ADDED_TOKENS, EXTEND_TOKENS, PREFILL_TOKENS
from tba_jax.devices.sharding import Placement, placed_shapes
from tba_jax.devices.site import Site
from tba_jax.flow.layout import Batch
from tba_jax.flow.padding import padded_lengths
from tba_jax.models import lora
from tba_jax.models.quantized import Quantization
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, abstract_params, num_params
from tba_jax.planning import roofline
from tba_jax.planning.estimates import (
    REPEATED_SHARE,
    num_slots,
    shard_bytes,
    state_bytes_by_kind,
)
from tba_jax.planning.roofline import Work
from tba_jax.run import model_parts
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.step import make_reference_pass, make_train_step

FROZEN = "frozen parameters"
"""Kind of bytes: the base of adapters."""
_KEPT = "caches of waiting conversations"


class Ids(Tokenizer):
    """Fields of a tokenizer that a plan needs; the values of the IDs change no shape."""

    def __init__(self) -> None:
        self.eos_ids, self.pad_id = (0,), 0

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        """Return an empty string, because a plan has no tokens to decode."""
        return ""


@dataclasses.dataclass(frozen=True)
class Planned:
    """One program of one device group.

    Attributes:
        name: name in the printed table.
        group: trainer or searcher.
        lower: function that lowers the program.
        work: bytes and FLOPs of one execution on each device, by arithmetic (`roofline`).
        resident: kind -> bytes per device of the arguments that stay in memory.
        result: memory kind of the results that stay in memory; "outputs" if none stay.
        variants: number of programs of this kind that a run may load, one per shape.
        with_cache: whether the KV cache is in memory while the program runs.
    """

    name: str
    group: str
    lower: Callable[[], jax.stages.Lowered]
    work: Work
    resident: dict[str, float]
    result: str = "outputs"
    variants: int = 1
    with_cache: bool = False


class Sizes(NamedTuple):
    """The largest shapes of a run.

    Attributes:
        prompts, group: P and K of a batch.
        prompt, response: lengths of the longest buckets in tokens.
        samples: S, responses per prompt.
        num_slots: number of decode slots of a searcher.
    """

    prompts: int
    group: int
    prompt: int
    response: int
    samples: int
    num_slots: int

    @property
    def slot_prompts(self) -> int:
        """Number of prompts whose responses fill the slots."""
        return -(-self.num_slots // self.samples)


def sizes_of(config: Config) -> Sizes:
    """Return the largest shapes that the programs of a run have."""
    prompt = config.task.max_prompt_tokens
    response = config.search.max_new_tokens
    return Sizes(
        prompts=config.batch.num_prompts,
        group=config.objective.group_size,
        prompt=prompt,
        response=response,
        samples=config.search.samples_per_prompt,
        num_slots=num_slots(config),
    )


def largest_prefill(config: Config, decoder: Decoder) -> tuple[int, int]:
    """Return number and padded length in tokens of the prompts of the largest prefill call.

    With an environment, the prompt of a turn contains all earlier turns.
    """
    sizes, length = sizes_of(config), decoder.prompt_buckets[-1]
    # As in the engine, one call prefills prompts for all slots, up to a limit of tokens.
    wanted = sizes.slot_prompts
    return max(1, min(wanted, PREFILL_TOKENS // length)), length


def plan_programs(
    config: Config, model_config: TransformerConfig, placement: Placement
) -> list[Planned]:
    """Return every program, the trainer's first.

    Raises:
        ValueError: the mesh does not divide the model, or the model's context is too short.
    """
    return [
        *_trainer_programs(config, model_config, placement),
        *_searcher_programs(config, model_config, placement),
    ]


def residents(
    config: Config, model_config: TransformerConfig, placement: Placement
) -> dict[str, dict[str, dict[str, float]]]:
    """Return group -> resident and transient bytes per device, by kind."""
    state = model_parts.abstract_state(config, model_config, placement.trainer_mesh)
    trainer = state_bytes_by_kind(state)
    if config.mesh.data > 1:
        # Each replica writes a part of the checkpoint; Orbax slices it on the device.
        trainer["parts of the state while it is saved"] = sum(trainer.values()) / config.mesh.data
    trainer |= _frozen_bytes(_frozen(config, model_config, placement))
    mesh = placement.searcher_meshes[0]
    weights = abstract_weights(config, model_config, placement, config.search.quantization)
    policy, searcher = model_parts.policy_config(config, model_config), {}
    if policy.adapters is not None:
        # Only adapted weights have a merged copy; the other weights are those of the base.
        searcher[FROZEN] = shard_bytes(_base(config, model_config, placement, policy))
        weights = lora.adapted(weights, policy)
    searcher |= {"weights in use": shard_bytes(weights), "next weights": shard_bytes(weights)}
    if writes_versions(config) and policy.adapters is None:
        # The first searcher of a host reads the weights in the trainer's layout, then converts
        # them.
        read = abstract_weights(config, model_config, placement)
        searcher["weights being read"] = shard_bytes(read)
    if config.eval.reference_metrics:
        searcher["start model, for evaluation"] = shard_bytes(
            abstract_weights(config, model_config, placement)
        )
    decoder = model_parts.make_decoder(config, model_config, Ids(), Site(mesh))
    sizes = sizes_of(config)
    cache = decoder.cache_bytes(sizes.num_slots)
    waiting = decoder.cache_bytes(*largest_prefill(config, decoder))
    kept = {}
    if config.task.environment:
        kept[_KEPT] = cache
    return {
        "trainer": {"residents": trainer, "transients": {}},
        "searcher": {
            "residents": searcher,
            "transients": {"KV cache": cache, "prefilled prompts": waiting, **kept},
        },
    }


def _trainer_programs(
    config: Config, model_config: TransformerConfig, placement: Placement
) -> list[Planned]:
    mesh = placement.trainer_mesh
    state = model_parts.abstract_state(config, model_config, mesh)
    shardings = model_parts.make_step_shardings(config, model_config, mesh)
    policy = model_parts.policy_config(config, model_config)
    settings = model_parts.make_step_settings(config, Ids().eos_ids, mesh)
    optimizer, rate = make_optimizer(config.optimizer), model_parts.make_rate(config)
    train_step = make_train_step(policy, optimizer, rate, settings, shardings)
    score = make_reference_pass(policy, settings, shardings)
    batch = abstract_batch(config, placement)
    whole = batch._replace(missing=jax.ShapeDtypeStruct(batch.tokens.shape[:1], jnp.int32))
    batch, whole = (placed_shapes(x, shardings.of_batch(x)) for x in (batch, whole))
    # Versions on disk keep the trainer's mesh.
    target = mesh if writes_versions(config) else placement.publication_mesh
    publish = model_parts.make_publication_program(config, model_config, target)
    params = state.params
    frozen = _frozen(config, model_config, placement)
    held = state_bytes_by_kind(state) | _frozen_bytes(frozen)
    layout = model_parts.make_layout(config, Ids(), mesh)
    num_lengths = 1 if layout.row_length else layout.padding.num_shapes
    num_programs = num_lengths * len(layout.buckets)
    work = _train_work(config, model_config, batch, layout.at_once, mesh, held)
    return [
        Planned(
            name="train_step",
            group="trainer",
            lower=lambda: train_step.lower(state, batch, *frozen),
            work=work,
            resident=held,
            variants=num_programs,
        ),
        Planned(
            name="score_reference",
            group="trainer",
            lower=lambda: score.lower(state.reference_params, whole, *frozen),
            work=Work(held["reference parameters"], work.num_flops / 3),
            resident=held,
            variants=num_programs,
        ),
        Planned(
            name="publish",
            group="trainer",
            lower=lambda: publish.lower(params),
            work=Work(2 * shard_bytes(params), 0.0),
            resident={"parameters": shard_bytes(params)},
        ),
    ]


def _train_work(
    config: Config,
    model_config: TransformerConfig,
    batch: Batch,
    at_once: int,
    mesh: Mesh,
    held: Mapping[str, float],
) -> Work:
    """Return the work of a train step on each device.

    A step reads and writes its state once, and reads the weights for each pass over a micro-batch.

    Args:
        at_once: rows of a micro-batch; 0: all rows.
        held: kind -> bytes of the state on each device.
    """
    sizes = sizes_of(config)
    rows, length = batch.tokens.shape
    c = 1 if batch.response_lengths is None else batch.response_lengths.shape[1]
    forward = roofline.train_flops(
        model_config,
        num_rows=rows * c,
        prompt_tokens=sizes.prompt,
        response_tokens=(length - sizes.prompt) // c,
        responses_per_prompt=c,
    )
    forward /= 3
    passes = 3 + REPEATED_SHARE * (remat_of(config) == "layers")
    weights = num_params(model_config) * jnp.dtype(config.model.compute_dtype).itemsize
    reads = passes * (rows / at_once if at_once else 1) * weights / mesh.shape["model"]
    return Work(2 * sum(held.values()) + reads, passes * forward / mesh.size)


def _searcher_programs(
    config: Config, model_config: TransformerConfig, placement: Placement
) -> list[Planned]:
    sizes, mesh = sizes_of(config), placement.searcher_meshes[0]
    decoder = model_parts.make_decoder(config, model_config, Ids(), Site(mesh))
    weights = abstract_weights(config, model_config, placement, config.search.quantization)
    columns = decoder.cache_length
    prompts, length = largest_prefill(config, decoder)
    lowered = dict(
        lowering.lower_all(
            decoder,
            weights,
            num_slots=sizes.num_slots,
            prompt_length=length,
            prefill_prompts=prompts,
        )
    )
    held = {"parameters": shard_bytes(weights)}
    cache = {"KV cache": float(decoder.cache_bytes(sizes.num_slots, columns))}
    waiting = {"prefilled prompts": float(decoder.cache_bytes(prompts, length))}
    prefill = (prompts, length)
    work = _decoder_work(model_config, decoder, sizes.num_slots, prefill, held | cache, mesh)
    buckets = len(padded_lengths(config.task.max_prompt_tokens))
    found = [
        Planned(
            name="prefill",
            group="searcher",
            lower=lowered["prefill"],
            work=work["prefill"],
            resident=held,
            result="prefilled prompts",
            variants=buckets,
            with_cache=True,
        ),
        Planned(
            name="admit",
            group="searcher",
            lower=lowered["admit"],
            work=work["admit"],
            resident=cache | waiting,
            variants=buckets,
            with_cache=True,
        ),
        Planned(
            name="decode_chunk",
            group="searcher",
            lower=lowered[_chunk(config)],
            work=work["decode_chunk"],
            resident=held | cache,
            with_cache=True,
        ),
    ]
    if config.task.environment:
        found.append(
            Planned(
                name="extend",
                group="searcher",
                lower=lowered["extend"],
                work=work["extend"],
                # The caches are lowered as those of the slots.
                resident=held | {_KEPT: cache["KV cache"]},
                variants=len(ADDED_TOKENS) + 1,
                with_cache=True,
            )
        )
    policy = model_parts.policy_config(config, model_config)
    if policy.adapters is not None:
        found.append(_merge(config, policy, _base(config, model_config, placement, policy), mesh))
    return found


def _decoder_work(
    model_config: TransformerConfig,
    decoder: Decoder,
    num_slots: int,
    prefill: tuple[int, int],
    held: Mapping[str, float],
    mesh: Mesh,
) -> dict[str, Work]:
    """Return the work of each program of a decoder on each device.

    A decode step reads all weights and the whole cache of all slots.

    Args:
        prefill: number and padded length of the prompts of a prefill.
        held: bytes of weights and cache on each device.
    """
    written, both = float(decoder.cache_bytes(*prefill)), sum(held.values())
    prompts, length = prefill
    forward = roofline.train_flops(
        model_config, num_rows=prompts, prompt_tokens=length, response_tokens=0
    )
    step = roofline.decode_work(
        model_config,
        itemsize=1,
        num_steps=1,
        prompt_tokens=decoder.cache_length,
        response_lengths=[1] * num_slots,
    )
    of_token, steps = 2.0 * roofline.matrix_entries(model_config), decoder.chunk_steps
    return {
        "prefill": Work(held["parameters"] + written, forward / 3 / mesh.size),
        "extend": Work(both, of_token * EXTEND_TOKENS / mesh.size),
        "admit": Work(written + decoder.cache_bytes(num_slots, length), 0.0),
        "decode_chunk": Work(steps * both, steps * step.num_flops / mesh.size),
    }


def _base(
    config: Config,
    model_config: TransformerConfig,
    placement: Placement,
    policy: TransformerConfig,
) -> lora.Base:
    """Return the base weights that a searcher keeps for adapters."""
    exact = abstract_weights(config, model_config, placement)
    held = abstract_weights(config, model_config, placement, config.search.quantization)
    return lora.Base(lora.adapted(exact, policy), lora.unadapted(held, policy))


def _merge(config: Config, policy: TransformerConfig, base: lora.Base, mesh: Mesh) -> Planned:
    """Return the program that merges adapters into a searcher's weights."""
    assert policy.adapters is not None
    adapters = _abstract(
        lora.abstract_adapters(policy),
        model_parts.adapter_shardings(policy, mesh),
        config.model.compute_dtype,
    )
    return Planned(
        name="merge",
        group="searcher",
        lower=lambda: lora.lower_merge(
            base.kernels, adapters, config=policy, quantization=config.search.quantization
        ),
        resident={
            FROZEN: shard_bytes(base.kernels),
            "adapters": shard_bytes(adapters),
        },
        result="next weights",
        work=Work(2 * shard_bytes(base.kernels) + shard_bytes(adapters), 0.0),
    )


def _chunk(config: Config) -> str:
    is_plain = config.search.top_p == 1 and not config.search.min_new_tokens
    return "chunk_sampled" if is_plain else "chunk_truncated"


def abstract_batch(config: Config, placement: Placement) -> Batch:
    """Return the largest batch of a run as ShapeDtypeStructs."""
    layout = model_parts.make_layout(config, Ids(), placement.trainer_mesh)
    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layout.largest())


def abstract_weights(
    config: Config,
    model_config: TransformerConfig,
    placement: Placement,
    quantization: Quantization = "none",
) -> Any:
    """Return the shapes of the weights on the first searcher's devices, in the decoder's layout.

    Args:
        quantization: quantization of the weights. Only the policy's weights are quantized.
    """
    mesh = placement.searcher_meshes[0]
    where = mesh if mesh.size > 1 else SingleDeviceSharding(mesh.devices.item())
    dtype = jnp.dtype(config.model.compute_dtype)
    return lowering.abstract_weights(model_config, dtype, where, quantization)


def _frozen(config: Config, model_config: TransformerConfig, placement: Placement) -> tuple:
    """Return the base of the adapters, which is the last argument of the train step."""
    base = model_parts.make_step_shardings(config, model_config, placement.trainer_mesh).base
    if base is None:
        return ()
    return (_abstract(abstract_params(model_config, config.model.param_dtype), base),)


def _frozen_bytes(frozen: tuple) -> dict[str, float]:
    return {FROZEN: shard_bytes(frozen)} if frozen else {}


def _abstract(shapes: Any, shardings: Any, dtype: str = "") -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
