# SPDX-License-Identifier: Apache-2.0
"""Fill one large array under a sharding from pieces on the host, a bounded block at a time.

Each device receives its own part of a piece and writes it into its shard in place; no process needs
another one. A shard of at most a block is put together on the host instead: to compile what writes
it would take longer than to load a small model. The invariant it owns: beyond the array and two
blocks in flight, or its shards where they are that small, nothing is held, on the host or on a
device.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

# Of a block on each device: long beside the start of a transfer, small beside any model and beside
# the caches of a CPU, which transposes blocks of 2 MiB 2.4 times as fast as blocks of 32 MiB.
BLOCK_BYTES = 2 * 2**20

_EXPONENTS: dict[np.dtype, tuple[type[np.unsignedinteger], Any]] = {
    np.dtype(np.float32): (np.uint32, np.uint32(0x7F800000)),
    np.dtype(np.float16): (np.uint16, np.uint16(0x7C00)),
    np.dtype(jnp.bfloat16): (np.uint16, np.uint16(0x7F80)),
}


class NonFiniteWeights(ValueError):
    """A tensor holds nan or an infinity; the message says which."""


class Filling:
    """An array being filled.

    The shards of this process lie side by side along the first axis of one array over its devices,
    so that one program per shape serves all of them and none runs across processes.
    """

    def __init__(self, name: str, spec: jax.ShapeDtypeStruct, sharding: Any | None):
        """Make it, full of zeros.

        Args:
            name: how errors call it.
            spec: shape and dtype; at least one axis.
            sharding: where it goes; None: the default device.

        Raises:
            ValueError: the sharding does not divide the shape.
        """
        self.name, self.sharding = name, sharding
        self.shape: tuple[int, ...] = spec.shape
        self.dtype = np.dtype(spec.dtype)
        self._local: NamedSharding | None = None
        self._array: Array | None = None
        self._on_host: dict[tuple[int, ...], np.ndarray] = {}  # small shards, by their origins
        if sharding is None:
            self._shard_shape = self.shape
            self._origins = [(0,) * len(self.shape)]
            if not self._put_together():
                self._array = jnp.zeros(self.shape, self.dtype)
            return
        try:
            self._shard_shape = sharding.shard_shape(self.shape)
        except ValueError as error:
            raise ValueError(
                f"{name} of shape {list(self.shape)} cannot be divided evenly by {sharding}. "
                "Use a mesh that divides it, or replicate it"
            ) from error
        indices = sharding.addressable_devices_indices_map(self.shape)
        self._devices = list(indices)
        self._origins = [tuple(s.start or 0 for s in indices[d]) for d in self._devices]
        if self._devices and not self._put_together():
            mesh = Mesh(np.array(self._devices), ("device",))
            self._local = NamedSharding(mesh, PartitionSpec("device"))
            self._array = _zeros(self._side_by_side(self._shard_shape), self.dtype, self._local)

    def _put_together(self) -> bool:
        """Make room on the host for shards that are small; whether they are."""
        if math.prod(self._shard_shape) * self.dtype.itemsize > BLOCK_BYTES:
            return False
        self._on_host = {o: np.zeros(self._shard_shape, self.dtype) for o in self._origins}
        return True

    def put(self, piece: np.ndarray, layer: int | None = None) -> None:
        """Write one piece: a layer, which is an index into the first axis, or the whole array.

        Args:
            piece: its values, in any float dtype. It may be a view of a mapped file, of which only
                what devices of this process need is read.
            layer: which layer.

        Raises:
            ValueError: the sharding divides the axis of layers.
            NonFiniteWeights: nan or infinite, among the values that this process needs.
        """
        if not self._origins:  # all of it belongs to other processes
            return
        starts = np.zeros(len(self.shape), int)
        view = piece
        if layer is not None:
            if self._shard_shape[0] < self.shape[0]:
                raise ValueError(
                    f"{self.name}: the sharding divides axis 0 of {list(self.shape)}, the layers, "
                    "which are filled one by one. Shard another axis"
                )
            starts[0], view = layer, piece[None]
        size = np.minimum(view.shape, self._shard_shape)
        for origin, shard in self._on_host.items():
            part = view[tuple(slice(a, a + n) for a, n in zip(origin, size, strict=True))]
            self._check(part, layer)
            shard[tuple(slice(a, a + n) for a, n in zip(starts, size, strict=True))] = part
        if self._on_host:
            return
        # Blocks are cut along the axis that is slowest in the file and keep the file's order of
        # axes: the host reads and copies long runs, the device transposes.
        order = tuple(sorted(range(view.ndim), key=lambda axis: -view.strides[axis]))
        cut = next((axis for axis in order if size[axis] > 1), order[0])
        row_bytes = math.prod(size) // size[cut] * self.dtype.itemsize
        num_blocks = math.ceil(size[cut] / max(1, BLOCK_BYTES // row_bytes))
        # Equal blocks, the last one overlapping the one before: one shape, one compilation.
        rows = math.ceil(size[cut] / num_blocks)
        size[cut], length = rows, size[cut]
        for i in range(num_blocks):
            shift = np.zeros_like(size)
            shift[cut] = min(i * rows, length - rows)
            block = self._block(view, shift, size, order, layer)
            # Two blocks in flight: this one was converted while the last one was written.
            jax.block_until_ready(self._array)
            self._array = _write(
                self._array,
                block,
                np.asarray(starts + shift, np.int32),
                order=order,
                local=self._local,
            )

    def finish(self) -> Array:
        """The array, whose memory nothing else refers to; ends the use of this object."""
        array, self._array = self._array, None
        on_host, self._on_host = self._on_host, {}
        if self.sharding is None:
            return jax.device_put(*on_host.values()) if array is None else array
        if on_host:
            shards = [
                jax.device_put(on_host[origin], device)
                for origin, device in zip(self._origins, self._devices, strict=True)
            ]
            return jax.make_array_from_single_device_arrays(self.shape, self.sharding, shards)
        by_device = {} if array is None else {s.device: s.data for s in array.addressable_shards}
        return jax.make_array_from_single_device_arrays(
            self.shape, self.sharding, [by_device[d] for d in self._devices], dtype=self.dtype
        )

    def _block(
        self,
        view: np.ndarray,
        shift: np.ndarray,
        size: np.ndarray,
        order: tuple[int, ...],
        layer: int | None,
    ) -> Array | np.ndarray:
        """The part of a piece that each device needs, in the order of axes given."""
        parts: dict[tuple[int, ...], np.ndarray] = {}  # devices that replicate share one

        def part_of(origin: tuple[int, ...]) -> np.ndarray:
            # A divided axis is filled whole, so the shard's origin is its place in the piece.
            first = tuple(int(x) for x in shift + origin)
            if first not in parts:
                part = view[tuple(slice(a, a + n) for a, n in zip(first, size, strict=True))]
                self._check(part, layer)
                parts[first] = part.transpose(order).astype(self.dtype, order="C", copy=False)
            return parts[first]

        if self._local is None:
            return part_of(self._origins[0])
        shape = tuple(int(size[axis]) for axis in order)
        arrays = [
            jax.device_put(part_of(origin), device)
            for origin, device in zip(self._origins, self._devices, strict=True)
        ]
        return jax.make_array_from_single_device_arrays(
            self._side_by_side(shape), self._local, arrays
        )

    def _check(self, part: np.ndarray, layer: int | None) -> None:
        if not _is_finite(part):
            where = "" if layer is None else f" of layer {layer}"
            raise NonFiniteWeights(f"{self.name}{where} has values that are not finite")

    def _side_by_side(self, shape: tuple[int, ...]) -> tuple[int, ...]:
        return (len(self._origins) * shape[0], *shape[1:])


def _is_finite(values: np.ndarray) -> bool:
    """Whether none of them is nan or infinite, by the bits of their exponents."""
    if values.dtype not in _EXPONENTS:
        return bool(np.isfinite(values).all())
    # numpy knows bfloat16 through a function for each value; integers of this width are fast.
    integer, exponent = _EXPONENTS[values.dtype]
    return not ((values.view(integer) & exponent) == exponent).any()


@functools.partial(jax.jit, static_argnums=(0, 1, 2))
def _zeros(shape: tuple[int, ...], dtype: np.dtype, local: NamedSharding) -> Array:
    return jax.lax.with_sharding_constraint(jnp.zeros(shape, dtype), local)


@functools.partial(jax.jit, donate_argnums=0, static_argnames=("order", "local"))
def _write(
    array: Array,
    block: Array,
    starts: Int32[Array, " n"],
    *,
    order: tuple[int, ...],
    local: NamedSharding | None,
) -> Array:
    """The array with a block at `starts`, in each shard alike; in place, since it is donated."""

    def write(shard: Array, block: Array, starts: Array) -> Array:
        block = block.transpose(tuple(order.index(axis) for axis in range(block.ndim)))
        return jax.lax.dynamic_update_slice(shard, block, tuple(starts))

    if local is None:
        return write(array, block, starts)
    return jax.shard_map(
        write,
        mesh=local.mesh,
        in_specs=(local.spec, local.spec, PartitionSpec()),
        out_specs=local.spec,
    )(array, block, starts)
