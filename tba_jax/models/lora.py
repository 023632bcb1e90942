# SPDX-License-Identifier: Apache-2.0
"""Low-rank adapters (LoRA): a policy is frozen base parameters and a small tree that is trained.

Adapters are a tree like that of the parameters, with two leaves A and B for each matrix that has
one, stacked over layers. They are float32 whatever the base is stored in: they are few, and an
update may be too small for anything less. This module splits and joins the two trees, makes fresh
adapters, merges them into plain parameters, and knows one base from another; `transformer` computes
with them. The invariant it owns: a base with fresh adapters computes what the base alone does, bit
for bit, unless what is merged is rounded to eight bits.

Reference: arXiv:2106.09685.
"""

import dataclasses
import functools
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jaxtyping import Array

from tba_jax.models.hf import hf_weights
from tba_jax.models.quantized import Quantization, quantize, scale_name
from tba_jax.models.transformer import (
    Adapters,
    Params,
    TransformerConfig,
    abstract_params,
    lora_names,
)

# First fold of the root key: keeps the draw of A apart from any other use of the seed.
_ADAPTER_ROLE = 3

_MATRICES = ("q", "k", "v", "o", "gate", "up", "down")


def with_adapters(
    config: TransformerConfig, rank: int, alpha: float, modules: Sequence[str]
) -> TransformerConfig:
    """The architecture with adapters.

    Args:
        config: without.
        rank, alpha: as in `Adapters`.
        modules: names of matrices of a layer.

    Raises:
        ValueError: the model lacks one of them.
    """
    there = abstract_params(config)["layers"]
    matrices = [name for name in _MATRICES if name in there]
    absent = [name for name in modules if name not in matrices]
    if absent:
        raise ValueError(
            f"config.lora.modules names {', '.join(absent)}, and the layers of this model "
            f"({config.family}) have the matrices {', '.join(matrices)}; leave out the others"
        )
    return dataclasses.replace(config, adapters=Adapters(rank, alpha, tuple(modules)))


def split(params: Params) -> tuple[Params, Params]:
    """(base, adapters) of a tree that holds both; leaves may be anything."""
    layers = params["layers"]
    leaves = {leaf for name in _MATRICES for leaf in lora_names(name)}
    base = {name: x for name, x in layers.items() if name not in leaves}
    adapters = {name: x for name, x in layers.items() if name in leaves}
    return {**params, "layers": base}, {"layers": adapters}


def combine(base: Params, adapters: Params) -> Params:
    """The inverse of `split`; nothing is copied."""
    return {**base, "layers": {**base["layers"], **adapters["layers"]}}


def abstract_adapters(config: TransformerConfig) -> Params:
    """The tree of `init_adapters` as ShapeDtypeStructs."""
    return split(abstract_params(config, jnp.float32))[1]


def init_adapters(config: TransformerConfig, seed: int, shardings: Any = None) -> Params:
    """Fresh adapters: A uniform within 1 / sqrt(inputs) of zero, B zero.

    Args:
        config: the architecture, with adapters.
        seed: of the run.
        shardings: a tree of them; None: the default device. What is drawn does not depend on it.
    """
    shapes, modules = abstract_adapters(config)["layers"], _adapters(config).modules

    def draw(key: Array) -> Params:
        key = jax.random.fold_in(key, _ADAPTER_ROLE)
        layers = {}
        for number, name in enumerate(modules):
            a, b = lora_names(name)
            shape = shapes[a].shape
            # As in peft, the implementation that the paper's code uses.
            limit = 1 / math.sqrt(math.prod(shape[1:-1]))
            layers[a] = jax.random.uniform(
                jax.random.fold_in(key, number), shape, jnp.float32, -limit, limit
            )
            layers[b] = jnp.zeros(shapes[b].shape, jnp.float32)
        return {"layers": layers}

    return jax.jit(draw, out_shardings=shardings)(jax.random.key(seed))


def merge(base: Params, adapters: Params, *, config: TransformerConfig) -> Params:
    """Plain parameters that compute what base and adapters do: each matrix is W + alpha/r A B.

    Summed in float32 and rounded to the dtype of the base. Leaves without an adapter are those of
    the base itself, the others lie where theirs does.

    Args:
        base: parameters with layers stacked, or apart as the decoder has them.
        adapters: layers stacked, on the devices of the base.
        config: the architecture, with adapters.
    """
    kernels = adapted(base, config)
    merged, layers = _merge(*_merge_arguments(kernels, adapters, config)), base["layers"]
    if isinstance(layers, tuple):
        return {**base, "layers": _joined(layers, merged)}
    return {**base, "layers": {**layers, **merged}}


class Base(NamedTuple):
    """Frozen parameters in the decoder's layout, as a searcher keeps them.

    Attributes:
        kernels: of each layer, the matrices that have adapters; exact.
        rest: the tree without them, as the decoder reads it.
    """

    kernels: tuple[Params, ...]
    rest: Params


def merge_into(
    base: Base, adapters: Params, *, config: TransformerConfig, quantization: Quantization = "none"
) -> Params:
    """`merge` for a decoder: the same weights as `quantize` would make of what it returns.

    Args:
        base: whose rest is in eight bits, where the result is to be.
        adapters: layers stacked, on the devices of the base.
        config: the architecture, with adapters.
        quantization: of what is merged.
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
    """The program of `merge_into`, from ShapeDtypeStructs with shardings."""
    return _merge.lower(*_merge_arguments(kernels, adapters, config, quantization))


def adapted(base: Params, config: TransformerConfig) -> Any:
    """The matrices of a base that have adapters, with scales if any: all that merging makes anew.

    Leaves may be anything, as in `unadapted`.
    """
    names, layers = _adapted_leaves(config), base["layers"]
    if isinstance(layers, tuple):
        return tuple({n: x for n, x in layer.items() if n in names} for layer in layers)
    return {n: x for n, x in layers.items() if n in names}


def unadapted(base: Params, config: TransformerConfig) -> Params:
    """A base in the decoder's layout without what `adapted` takes of it."""
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
    # One program serves bases on any one device; a sharding would bind it to its own.
    divided = None
    if any(len(x.device_set) > 1 for x in where):
        tree = jax.tree.map(lambda x: x.sharding, kernels)
        if quantization != "none":
            tree = tuple(layer | _of_scales(layer) for layer in tree)
        divided = tuple(jax.tree.leaves(tree))
    return kernels, adapters["layers"], _adapters(config), divided, quantization


def _of_scales(layer: dict[str, NamedSharding]) -> dict[str, NamedSharding]:
    """Scales lie with the columns that they belong to."""
    return {
        scale_name(name): NamedSharding(x.mesh, PartitionSpec((*x.spec, None, None)[1]))
        for name, x in layer.items()
    }


def _adapters(config: TransformerConfig) -> Adapters:
    if config.adapters is None:
        raise ValueError("this architecture has no adapters; use that of `with_adapters`")
    return config.adapters


@functools.partial(jax.jit, static_argnames=("config", "shardings", "quantization"))
def _merge(
    kernels: Any,
    adapters: Params,
    config: Adapters,
    shardings: tuple[Any, ...] | None,
    quantization: Quantization,
) -> Any:
    """The kernels, of all layers in one tree or of each in its own, with adapters added."""

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

    if isinstance(kernels, tuple):
        merged: Any = tuple(
            {name: add(x, *(y[i] for y in pair(name))) for name, x in layer.items()}
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


def check_base(folder: Path, expected: str) -> None:
    """Refuse a base other than the one that adapters were trained on.

    Args:
        folder: of the model.
        expected: `hf_weights.fingerprint` of the folder that they were trained on.

    Raises:
        ValueError: another one, or the same folder with other weights.
    """
    found = hf_weights.fingerprint(folder)
    if found != expected:
        raise ValueError(
            f"the adapters of this run were trained on weights with the fingerprint {expected}, "
            f"and those of {folder} have {found}; put the weights that the run began with there "
            "again (config.model.path in the run's config.json)"
        )
