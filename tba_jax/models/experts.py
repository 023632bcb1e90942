# SPDX-License-Identifier: Apache-2.0
"""Mixture of experts without dropped tokens: each token passes the MLPs of its best experts.

Tokens are sorted by expert, so that each matrix product is one grouped product
(`jax.lax.ragged_dot`). On a mesh, `expert` divides the experts and the rows of a batch: devices of
one group gather their tokens, compute their own experts, and add up the results.
Invariant: a token's output does not depend on the other tokens, nor on the mesh, up to rounding.
"""

import math
from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from jaxtyping import Array, Float, Int32

from tba_jax.devices.sharding import batch_axes
from tba_jax.models.architecture import TransformerConfig, gated
from tba_jax.models.permutation import permuted

MATRICES = ("expert_gate", "expert_up", "expert_down")
LEAVES = (
    "router",
    "router_bias",
    *(name + suffix for name in MATRICES for suffix in ("", "_bias", "_scale")),
)
"""Possible leaves of a layer's experts."""


def feed_forward(
    y: Float[Array, "*b d"],
    leaves: Mapping[str, Array],
    *,
    config: TransformerConfig,
    mesh: Mesh | None = None,
) -> Float[Array, "*b d"]:
    """Return the weighted sum of the outputs of each token's experts.

    Args:
        y: normalised residual stream.
        leaves: the layer's parameters, by names of LEAVES; matrices may be 8-bit, with scales.
        config: the architecture, with experts.
        mesh: the devices; None: one device.
    """
    rows = y.reshape(-1, y.shape[-1])
    if mesh is None or mesh.size == 1:
        chosen = route(rows, leaves, config)
        return _of_rows(rows, leaves, chosen, jnp.int32(0), config=config).reshape(y.shape)
    row_axes = batch_axes(mesh)
    expert = "expert" if "expert" in mesh.shape else None
    # A decoder's mesh may divide the axis `model` into two (`decoding.shardings.cache_sharding`).
    model = tuple(axis for axis in mesh.axis_names if axis.startswith("model"))

    def spec(name: str, leaf: Array) -> PartitionSpec:
        if name.startswith("router"):
            return PartitionSpec()
        if name == "expert_down":
            return PartitionSpec(expert, model or None)
        if name.startswith("expert_down"):
            return PartitionSpec(expert)
        return PartitionSpec(expert, *[None] * (leaf.ndim - 2), model or None)

    def on_device(rows: Array, leaves: Mapping[str, Array]) -> Array:
        first, chosen = jnp.int32(0), route(rows, leaves, config)
        if expert is not None:
            first = jax.lax.axis_index(expert) * leaves["expert_down"].shape[0]
            rows, chosen = jax.lax.all_gather((rows, chosen), expert, tiled=True)
        if model and "expert_down_bias" in leaves:  # added once, not by each part
            is_first = jax.lax.axis_index(model) == 0
            bias = jnp.where(is_first, leaves["expert_down_bias"], 0)
            leaves = {**leaves, "expert_down_bias": bias}
        out = _of_rows(rows, leaves, chosen, first, config=config)
        if expert is not None:
            out = jax.lax.psum_scatter(out, expert, tiled=True)
        return jax.lax.psum(out, model) if model else out

    parts = math.prod(mesh.shape[axis] for axis in row_axes)
    divided = PartitionSpec(row_axes or None)
    run = jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(divided, {name: spec(name, leaf) for name, leaf in leaves.items()}),
        out_specs=divided,
        check_vma=False,
    )
    padded = jnp.pad(rows, ((0, -len(rows) % parts), (0, 0)))
    return run(padded, dict(leaves))[: len(rows)].reshape(y.shape)


def route(
    rows: Float[Array, "n d"], leaves: Mapping[str, Array], config: TransformerConfig
) -> tuple[Float[Array, "n k"], Int32[Array, "n k"]]:
    """Return (weights, numbers) of the experts of each token; weights are as in transformers."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    router = leaves["router"].astype(rows.dtype)
    logits = jnp.matmul(rows, router, preferred_element_type=wide)
    if config.mlp_bias:
        logits = logits + jnp.broadcast_to(leaves["router_bias"].astype(wide), logits.shape)
    scores = jax.nn.softmax(logits, axis=-1)
    weights, numbers = jax.lax.top_k(scores, config.experts_per_token)
    if config.normalised_experts:
        weights = weights / jnp.sum(weights, axis=-1, keepdims=True)
    return weights, numbers


def _of_rows(
    rows: Float[Array, "n d"],
    leaves: Mapping[str, Array],
    chosen: tuple[Float[Array, "n k"], Int32[Array, "n k"]],
    first: Int32[Array, ""],
    *,
    config: TransformerConfig,
) -> Float[Array, "n d"]:
    """Return the weighted sum of the outputs of some experts.

    Args:
        rows: tokens.
        leaves: parameters of adjacent experts.
        chosen: return value of `route`.
        first: number of the first of these experts.
    """
    (n, d), k = rows.shape, config.experts_per_token
    num, (of_tokens, numbers) = leaves["expert_down"].shape[0], chosen
    local = (numbers - first).reshape(-1)
    local = jnp.where((local >= 0) & (local < num), local, num)
    order = jnp.argsort(local)
    back = jnp.argsort(order)
    expert = local[order]
    sizes = jnp.sum(local[:, None] == jnp.arange(num)[None], axis=0, dtype=jnp.int32)

    def in_groups(x: Array) -> Array:
        # Rows for experts on other devices are in no group: the products of such rows, and the
        # gradients through them, are undefined.
        return x if num == config.num_experts else jnp.where((expert < num)[:, None], x, 0)

    def weighted(x: Array) -> Array:
        return (x.astype(weights.dtype) * weights).astype(x.dtype)

    def product(name: str, x: Array, of_bias: Callable[[Array], Array] = lambda x: x) -> Array:
        kernel, scale = leaves[name].astype(x.dtype), leaves.get(f"{name}_scale")
        out = jax.lax.ragged_dot(in_groups(x), kernel, sizes)
        if scale is not None:  # `quantized`
            out = (out * scale[expert]).astype(x.dtype)
        bias = leaves.get(f"{name}_bias")
        return in_groups(out if bias is None else out + of_bias(bias.astype(x.dtype)[expert]))

    x = permuted(jnp.repeat(rows, k, axis=0), order, back)
    inner = gated(config.activation, product("expert_gate", x), product("expert_up", x))
    # If the weights multiplied the result of the last product, their gradient would need it.
    weights = permuted(of_tokens.reshape(-1, 1), order, back)
    out = product("expert_down", weighted(inner), weighted)
    out = permuted(out, back, order).reshape(n, k, d)
    return jnp.sum(out, axis=1, dtype=weights.dtype).astype(rows.dtype)
