# SPDX-License-Identifier: Apache-2.0
"""What a run holds on its devices, by hand from shapes and without compiling.

It knows neither placements nor programs: whoever chooses a placement asks it, and compiles later.
The invariant it owns: of arrays that are there all the time it counts every byte; of a program,
the largest.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from tba_jax.config.schema import Config
from tba_jax.decoding import lowering
from tba_jax.decoding.compiled import cache_lengths
from tba_jax.devices.placement import MeshShape
from tba_jax.devices.platform import Platform
from tba_jax.models import attention, kv_cache, lora
from tba_jax.models.quantized import Quantization
from tba_jax.models.transformer import Params, TransformerConfig, num_params
from tba_jax.run import model_parts
from tba_jax.train.state import HOST_MEMORY, TrainState


def held_bytes(config: Config, model_config: TransformerConfig) -> float:
    """Train state, or what adapters leave frozen; about."""
    params = num_params(model_config) * jnp.dtype(config.model.param_dtype).itemsize
    if config.lora.rank:
        return params  # the adapters are few
    # Parameters, two moments, perhaps a reference.
    return (4 if config.reference.placement == "trainer" else 3) * params


def step_bytes(
    responses: int,
    config: Config,
    model_config: TransformerConfig,
    mesh: MeshShape,
    platform: Platform,
) -> float:
    """Return a train step's memory besides its state, per device, for this many responses.

    About: scores of a layer and their gradient (by flash attention, of packed rows, the mask of
    pairs and what is made of it), what enters each layer, the inner products of one and their
    gradients, the gradient and its sum.

    Args:
        responses: of a micro-batch on a device; of packed ones, rows.
        config, model_config, mesh: of the trainer.
        platform: of its devices, which decides who computes attention.
    """
    x, t = config.task.max_prompt_tokens, config.search.max_new_tokens
    c = min(responses, config.objective.group_size) if config.batch.share_prompts else 1
    tokens = responses // c * (x + c * t)
    pairs = responses // c * (x * x + c * t * (x + t)) if c > 1 else responses * (x + t) ** 2
    if row := config.batch.packed_length:
        tokens, pairs = responses * row, responses * row**2
    dtype = jnp.dtype(config.model.compute_dtype)
    size = dtype.itemsize
    kept = size * model_config.num_layers * model_config.hidden_size * tokens
    inner = 4 * size * model_config.mlp_size * tokens / mesh.model
    scores = 2 * 4 * model_config.num_heads * pairs / mesh.model
    chosen = attention.choose(config.model.attention, platform, dtype, model_config.head_dim)
    if chosen not in ("xla", "xla_tpu"):
        scores = 2 * size * pairs if row else 0.0
    of_params = 0.0 if config.lora.rank else 2 * 4 * num_params(model_config) / mesh.size
    return scores + kept + inner + of_params


def searcher_bytes(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    judge_bytes: Callable[[int], float],
) -> Callable[[int], float]:
    """Return a searcher device's memory by group size: weights twice, reference, cache.

    And what judges take of one of them.
    """
    weights = _weight_bytes(config, model_config, devices[0])
    if config.reference.placement == "searcher":
        weights += num_params(model_config) * jnp.dtype(config.model.param_dtype).itemsize
    columns = cache_lengths(config.task.max_prompt_tokens + config.search.max_new_tokens + 8)[-1]
    shape = (num_slots(config), model_config.num_kv_heads, columns, model_config.head_dim)
    of_layer = kv_cache.abstract(shape, config.search.cache_dtype or config.model.rollout_dtype)
    cache = model_config.num_layers * shard_bytes(of_layer)

    def bytes_of(g: int) -> float:
        return weights / g + cache / math.gcd(g, model_config.num_kv_heads) + judge_bytes(g)

    return bytes_of


def _weight_bytes(config: Config, model_config: TransformerConfig, device: Any) -> float:
    """Return the memory of decoding weights: current and next version, and an adapter base."""

    def weights(quantization: Quantization) -> Params:
        where, dtype = SingleDeviceSharding(device), jnp.dtype(config.model.rollout_dtype)
        return lowering.abstract_weights(model_config, dtype, where, quantization)

    held = weights(config.search.quantization)
    policy = model_parts.policy_config(config, model_config)
    if policy.adapters is None:
        return 2 * shard_bytes(held)
    base = lora.adapted(weights("none"), policy), lora.unadapted(held, policy)
    return shard_bytes(base) + 2 * shard_bytes(lora.adapted(held, policy))


def num_slots(config: Config) -> int:
    """Unfinished responses of a searcher at a time."""
    rows = config.search.prompts_per_round * config.search.samples_per_prompt
    return min(rows, config.search.num_slots or rows)


def shard_bytes(tree: Any) -> float:
    """Bytes of a tree of ShapeDtypeStructs on each device, without the padding of its layout."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        total += math.prod(shape) * jnp.dtype(x.dtype).itemsize
    return total


def offloaded_bytes(state: TrainState) -> float:
    """Bytes of an abstract train state that each device keeps in its host's memory."""
    return shard_bytes([x for x in jax.tree.leaves(state) if _is_on_host(x)])


def _is_on_host(x: jax.ShapeDtypeStruct) -> bool:
    return x.sharding is not None and x.sharding.memory_kind == HOST_MEMORY


def state_bytes_by_kind(state: TrainState) -> dict[str, float]:
    """Bytes of an abstract train state in the memory of each device."""
    state = jax.tree.map(lambda x: None if _is_on_host(x) else x, state)
    kinds = {
        "parameters": shard_bytes(state.params),
        "optimiser state": shard_bytes(state.opt_state),
    }
    if state.reference_params is not None:
        kinds["reference parameters"] = shard_bytes(state.reference_params)
    return kinds
