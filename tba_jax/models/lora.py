# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA): a policy has frozen base parameters and a small trained tree.

Adapters are a tree like that of the parameters, with two leaves A and B for each adapted matrix,
stacked over layers. They are float32 for every dtype of the base, because updates may be too small
for narrower types. Invariant: a base with fresh adapters computes exactly what the base alone
computes, unless the merged matrices are rounded to 8 bits.

Reference: arXiv:2106.09685.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from tba_jax.models.architecture import Adapters, lora_names
from tba_jax.models.config import MATRICES
from tba_jax.models.quantized import Quantization, quantize, scale_name
from tba_jax.models.transformer import Params, TransformerConfig, abstract_params

# Number folded into the root key, to separate the random A from other uses of the seed.
_ADAPTER_ROLE = 3


def with_adapters(
    config: TransformerConfig, rank: int, alpha: float, modules: Sequence[str]
) -> TransformerConfig:
    """Return the architecture with adapters.

    Args:
        config: architecture without adapters.
        rank, alpha: as in `Adapters`.
        modules: names of matrices of a layer.

    Raises:
        ValueError: the model lacks one of the modules.
    """
    there = abstract_params(config)["layers"]
    matrices = [name for name in MATRICES if name in there]
    absent = [name for name in modules if name not in matrices]
    if absent:
        raise ValueError(
            f"lora.modules has {', '.join(absent)}, but the layers of this model "
            f"({config.family}) have only the matrices {', '.join(matrices)}. Remove the others"
        )
    return dataclasses.replace(config, adapters=Adapters(rank, alpha, tuple(modules)))


def split(params: Params) -> tuple[Params, Params]:
    """Return (base, adapters) of a tree with both; leaves may have any type."""
    layers = params["layers"]
    leaves = {leaf for name in MATRICES for leaf in lora_names(name)}
    base = {name: x for name, x in layers.items() if name not in leaves}
    adapters = {name: x for name, x in layers.items() if name in leaves}
    return {**params, "layers": base}, {"layers": adapters}


def combine(base: Params, adapters: Params) -> Params:
    """Return the inverse of `split`, without copies."""
    return {**base, "layers": {**base["layers"], **adapters["layers"]}}


def abstract_adapters(config: TransformerConfig) -> Params:
    """Return the tree of `init_adapters` as ShapeDtypeStructs."""
    return split(abstract_params(config, jnp.float32))[1]


def init_adapters(config: TransformerConfig, seed: int, shardings: Any = None) -> Params:
    """Return new adapters, with A uniform within 1 / sqrt(inputs) of 0, and B = 0.

    Args:
        config: the architecture, with adapters.
        shardings: tree of shardings, which do not change the values; None: the default device.
    """
    shapes, modules = abstract_adapters(config)["layers"], _adapters(config).modules

    def draw(key: Array) -> Params:
        key = jax.random.fold_in(key, _ADAPTER_ROLE)
        layers = {}
        for number, name in enumerate(modules):
            a, b = lora_names(name)
            shape = shapes[a].shape
            # The distribution of peft, which the paper's code uses.
            limit = 1 / math.sqrt(math.prod(shape[1:-1]))
            layers[a] = jax.random.uniform(
                jax.random.fold_in(key, number), shape, jnp.float32, -limit, limit
            )
            layers[b] = jnp.zeros(shapes[b].shape, jnp.float32)
        return {"layers": layers}

    return jax.jit(draw, out_shardings=shardings)(jax.random.key(seed))


def merge(base: Params, adapters: Params, *, config: TransformerConfig) -> Params:
    """Return plain parameters equal to base with adapters: each matrix is W + alpha/r A B.

    Sums are computed in float32 and rounded to the dtype of the base. Leaves without an adapter are
    the arrays of the base; merged leaves have the sharding of the base.

    Args:
        base: parameters with layers stacked, or separate as in the decoder.
        adapters: layers stacked, on the devices of the base.
        config: the architecture, with adapters.
    """
    kernels = adapted(base, config)
    merged, layers = _merge(*_merge_arguments(kernels, adapters, config)), base["layers"]
    if isinstance(layers, tuple):
        return {**base, "layers": _joined(layers, merged)}
    return {**base, "layers": {**layers, **merged}}


class Base(NamedTuple):
    """Frozen parameters of a searcher, in the decoder's layout.

    Attributes:
        kernels: adapted matrices of each layer, not quantised.
        rest: the tree without the adapted matrices, as the decoder reads it.
    """

    kernels: tuple[Params, ...]
    rest: Params


def merge_into(
    base: Base, adapters: Params, *, config: TransformerConfig, quantization: Quantization = "none"
) -> Params:
    """Return `merge` in the decoder's layout, quantised like the result of `quantize`.

    Args:
        base: base weights; weights without adapters are quantised already.
        adapters: layers stacked, on the devices of the base.
        config: the architecture, with adapters.
        quantization: quantization of the merged matrices.
    """
    merged = _merge(*_merge_arguments(base.kernels, adapters, config, quantization))
    return {**base.rest, "layers": _joined(base.rest["layers"], merged)}


def lower_merge(
    kernels: tuple[Params, ...],
    adapters: Params,
    *,
    config: TransformerConfig,
    quantization: Quantization = "none",
) -> jax.stages.Lowered:
    """Return the lowered program of `merge_into`, from ShapeDtypeStructs with shardings."""
    return _merge.lower(*_merge_arguments(kernels, adapters, config, quantization))


def adapted(base: Params, config: TransformerConfig) -> Any:
    """Return the adapted matrices of a base with their scales: the input of merging.

    Leaves may have any type, as in `unadapted`.
    """
    names, layers = _adapted_leaves(config), base["layers"]
    if isinstance(layers, tuple):
        return tuple({n: x for n, x in layer.items() if n in names} for layer in layers)
    return {n: x for n, x in layers.items() if n in names}


def unadapted(base: Params, config: TransformerConfig) -> Params:
    """Return a base in the decoder's layout without the matrices of `adapted`."""
    names = _adapted_leaves(config)
    layers = tuple({n: x for n, x in layer.items() if n not in names} for layer in base["layers"])
    return {**base, "layers": layers}


def _adapted_leaves(config: TransformerConfig) -> set[str]:
    modules = _adapters(config).modules
    return {*modules, *map(scale_name, modules)}


def _joined(layers: Sequence[Params], merged: Sequence[Params]) -> tuple[Params, ...]:
    return tuple({**layer, **new} for layer, new in zip(layers, merged, strict=True))


def _merge_arguments(
    kernels: Any, adapters: Params, config: TransformerConfig, quantization: Quantization = "none"
) -> tuple:
    where = [x.sharding for x in jax.tree.leaves(kernels)]
    # One program serves bases on any single device; a sharding would bind it to one device.
    divided = None
    if any(len(x.device_set) > 1 for x in where):
        tree = jax.tree.map(lambda x: x.sharding, kernels)
        if quantization != "none":
            tree = tuple(layer | _of_scales(layer) for layer in tree)
        divided = tuple(jax.tree.leaves(tree))
    return kernels, adapters["layers"], _adapters(config), divided, quantization


def _of_scales(layer: dict[str, NamedSharding]) -> dict[str, NamedSharding]:
    """Return the sharding of the scales of each matrix, divided as the columns of the matrix."""
    return {
        scale_name(name): NamedSharding(x.mesh, PartitionSpec((*x.spec, None, None)[1]))
        for name, x in layer.items()
    }


def _adapters(config: TransformerConfig) -> Adapters:
    if config.adapters is None:
        raise ValueError("this architecture has no adapters. Use the result of `with_adapters`")
    return config.adapters


@functools.partial(jax.jit, static_argnames=("config", "shardings", "quantization"))
def _merge(
    kernels: Any,
    adapters: Params,
    config: Adapters,
    shardings: tuple[Any, ...] | None,
    quantization: Quantization,
) -> Any:
    """Return the matrices with adapters added, in the layout of `kernels`: stacked or by layer."""

    def add(kernel: Array, a: Array, b: Array) -> Array:
        inputs = math.prod(a.shape[:-1])
        delta = jnp.matmul(
            a.reshape(inputs, -1).astype(jnp.float32),
            b.reshape(b.shape[0], -1).astype(jnp.float32),
            precision="highest",
        )
        total = kernel.astype(jnp.float32) + config.scale * delta.reshape(kernel.shape)
        return total.astype(kernel.dtype)

    def pair(name: str) -> tuple[Array, Array]:
        a, b = lora_names(name)
        return adapters[a], adapters[b]

    def row(name: str, layer: int) -> int:
        return sum(name in earlier for earlier in kernels[:layer])

    if isinstance(kernels, tuple):
        merged: Any = tuple(
            {name: add(x, *(y[row(name, i)] for y in pair(name))) for name, x in layer.items()}
            for i, layer in enumerate(kernels)
        )
        merged = quantize({"layers": merged}, quantization)["layers"]
    else:
        merged = {name: jax.vmap(add)(x, *pair(name)) for name, x in kernels.items()}
    if shardings is None:
        return merged
    leaves, treedef = jax.tree.flatten(merged)
    placed = map(jax.lax.with_sharding_constraint, leaves, shardings)
    return jax.tree.unflatten(treedef, list(placed))
