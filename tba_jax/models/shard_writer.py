# SPDX-License-Identifier: Apache-2.0
"""ShardWriter: fills a large sharded array from pieces on the host, one bounded block at a time.

Each device receives its own part of a piece and writes it into its shard in place, without other
processes. A shard of at most one block is assembled on the host instead, because compiling the
write program would take longer than loading a small model. Invariant: memory on host and device is
bounded by the array and two blocks, or by such small shards.
"""

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Int32

# Bytes of a block per device: large compared to the start of a transfer, small compared to any
# model and to CPU caches (blocks of 2 MiB transpose 2.4 times as fast as blocks of 32 MiB).
BLOCK_BYTES = 2 * 2**20

_EXPONENTS: dict[np.dtype, tuple[type[np.unsignedinteger], Any]] = {
    np.dtype(np.float32): (np.uint32, np.uint32(0x7F800000)),
    np.dtype(np.float16): (np.uint16, np.uint16(0x7C00)),
    np.dtype(jnp.bfloat16): (np.uint16, np.uint16(0x7F80)),
}


class NonFiniteWeights(ValueError):
    """A tensor has nan or infinite values; the message names it."""


class ShardWriter:
    """An array that is being filled.

    The shards of this process are adjacent along the first axis of one array over the process's
    devices. One program per shape therefore serves all shards, and no program spans processes.
    """

    def __init__(self, name: str, spec: jax.ShapeDtypeStruct, sharding: Any | None):
        """Allocate the array with zeros.

        Args:
            name: name in errors.
            spec: shape and dtype; at least one axis.
            sharding: sharding of the array; None: the default device.

        Raises:
            ValueError: the sharding does not divide the shape.
        """
        self.name, self.sharding = name, sharding
        self.shape: tuple[int, ...] = spec.shape
        self.dtype = np.dtype(spec.dtype)
        self._local: NamedSharding | None = None
        self._array: Array | None = None
        self._on_host: dict[tuple[int, ...], np.ndarray] = {}  # small shards, by origin
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
        """Allocate the shards on the host if they are small; return whether they are small."""
        if math.prod(self._shard_shape) * self.dtype.itemsize > BLOCK_BYTES:
            return False
        self._on_host = {o: np.zeros(self._shard_shape, self.dtype) for o in self._origins}
        return True

    def put(self, piece: np.ndarray, layer: int | None = None) -> None:
        """Write one piece: a layer, which is an index into the first axis, or the whole array.

        Args:
            piece: values, in any float dtype. If it is a view of a mapped file, only the parts that
                this process needs are read.
            layer: index of the layer.

        Raises:
            ValueError: the sharding divides the axis of layers.
            NonFiniteWeights: a value that this process needs is nan or infinite.
        """
        if not self._origins:  # this process has no part of the array
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
        # Blocks divide the slowest axis of the file and keep the file's order of axes, so that the
        # host reads and copies long runs; the device transposes.
        order = tuple(sorted(range(view.ndim), key=lambda axis: -view.strides[axis]))
        cut = next((axis for axis in order if size[axis] > 1), order[0])
        row_bytes = math.prod(size) // size[cut] * self.dtype.itemsize
        num_blocks = math.ceil(size[cut] / max(1, BLOCK_BYTES // row_bytes))
        # Blocks are equal, so that one shape is compiled; the last two may overlap.
        rows = math.ceil(size[cut] / num_blocks)
        size[cut], length = rows, size[cut]
        for i in range(num_blocks):
            shift = np.zeros_like(size)
            shift[cut] = min(i * rows, length - rows)
            block = self._block(view, shift, size, order, layer)
            # Two blocks are in flight: one is converted while the previous one is written.
            jax.block_until_ready(self._array)
            self._array = _write(
                self._array,
                block,
                np.asarray(starts + shift, np.int32),
                order=order,
                local=self._local,
            )

    def finish(self) -> Array:
        """Return the array, and drop all references to it; do not use this object again."""
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
        """Return each device's part of a piece, with its axes in the given order."""
        parts: dict[tuple[int, ...], np.ndarray] = {}  # devices with equal parts share them

        def part_of(origin: tuple[int, ...]) -> np.ndarray:
            # Axes that are divided are never offset, so a shard's origin is its position.
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
    """Return whether no value is nan or infinite, according to the bits of the exponents."""
    if values.dtype not in _EXPONENTS:
        return bool(np.isfinite(values).all())
    # numpy handles bfloat16 by a slow function per value; integers of this width are fast.
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
    """Return the array with a block at `starts` in each shard; in place, because it is donated."""

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
