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
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
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


def combine(base: Params, more: Params) -> Params:
    """Return a base with more leaves in its layers, without copies: the inverse of `split`."""
    old, new = base["layers"], more["layers"]
    if isinstance(old, tuple):  # the decoder's layout
        return {**base, "layers": tuple({**x, **y} for x, y in zip(old, new, strict=True))}
    return {**base, "layers": {**old, **new}}


def abstract_adapters(config: TransformerConfig) -> Params:
    """Return the tree of `init_adapters` as ShapeDtypeStructs."""
    return split(abstract_params(config, jnp.float32))[1]


def init_adapters(config: TransformerConfig, seed: int, shardings: Any = None) -> Params:
    """Return new adapters, with A uniform within 1 / sqrt(inputs) of 0, and B = 0.

    Args:
        config: the architecture, with adapters.
        shardings: tree of shardings, which do not change the values; None: the default device.
    """
    assert config.adapters is not None
    shapes, modules = abstract_adapters(config)["layers"], config.adapters.modules

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


def parts(exact: Params, held: Params, config: TransformerConfig) -> tuple[Any, Params]:
    """Return (adapted matrices of a base, its other leaves): the parts that `make_merge` joins.

    Args:
        exact: the base; layers stacked, or separate as in the decoder; leaves of any type.
        held: the base as searchers store it, rounded or quantised; has the other leaves.
        config: the architecture, with adapters.
    """
    assert config.adapters is not None
    modules = config.adapters.modules
    names = {*modules, *map(scale_name, modules)}

    def chosen(layers: Any, is_adapted: bool) -> Any:
        if isinstance(layers, tuple):
            return tuple(chosen(layer, is_adapted) for layer in layers)
        return {name: x for name, x in layers.items() if (name in names) == is_adapted}

    return chosen(exact["layers"], True), {**held, "layers": chosen(held["layers"], False)}


def merge(base: Params, adapters: Params, *, config: TransformerConfig) -> Params:
    """Return plain parameters equal to base with adapters: each matrix is W + alpha/r A B.

    Sums are computed in float32 and rounded to the dtype of the base. Leaves without an adapter are
    the arrays of the base; merged leaves have the sharding of the base.

    Args:
        base: parameters with layers stacked, or separate as in the decoder.
        adapters: layers stacked, on the devices of the base.
        config: the architecture, with adapters.
    """
    return make_merge(*parts(base, base, config), config)(adapters)


def make_merge(
    kernels: Any, rest: Params, config: TransformerConfig, quantization: Quantization = "none"
) -> Callable[[Params], Params]:
    """Return the function adapters -> weights, quantised like the result of `quantize`.

    Args:
        kernels, rest: return values of `parts`; the matrices are not quantised, others may be.
        config: the architecture, with adapters.
        quantization: format of the merged matrices; needs the decoder's layout.
    """
    program = merge_program(kernels, config, quantization)
    return lambda adapters: combine(rest, {"layers": program(kernels, adapters)})


def merge_program(
    kernels: Any, config: TransformerConfig, quantization: Quantization = "none"
) -> Any:
    """Return the jitted program (kernels, adapters) -> kernels with adapters, quantised.

    Args:
        kernels: as in `make_merge`, or ShapeDtypeStructs with shardings.
        config, quantization: as in `make_merge`.
    """
    shardings = jax.tree.map(lambda x: x.sharding, kernels)
    # One program serves bases on any single device; a sharding would bind it to one device.
    if all(len(x.device_set) == 1 for x in jax.tree.leaves(shardings)):
        shardings = None
    elif quantization != "none":
        # Unspecified: scales are divided as the columns of their matrix.
        shardings = tuple(x | dict.fromkeys(map(scale_name, x)) for x in shardings)
    program = functools.partial(_merged, config=config, quantization=quantization)
    return jax.jit(program, out_shardings=shardings)


def _merged(
    kernels: Any, adapters: Params, config: TransformerConfig, quantization: Quantization
) -> Any:
    """Return the matrices with adapters added, in the layout of `kernels`: stacked or by layer."""
    assert config.adapters is not None
    factor = config.adapters.scale

    def add(kernel: Array, a: Array, b: Array) -> Array:
        inputs = math.prod(a.shape[:-1])
        delta = jnp.matmul(
            a.reshape(inputs, -1).astype(jnp.float32),
            b.reshape(b.shape[0], -1).astype(jnp.float32),
            precision="highest",
        )
        total = kernel.astype(jnp.float32) + factor * delta.reshape(kernel.shape)
        return total.astype(kernel.dtype)

    def pair(name: str) -> list[Array]:
        return [adapters["layers"][leaf] for leaf in lora_names(name)]

    if not isinstance(kernels, tuple):
        return {name: jax.vmap(add)(x, *pair(name)) for name, x in kernels.items()}
    layers = tuple(
        {name: add(x, *(y[config.row(name, i)] for y in pair(name))) for name, x in layer.items()}
        for i, layer in enumerate(kernels)
    )
    return quantize({"layers": layers}, quantization)["layers"]
