# SPDX-License-Identifier: Apache-2.0
"""Kernels on sharded arrays: each device runs them on its own slots and heads.

The compiler can neither divide a kernel nor run it on another platform. Invariant: only slots and
key/value heads are ever divided, so a kernel needs no data of another device.
"""

import functools
from collections.abc import Callable
from typing import Any

import jax
from jax.sharding import NamedSharding
from jaxtyping import Array


def cache_axes(sharding: NamedSharding | None) -> tuple[Any, Any]:
    """Return the mesh axes of rows and key/value heads of a cache [n g c e].

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
    """Return a function that applies `function` to the part of each device.

    Args:
        function: function of arrays.
        sharding: a sharding on the mesh; None: one device, and the result is `function` itself.
        in_specs, out_specs: partition of arguments and results.
    """
    if sharding is None:
        return function
    return jax.shard_map(
        function, mesh=sharding.mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False
    )


def tpu_or_interpreter(function: Callable[..., Any], *args: Array) -> Any:
    """Return function(*args, interpret=...): compiled on TPU, interpreted on other platforms."""
    return jax.lax.platform_dependent(
        *args,
        tpu=functools.partial(function, interpret=False),
        default=functools.partial(function, interpret=True),
    )
