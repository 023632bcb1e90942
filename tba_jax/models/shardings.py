# SPDX-License-Identifier: Apache-2.0
"""A transformer on a mesh: where its parameters lie, and where they are while a program computes.

Parameters are stored divided over `fsdp` and `model`. A program gathers those of one layer over
`fsdp` when it reaches that layer, in the dtype it computes in, and gives their gradient back
divided; the division over `model` stays through every matrix product. The invariant it owns: no
more than one layer, and the tables at both ends, are ever whole over `fsdp`.
"""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from tba_jax.devices.platform import Platform
from tba_jax.devices.sharding import AXIS_RULES, BATCH_AXES, tree_shardings
from tba_jax.devices.site import Site
from tba_jax.models import transformer
from tba_jax.models.transformer import Params, TransformerConfig


def param_shardings(config: TransformerConfig, mesh: Mesh) -> Params:
    """Shardings of the parameters as they are stored, layers stacked.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    return tree_shardings(transformer.param_axes(config), transformer.abstract_params(config), mesh)


def on_mesh(mesh: Mesh, shardings: Any) -> Any:
    """A tree of shardings over a mesh; of one device: that device, which one program can follow."""
    if mesh.size > 1:
        return shardings
    # A mesh in its arguments' shardings would bind a program to it.
    where = SingleDeviceSharding(mesh.devices.item())
    return jax.tree.map(lambda _: where, shardings)


class ComputeSharding:
    """How a forward and backward pass computes on the devices of a site.

    Parameters that are divided over them are gathered when they are used; on one device nothing is
    asked for, so that one program serves any.

    Attributes:
        platform: what the program is made for.
        vocab_shards: into how many parts devices divide the vocabulary of the output table.
        cache: of keys and values [b g s e], for kernels; None: one device.
    """

    def __init__(self, config: TransformerConfig, site: Site) -> None:
        """Raises ValueError when the mesh does not divide the model."""
        mesh = site.mesh
        self.platform: Platform = site.platform
        self._is_divided, self.vocab_shards = site.is_divided, 1
        self.cache: NamedSharding | None = None
        if not self._is_divided:
            return
        stored = param_shardings(config, mesh)
        self._layers = {
            name: NamedSharding(mesh, PartitionSpec(*sharding.spec[1:]))
            for name, sharding in stored["layers"].items()
        }
        self._ends = {name: x for name, x in stored.items() if name != "layers"}
        rows = tuple(axis for axis in BATCH_AXES if axis in mesh.shape)
        self._rows = NamedSharding(mesh, PartitionSpec(rows or None))
        heads = AXIS_RULES["kv_heads"].mesh_axis
        is_whole = config.num_kv_heads % mesh.shape.get(heads, 1) > 0 or heads not in mesh.shape
        self.cache = NamedSharding(mesh, PartitionSpec(rows or None, None if is_whole else heads))
        axis = AXIS_RULES["vocab"].mesh_axis
        parts = mesh.shape.get(axis, 1)
        self.vocab_shards = parts if config.vocab_size % parts == 0 else 1

    def layer(self, params: Params, compute_dtype: Any) -> Params:
        """The parameters of one layer, gathered over fsdp."""
        if not self._is_divided:
            return params
        return _gather_all(params, self._layers, compute_dtype, False)

    def ends(self, params: Params, compute_dtype: Any) -> Params:
        """The tree with everything but the layers gathered over fsdp."""
        if not self._is_divided:
            return params
        return {**params, **_gather_all(params, self._ends, compute_dtype, True)}

    def rows(self, x: Array) -> Array:
        """Activations [b ...], rows where their prompts are, whatever the weights would ask for."""
        return jax.lax.with_sharding_constraint(x, self._rows) if self._is_divided else x


def _gather_all(params: Params, stored: Params, compute_dtype: Any, is_end: bool) -> Params:
    def gather(name: str, sharding: NamedSharding) -> Array:
        x = params[name]
        # Half the bytes travel when matrices are cast first; vectors are used in float32.
        is_vector = "norm" in name or "bias" in name
        return _gather(x if is_vector else x.astype(compute_dtype), sharding, is_end)

    return {name: gather(name, sharding) for name, sharding in stored.items()}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, stored: NamedSharding, is_end: bool) -> Array:
    """x without its division over fsdp; the gradient is divided again."""
    return jax.lax.with_sharding_constraint(x, _gathered(stored))


def _gathered(stored: NamedSharding) -> NamedSharding:
    axis = AXIS_RULES["embed"].mesh_axis
    spec = PartitionSpec(*(None if name == axis else name for name in stored.spec))
    return NamedSharding(stored.mesh, spec)


def _gather_fwd(x: Array, stored: NamedSharding, is_end: bool) -> tuple[Array, None]:
    return _gather(x, stored, is_end), None


def _gather_bwd(stored: NamedSharding, is_end: bool, _: None, cotangent: Array) -> tuple[Array]:
    # The gradient of a lookup is a scatter: asked for a part of each row of the table, the
    # partitioner would gather the activations of all devices. Of a product it makes the parts
    # itself, where asking for a whole gradient first (the constraint's transpose) would be an
    # all-reduce in every layer.
    if is_end:
        cotangent = jax.lax.with_sharding_constraint(cotangent, _gathered(stored))
    return (jax.lax.with_sharding_constraint(cotangent, stored),)


_gather.defvjp(_gather_fwd, _gather_bwd)
