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
from tba_jax.decoding.programs import Prefixes, empty_slots
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
    axes, units = dict(transformer.param_axes(config)), transformer.abstract_params(config)
    # Name -> logical axes and shape. In matrices, heads and head_dim are merged; the merged axis is
    # divided by whole heads.
    layers: dict[str, tuple[tuple, tuple[int, ...]]] = {}
    for name, names in axes["layers"].items():
        is_matrix, shape = name in quantized.MATRICES, units["layers"][name].shape
        at = [i for i, x in enumerate(names) if i and not (is_matrix and x == "head_dim")]
        layers[name] = tuple(names[i] for i in at), tuple(shape[i] for i in at)
        if is_matrix and quantization != "none":
            (*outer, _, axis), (*sizes, _, size) = layers[name]
            layers[quantized.scale_name(name)] = (*outer, axis), (*sizes, size)
    of_kind = [[n for n in layers if has_leaf(kind, n)] for kind in config.layer_kinds]
    axes["layers"] = tuple({n: layers[n][0] for n in names} for names in of_kind)
    shapes = {n: jax.ShapeDtypeStruct(shape, jnp.float32) for n, (_, shape) in layers.items()}
    units = {**units, "layers": tuple({n: shapes[n] for n in names} for names in of_kind)}
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

    def lists(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    length, n, p = decoder.cache_length, num_slots, prefill_prompts
    history, slots = caches(n, length), empty_slots(n, num_stop_ids)

    def lower(program: Any, *args: Any, **static: Any) -> Callable[[], jax.stages.Lowered]:
        return lambda: program.lower(*args, **static)

    new = weights, lists(p, prompt_length), lists(p)
    yield "prefill", lower(decoder.extend, *new, None)
    # An observation may be as long as a cache.
    rows = lists(max(1, EXTEND_TOKENS // length))
    added = weights, lists(*rows.shape, length), rows
    yield "extend", lower(decoder.extend, *added, Prefixes(history, rows, rows))
    yield "copy", lower(decoder.copy, history, caches(p, prompt_length), lists(n), lists(n))
    for name, is_truncated in (("chunk", False), ("chunk_truncated", True)):
        yield name, lower(decoder.run_chunk, weights, history, slots, is_truncated=is_truncated)


def _weight_shapes(config: TransformerConfig, dtype: Any, quantization: Quantization) -> Params:
    def arrange(params: Params) -> Params:
        return quantized.quantize(transformer.unstack_layers(params, config), quantization)

    return jax.eval_shape(arrange, transformer.abstract_params(config, dtype))


def _abstract(shape: tuple[int, ...], dtype: Any, sharding: Sharding) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)
