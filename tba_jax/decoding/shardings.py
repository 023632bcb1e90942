# SPDX-License-Identifier: Apache-2.0
"""Layout of a decoder's weights and caches on devices, from shapes alone."""

import math
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.devices.sharding import AXIS_RULES, placed_shapes, tree_shardings
from tba_jax.models import quantized, transformer
from tba_jax.models.architecture import has_leaf
from tba_jax.models.quantized import Quantization
from tba_jax.models.shardings import on_mesh
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
    axes, shapes = transformer.param_axes(config), transformer.abstract_params(config)
    found = tree_shardings(axes, shapes, mesh)

    specs = dict[str, tuple[Any, ...]]()
    for name, where in found["layers"].items():
        # In matrices, heads and head_dim are merged; whole heads divide the merged axis.
        merged = "head_dim" if name in quantized.MATRICES else ""
        parts = zip(axes["layers"][name][1:], where.spec[1:], strict=True)
        specs[name] = spec = tuple(part for axis, part in parts if axis != merged)
        if name in quantized.MATRICES and quantization != "none":
            specs[quantized.scale_name(name)] = (*spec[:-2], spec[-1])
    every = {name: NamedSharding(mesh, PartitionSpec(*spec)) for name, spec in specs.items()}
    layers = ({x: every[x] for x in every if has_leaf(kind, x)} for kind in config.layer_kinds)
    return {**found, "layers": tuple(layers)}


def abstract_weights(
    config: TransformerConfig, dtype: Any, mesh: Mesh, quantization: Quantization = "none"
) -> Params:
    """Return weights in the decoder's layout as ShapeDtypeStructs, on the devices of a mesh."""

    def arranged(params: Params) -> Params:
        return quantized.quantize(transformer.unstack_layers(params, config), quantization)

    shapes = jax.eval_shape(arranged, transformer.abstract_params(config, dtype))
    return placed_shapes(shapes, on_mesh(mesh, weight_shardings(config, mesh, quantization)))


def cache_sharding(config: TransformerConfig, mesh: Mesh) -> NamedSharding:
    """Return the sharding of a cache [n g c e] and of states: over key/value heads.

    With fewer heads than devices, neighbouring devices replicate a head: the mesh axis is split in
    two. If heads were not sharded, the compiler would copy each device's head out of the cache in
    every chunk: half a cache more for 2 heads on 4 devices.
    """
    axis = AXIS_RULES["kv_heads"].mesh_axis
    if axis not in mesh.shape:
        return NamedSharding(mesh, PartitionSpec())
    divided = math.gcd(mesh.shape[axis], config.num_kv_heads, config.delta_key_heads)
    copies = mesh.shape[axis] // divided
    if copies > 1:
        at = mesh.axis_names.index(axis)
        before, after = mesh.devices.shape[:at], mesh.devices.shape[at + 1 :]
        names = (*mesh.axis_names[:at], axis, f"{axis}_copies", *mesh.axis_names[at + 1 :])
        mesh = Mesh(mesh.devices.reshape(*before, divided, copies, *after), names)
    return NamedSharding(mesh, PartitionSpec(None, axis))
