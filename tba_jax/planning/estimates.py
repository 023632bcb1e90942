# SPDX-License-Identifier: Apache-2.0
"""Memory of a run on its devices, estimated from shapes to choose a placement without compiling."""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.config.resolved import remat_of, shares_prompts
from tba_jax.config.schema import Config
from tba_jax.decoding.programs import WIDTHS
from tba_jax.decoding.shardings import abstract_weights
from tba_jax.devices.placement import MeshShape
from tba_jax.devices.platform import Platform
from tba_jax.models import attention, kv_cache, lora
from tba_jax.models.block import scores_of
from tba_jax.models.quantized import Quantization
from tba_jax.models.transformer import Params, TransformerConfig, num_params
from tba_jax.run import model_parts


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
    sinks = jnp.zeros(()) if model_config.sinks else None
    of_scores = [scores_of(kind, model_config, sinks) for kind in model_config.pattern]
    # A mesh that keeps key/value heads whole does not divide flash attention.
    is_divided = model_config.num_kv_heads % mesh.model == 0
    length = row or x + t
    kernels = attention.Kernels(config.model.attention, platform)
    found = {kernels.select(dtype, model_config.head_dim, y, length) for y in of_scores}
    if is_divided and found in ({"splash"}, {"cudnn"}):
        has_mask = row or any(x.needs_mask for x in of_scores)
        scores = 2 * size * responses * length**2 if has_mask else 0.0
    table = size * model_config.vocab_size * model_config.hidden_size / mesh.model
    of_params = 0.0
    if not config.lora.rank:
        copies = 2 if len(model_config.pattern) == 1 else 3
        of_params = copies * 4 * num_params(model_config) / (mesh.size // mesh.data)
        if mesh.size // mesh.data > mesh.model:  # the gradient is whole until it is divided
            table += 4 * model_config.vocab_size * model_config.hidden_size / mesh.model
    # Outputs of products, which "dots" keeps for a token; "none" also keeps norms, rotations and
    # activations, some in float32: about four times as many values.
    heads = (model_config.num_heads + 2 * model_config.num_kv_heads) * model_config.head_dim
    products = heads + 2 * model_config.hidden_size + 2 * model_config.mlp_size
    times = {"layers": 0, "dots": 1, "none": 4}[remat_of(config)]
    kept += model_config.num_layers * tokens * size * times * products
    if remat_of(config) == "none":
        scores *= model_config.num_layers
    return scores + kept + inner + table + of_params


def searcher_bytes(
    config: Config,
    model_config: TransformerConfig,
    device: Any,
    judge_bytes: Callable[[int], float] = lambda group_size: 0.0,
) -> float:
    """Return the memory of each device of a searcher.

    The memory has two versions of the weights, the base of adapters, the KV cache, and reward
    models.

    Args:
        device: a device of the searcher.
        judge_bytes: group size -> memory of reward models on the first device of a searcher.
    """
    dtype, g = jnp.dtype(config.model.compute_dtype), config.search.num_devices

    def weights(quantization: Quantization) -> Params:
        mesh = Mesh([device], ("model",))
        return abstract_weights(model_config, dtype, mesh, quantization)

    held = weights(config.search.quantization)
    policy = model_parts.policy_config(config, model_config)
    if policy.adapters is None:
        num_bytes = 2 * shard_bytes(held)
    else:
        base = lora.parts(weights("none"), held, policy)
        num_bytes = shard_bytes(base) + 2 * shard_bytes(lora.parts(held, held, policy)[0])
    columns = config.task.max_prompt_tokens + config.search.max_new_tokens + 8
    sizes = config.search.slots, columns, dtype, max(WIDTHS)
    layers = jax.eval_shape(lambda: kv_cache.empty_layers(model_config, *sizes))
    # Half of the caches belong to conversations that wait for their environment.
    cache = shard_bytes(layers) * (2 if config.task.environment else 1)
    parts = math.gcd(g, model_config.num_kv_heads, model_config.delta_key_heads)
    return num_bytes / g + cache / parts + judge_bytes(g)


def shard_bytes(tree: Any) -> float:
    """Return the bytes of a tree of ShapeDtypeStructs on each device, without layout padding."""
    total = 0.0
    for x in jax.tree.leaves(tree):
        shape = x.shape if x.sharding is None else x.sharding.shard_shape(x.shape)
        total += math.prod(shape) * jnp.dtype(x.dtype).itemsize
    return total
