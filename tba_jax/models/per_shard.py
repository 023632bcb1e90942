# SPDX-License-Identifier: Apache-2.0
"""Kernels on arrays that a mesh divides: each device runs them on its own slots and heads.

The compiler cannot divide a kernel by itself, nor run one made for another platform. The invariant
it owns: only slots and key/value heads are ever divided, so a kernel needs nothing of another
device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array


def cache_axes(sharding: NamedSharding | None) -> tuple[Any, Any]:
    """Mesh axes of the rows and of the key/value heads of a cache [n g c e].

    Raises:
        ValueError: another axis of the cache is divided.
    """
    spec = () if sharding is None else tuple(sharding.spec)
    rows, heads, *rest = (*spec, None, None)
    if any(axis is not None for axis in rest):
        raise ValueError(
            f"attention kernels got a cache [slots, heads, columns, head_dim] sharded by {spec}; "
            "only slots and heads can be divided"
        )
    return rows, heads


def per_shard(
    function: Callable[..., Any], sharding: NamedSharding | None, in_specs: Any, out_specs: Any
) -> Callable[..., Any]:
    """`function` on each device's part; on one device itself.

    Args:
        function: of arrays.
        sharding: names the mesh; None: one device.
        in_specs, out_specs: how arguments and results are divided.
    """
    if sharding is None:
        return function
    return jax.shard_map(
        function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def tpu_or_interpreter(function: Callable[..., Any], *args: Array) -> Any:
    """function(*args, interpret=...): a TPU's kernel, interpreted in programs for others."""
    return jax.lax.platform_dependent(
        *args,
        tpu=functools.partial(function, interpret=False),
        default=functools.partial(function, interpret=True),
    )
