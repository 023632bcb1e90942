# SPDX-License-Identifier: Apache-2.0
"""Lowering of every program of a decoder from shapes alone, to check compilation and memory.

Lowering needs neither weights nor attached devices: devices of `jax.experimental.topologies`
suffice. Invariant: the shapes are those of a `Session`.
"""

from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec, Sharding

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.programs import Prefixes, Slots
from tba_jax.decoding.sampling import RowSettings
from tba_jax.decoding.session import EXTEND_TOKENS
from tba_jax.devices.sharding import tree_shardings
from tba_jax.models import kv_cache, quantized, transformer
from tba_jax.models.architecture import has_leaf
from tba_jax.models.kv_cache import LayerCache
from tba_jax.models.quantized import Quantization
from tba_jax.models.transformer import Params, TransformerConfig


def weight_shardings(
    config: TransformerConfig, mesh: Mesh, quantization: Quantization = "none"
) -> Params:
    """Return the shardings of weights in the decoder's layout, a tuple of layers.

    Args:
        quantization: quantization of the weights; scales are sharded like their columns.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    axes = dict(transformer.param_axes(config))
    units = dict(transformer.abstract_params(config))
    # Matrices have heads and head_dim merged; the merged axis is divided by whole heads.
    kept = {
        name: [i for i, axis in enumerate(names) if axis not in ("layers", "head_dim")]
        if name in quantized.MATRICES
        else range(1, len(names))
        for name, names in axes["layers"].items()
    }
    layer_axes = {name: tuple(axes["layers"][name][i] for i in kept[name]) for name in kept}
    layer_units = {
        name: jax.ShapeDtypeStruct(tuple(units["layers"][name].shape[i] for i in at), jnp.float32)
        for name, at in kept.items()
    }
    for name in quantized.MATRICES:
        if quantization != "none" and name in layer_axes:
            scale = quantized.scale_name(name)
            names, shape = layer_axes[name], layer_units[name].shape
            layer_axes[scale] = (*names[:-2], names[-1])
            layer_units[scale] = jax.ShapeDtypeStruct((*shape[:-2], shape[-1]), jnp.float32)
    for tree, of_layer in ((axes, layer_axes), (units, layer_units)):
        tree["layers"] = tuple(
            {name: x for name, x in of_layer.items() if has_leaf(kind, name)}
            for kind in config.layer_kinds
        )
    return tree_shardings(axes, units, mesh)


def abstract_weights(
    config: TransformerConfig,
    dtype: Any,
    where: Mesh | Sharding,
    quantization: Quantization = "none",
) -> Params:
    """Return weights in the decoder's layout as ShapeDtypeStructs with shardings.

    Args:
        dtype: dtype of the weights.
        where: a mesh, on which the rules of `sharding` apply; or one sharding for all weights.
    """
    shapes = _weight_shapes(config, dtype, quantization)
    if not isinstance(where, Mesh):
        return jax.tree.map(lambda x: _abstract(x.shape, x.dtype, where), shapes)
    return jax.tree.map(
        lambda x, sharding: _abstract(x.shape, x.dtype, sharding),
        shapes,
        weight_shardings(config, where, quantization),
    )


def lower_all(
    decoder: Decoder,
    weights: Params,
    *,
    num_slots: int,
    prompt_length: int,
    prefill_prompts: int = 1,
    num_stop_ids: int = 1,
) -> Iterator[tuple[str, Callable[[], jax.stages.Lowered]]]:
    """Yield (name, function that lowers the program) for each program of a session of these sizes.

    Args:
        decoder: decoder of the programs; each lowering counts as one of its traces.
        weights: return value of `abstract_weights`, on the devices to compile for.
        num_slots: n, number of slots.
        prompt_length: padded length of the prompts.
        prefill_prompts: prompts per prefill call.
        num_stop_ids: maximum number of stop ids of a request.
    """
    config = decoder.config
    # Host arguments have no sharding; caches are on the devices of the weights.
    where = decoder.cache_sharding or jax.tree.leaves(weights)[0].sharding
    if decoder.cache_sharding is None and isinstance(where, NamedSharding):
        where = NamedSharding(where.mesh, PartitionSpec())

    def caches(rows: int, columns: int) -> tuple[LayerCache, ...]:
        found = kv_cache.abstract_layers(config, rows, columns, decoder.compute_dtype)
        return jax.tree.map(lambda x: _abstract(x.shape, x.dtype, where), found)

    def ints(*shape: int, dtype: Any = jnp.int32) -> Any:
        return jax.ShapeDtypeStruct(shape, dtype)

    length = decoder.cache_length
    n, history = num_slots, caches(num_slots, length)
    slots = Slots(
        last=ints(n),
        length=ints(n),
        count=ints(n),
        is_live=ints(n, dtype=jnp.bool_),
        keys=ints(n, 2, dtype=jnp.uint32),
        settings=RowSettings(
            temperature=ints(n, dtype=jnp.float32),
            top_p=ints(n, dtype=jnp.float32),
            top_k=ints(n),
        ),
        min_new_tokens=ints(n),
        max_new_tokens=ints(n),
        stop_ids=ints(n, num_stop_ids),
    )
    prompts = ints(prefill_prompts, prompt_length), ints(prefill_prompts)

    def lower(program: Any, *args: Any, **static: Any) -> Callable[[], jax.stages.Lowered]:
        return lambda: program.lower(*args, **static)

    yield "prefill", lower(decoder.prefill, weights, *prompts)
    # An observation may be as long as a cache.
    rows = ints(max(1, EXTEND_TOKENS // length))
    added_tokens = Prefixes(history, rows, rows), ints(*rows.shape, length), rows
    yield "extend", lower(decoder.extend, weights, *added_tokens)
    prefilled = caches(prefill_prompts, prompt_length)
    yield "admit", lower(decoder.admit, history, prefilled, ints(n), ints(n))
    for name, is_truncated in (("chunk", False), ("chunk_truncated", True)):
        args = weights, history, slots
        yield name, lower(decoder.run_chunk, *args, is_truncated=is_truncated)


def _weight_shapes(config: TransformerConfig, dtype: Any, quantization: Quantization) -> Params:
    def arrange(params: Params) -> Params:
        return quantized.quantize(transformer.unstack_layers(params, config), quantization)

    return jax.eval_shape(arrange, transformer.abstract_params(config, dtype))


def _abstract(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
