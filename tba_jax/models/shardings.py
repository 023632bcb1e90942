# SPDX-License-Identifier: Apache-2.0
"""Shardings of a transformer on a mesh: of stored parameters, and of a computation.

Stored parameters are divided over `fsdp` and `model`. When a program reaches a layer, it gathers
the layer's parameters over `fsdp`, in the compute dtype, and divides their gradient again. The
division over `model` stays through every matrix product. Invariant: at most one layer and the
embedding and output tables are whole over `fsdp` at a time.
"""

import functools
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec, SingleDeviceSharding
from jaxtyping import Array

from tba_jax.devices.sharding import AXIS_RULES, batch_axes, tree_shardings
from tba_jax.devices.site import Site
from tba_jax.models import transformer
from tba_jax.models.attention import Kernels
from tba_jax.models.transformer import Params, TransformerConfig


def param_shardings(config: TransformerConfig, mesh: Mesh) -> Params:
    """Return the shardings of the stored parameters, layers stacked.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    if "expert" in mesh.shape and not config.num_experts:
        raise ValueError(
            f"mesh.expert={mesh.shape['expert']}: this model ({config.family}) has no experts. Set "
            "the mesh axis expert to 1, and use fsdp instead"
        )
    return tree_shardings(transformer.param_axes(config), transformer.abstract_params(config), mesh)


def on_mesh(mesh: Mesh, shardings: Any) -> Any:
    """Return a tree of shardings over a mesh; a mesh of one device gives that device."""
    if mesh.size > 1:
        return shardings
    # A mesh in the shardings of a program's arguments would bind the program to the mesh.
    where = SingleDeviceSharding(mesh.devices.item())
    return jax.tree.map(lambda _: where, shardings)


class ComputeSharding:
    """Sharding of a forward and backward pass on the devices of a site.

    Sharded parameters are gathered when they are used. On one device there are no constraints, so
    that one program serves any device.

    Args:
        site: the devices.
        gathers: False for weights in the decoder's layout, which are never divided over fsdp.

    Attributes:
        kernels: kernels of attention.
        vocab_shards: number of parts into which devices divide the output table's vocabulary.
        mesh: the devices; None: one device.
    """

    def __init__(self, config: TransformerConfig, site: Site, *, gathers: bool = True) -> None:
        """Raise ValueError if the mesh does not divide the model."""
        mesh, rows = site.mesh, batch_axes(site.mesh) or None
        self.mesh: Mesh | None = mesh if site.is_divided else None
        self._is_divided, self.vocab_shards = site.is_divided and gathers, 1
        heads: str | None = AXIS_RULES["kv_heads"].mesh_axis
        if heads not in mesh.shape or config.num_kv_heads % mesh.shape[heads]:
            heads = None  # every device has all key/value heads
        cache = NamedSharding(mesh, PartitionSpec(rows, heads)) if site.is_divided else None
        self.kernels = Kernels(config.attention, site.platform, cache)
        if not self._is_divided:
            return
        stored = param_shardings(config, mesh)
        self._layers = {
            name: NamedSharding(mesh, PartitionSpec(*sharding.spec[1:]))
            for name, sharding in stored["layers"].items()
        }
        self._ends = {name: x for name, x in stored.items() if name != "layers"}
        self._rows = NamedSharding(mesh, PartitionSpec(rows))
        parts = mesh.shape.get(AXIS_RULES["vocab"].mesh_axis, 1)
        self.vocab_shards = parts if config.vocab_size % parts == 0 else 1

    def layer(self, params: Params, compute_dtype: Any) -> Params:
        """Return the parameters of one layer, gathered over fsdp."""
        if not self._is_divided:
            return params
        return _gather_all(params, self._layers, compute_dtype, False)

    def ends(self, params: Params, compute_dtype: Any) -> Params:
        """Return the tree with embeddings, final norm and output matrix gathered over fsdp."""
        if not self._is_divided:
            return params
        return {**params, **_gather_all(params, self._ends, compute_dtype, True)}

    def rows(self, x: Array) -> Array:
        """Constrain activations [b ...] to the sharding of rows."""
        return jax.lax.with_sharding_constraint(x, self._rows) if self._is_divided else x


def _gather_all(params: Params, stored: Params, compute_dtype: Any, is_end: bool) -> Params:
    def gather(name: str, sharding: NamedSharding) -> Array:
        x = params[name]
        # Casting matrices first halves the transferred bytes; vectors are used in float32.
        is_vector = any(x in name for x in ("norm", "bias", "sinks", "log_decay"))
        return _gather(x if is_vector else x.astype(compute_dtype), sharding, is_end)

    return {name: gather(name, sharding) for name, sharding in stored.items() if name in params}


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2))
def _gather(x: Array, stored: NamedSharding, is_end: bool) -> Array:
    """Return x gathered over fsdp; the gradient is divided over fsdp again."""
    return jax.lax.with_sharding_constraint(x, _gathered(stored))


def _gathered(stored: NamedSharding) -> NamedSharding:
    gathered = AXIS_RULES["embed"].mesh_axis

    def kept(entry: Any) -> tuple[str, ...]:
        names = entry if isinstance(entry, tuple) else (entry,) if entry else ()
        return tuple(name for name in names if name != gathered)

    return NamedSharding(stored.mesh, PartitionSpec(*(kept(x) or None for x in stored.spec)))


def _gather_fwd(x: Array, stored: NamedSharding, is_end: bool) -> tuple[Array, None]:
    return _gather(x, stored, is_end), None


def _gather_bwd(stored: NamedSharding, is_end: bool, _: None, cotangent: Array) -> tuple[Array]:
    # The gradient of a lookup is a scatter. With a constraint on a part of each table row, the
    # partitioner would gather the activations of all devices. For the gradient of a product, the
    # partitioner divides the result itself; a constraint to a whole gradient (the transpose of the
    # constraint) would cause an all-reduce in every layer.
    if is_end:
        cotangent = jax.lax.with_sharding_constraint(cotangent, _gathered(stored))
    return (jax.lax.with_sharding_constraint(cotangent, stored),)


_gather.defvjp(_gather_fwd, _gather_bwd)
