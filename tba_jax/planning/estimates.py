# SPDX-License-Identifier: Apache-2.0
"""Memory of a run on its devices, estimated from shapes without compiling.

The estimates serve to choose a placement before any program is compiled.

Invariant: an estimate counts every byte of resident arrays, and the largest program.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import SingleDeviceSharding

from tba_jax.config.resolved import remat_of, shares_prompts
from tba_jax.config.schema import Config
from tba_jax.decoding import lowering
from tba_jax.devices.placement import MeshShape
from tba_jax.devices.platform import Platform
from tba_jax.models import attention, kv_cache, lora
from tba_jax.models.quantized import Quantization
from tba_jax.models.transformer import Params, TransformerConfig, num_params, scores_of
from tba_jax.planning import roofline
from tba_jax.run import model_parts
from tba_jax.train.state import TrainState

REPEATED_SHARE = 0.75
"""Share of a pass over the layers that `model.remat=layers` repeats in the backward pass.

No gradient needs the last product of a layer. It is 0.6 to 0.76 in the programs of GPT-NeoX, Llama
and Qwen shapes.
"""
# FLOPs of bfloat16 products per byte that memory delivers: 156 (A100) to 560 (v6e).
_FLOPS_PER_BYTE = 240.0


def trainer_share(config: Config, model_config: TransformerConfig) -> float:
    """Return the share of the devices that should train so that neither side waits for the other.

    The function compares rooflines of the work that no program can avoid. It assumes responses of
    half of their limit, and padded rows unless rows are packed.
    """
    x, t = config.task.max_prompt_tokens, max(1, config.search.max_new_tokens // 2)
    padded = t if config.batch.packed_length else config.search.max_new_tokens
    k, samples = config.objective.group_size, config.search.samples_per_prompt
    trained = config.batch.num_prompts * k
    sampled = config.replay.recency_prob * config.batch.num_prompts * samples
    training = roofline.train_flops(
        model_config,
        num_rows=trained,
        prompt_tokens=x,
        response_tokens=padded,
        responses_per_prompt=k if shares_prompts(config) or config.batch.packed_length else 1,
    )
    forward = training / 3
    if remat_of(config) == "layers":
        training += REPEATED_SHARE * forward
    searching = 2.0 * roofline.matrix_entries(model_config) * x * sampled / samples
    training += forward * sampled / trained  # the reference scores each response once
    narrow = config.search.quantization != "none"
    slots = num_slots(config)
    decoding = roofline.decode_work(
        model_config,
        itemsize=1 if narrow else jnp.dtype(config.model.compute_dtype).itemsize,
        num_steps=t,
        prompt_tokens=x,
        response_lengths=[t] * slots,
    )
    searching += max(decoding.num_flops, decoding.num_bytes * _FLOPS_PER_BYTE) * sampled / slots
    return training / (training + searching)


def held_bytes(config: Config, model_config: TransformerConfig) -> float:
    """Return the approximate bytes of the train state, or of the frozen base of adapters."""
    params = num_params(model_config) * jnp.dtype(config.model.param_dtype).itemsize
    if config.lora.rank:
        return params  # Adapters are small compared with their base.
    return 4 * params  # parameters, two moments and the reference


def step_bytes(
    responses: int,
    config: Config,
    model_config: TransformerConfig,
    mesh: MeshShape,
    platform: Platform,
) -> float:
    """Return the approximate memory of a train step per device, without the train state.

    The estimate is the sum of:

    - the attention scores of one layer and their gradient; for flash attention over packed rows,
      or in windows with sinks, the mask of pairs and its derivatives;
    - the inputs of each layer;
    - the inner activations of one layer and their gradients;
    - the table of embeddings in the compute dtype, whole on each device, and its whole gradient;
    - the gradient of the parameters and its sum over micro-batches; for a pattern of several
      layers, also the gradients of the pattern before they are stacked;
    - the values of every layer that are kept instead of recomputed.

    Args:
        responses: number of responses (if packed, of rows) of a micro-batch on one device.
        platform: platform of the trainer's devices, which selects the attention kernel.
    """
    x, t = config.task.max_prompt_tokens, config.search.max_new_tokens
    c = min(responses, config.objective.group_size) if shares_prompts(config) else 1
    tokens = responses // c * (x + c * t)
    pairs = responses // c * (x * x + c * t * (x + t)) if c > 1 else responses * (x + t) ** 2
    if row := config.batch.packed_length:
        tokens, pairs = responses * row, responses * row**2
    dtype = jnp.dtype(config.model.compute_dtype)
    size = dtype.itemsize
    kept = size * model_config.num_layers * model_config.hidden_size * tokens
    width = model_config.mlp_size / mesh.model
    if k := model_config.experts_per_token:  # each token once for each of its experts
        width = k * mesh.expert * (width + model_config.hidden_size)
    inner = 4 * size * width * tokens
    scores = 2 * 4 * model_config.num_heads * pairs / mesh.model
    chosen = attention.choose(config.model.attention, platform, dtype, model_config.head_dim)
    sinks = jnp.zeros(()) if model_config.sinks else None
    of_scores = [scores_of(kind, model_config, sinks) for kind in model_config.pattern]
    # A mesh that keeps key/value heads whole does not divide flash attention.
    is_divided = model_config.num_kv_heads % mesh.model == 0
    length = row or x + t
    found = {y.allowed(chosen, model_config.head_dim, length=length) for y in of_scores}
    if is_divided and found in ({"splash"}, {"cudnn"}):
        has_mask = row or any(x.needs_mask for x in of_scores)
        scores = 2 * size * responses * length**2 if has_mask else 0.0
    table = size * model_config.vocab_size * model_config.hidden_size / mesh.model
    of_params = 0.0
    if not config.lora.rank:
        copies = 2 if len(model_config.pattern) == 1 else 3
        of_params = copies * 4 * num_params(model_config) / mesh.num_param_parts
        if mesh.num_param_parts > mesh.model:  # the gradient is whole until it is divided
            table += 4 * model_config.vocab_size * model_config.hidden_size / mesh.model
    kept += model_config.num_layers * tokens * size * _kept_values(config, model_config)
    if remat_of(config) == "none":
        scores *= model_config.num_layers
    return scores + kept + inner + table + of_params


def _kept_values(config: Config, model_config: TransformerConfig) -> float:
    """Return the number of values of a token that the backward pass keeps in a layer.

    The input of the layer does not count. With remat=`dots` these are the outputs of matrix
    products. With `none` the estimate is four times as many, because norms, rotations and
    activations are kept, some in float32.
    """
    heads = model_config.num_heads + 2 * model_config.num_kv_heads
    products = (
        heads * model_config.head_dim + 2 * model_config.hidden_size + 2 * model_config.mlp_size
    )
    return {"layers": 0, "dots": products, "none": 4 * products}[remat_of(config)]


def searcher_bytes(
    config: Config,
    model_config: TransformerConfig,
    devices: Sequence[Any],
    judge_bytes: Callable[[int], float],
) -> Callable[[int], float]:
    """Return a function from group size to the memory of each searcher device.

    The memory has two versions of the weights, the reference, the KV cache, and reward models.
    """
    weights = _weight_bytes(config, model_config, devices[0])
    columns = config.task.max_prompt_tokens + config.search.max_new_tokens + 8
    dtype = config.model.compute_dtype
    cache = shard_bytes(kv_cache.abstract_layers(model_config, num_slots(config), columns, dtype))
    if config.task.environment:
        cache *= 2  # caches of waiting conversations

    def bytes_of(g: int) -> float:
        return (
            weights / g
            + cache / math.gcd(g, model_config.num_kv_heads, model_config.delta_key_heads)
            + judge_bytes(g)
        )

    return bytes_of


def _weight_bytes(config: Config, model_config: TransformerConfig, device: Any) -> float:
    """Return the bytes of a searcher's weights: current and next version, base of adapters."""

    def weights(quantization: Quantization) -> Params:
        where, dtype = SingleDeviceSharding(device), jnp.dtype(config.model.compute_dtype)
        return lowering.abstract_weights(model_config, dtype, where, quantization)

    held = weights(config.search.quantization)
    policy = model_parts.policy_config(config, model_config)
    if policy.adapters is None:
        return 2 * shard_bytes(held)
    base = lora.adapted(weights("none"), policy), lora.unadapted(held, policy)
    return shard_bytes(base) + 2 * shard_bytes(lora.adapted(held, policy))


def num_slots(config: Config) -> int:
    """Return the number of decode slots of a searcher."""
    return config.search.slots


def shard_bytes(tree: Any) -> float:
    """Return the bytes of a tree of ShapeDtypeStructs on each device, without layout padding."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        total += math.prod(shape) * jnp.dtype(x.dtype).itemsize
    return total


def state_bytes_by_kind(state: TrainState) -> dict[str, float]:
    """Return the bytes of an abstract train state in the memory of each device, by kind."""
    kinds = {
        "parameters": shard_bytes(state.params),
        "optimiser state": shard_bytes(state.opt_state),
    }
    if state.reference_params is not None:
        kinds["reference parameters"] = shard_bytes(state.reference_params)
    return kinds
