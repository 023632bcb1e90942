# SPDX-License-Identifier: Apache-2.0
"""Unbiased stochastic rounding of parameters and moments in bfloat16, so that small updates count.

bfloat16 has eight significant bits: rounding to nearest loses an update below 1/512 of a weight,
even if the update is repeated. Stochastic rounding keeps the expected sum correct.

Invariant: a rounded number is a neighbour of the exact number, and its mean is the exact number.
The choice depends on the key and the position in the tree, not on the devices.

References:
    Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, UInt16

# First fold of the root key: separates these random bits from those of searchers and adapters.
_ROUNDING_ROLE = 4


def rounding_key(seed: int, step: Array) -> Array:
    """Return the JAX PRNG key for the rounding of one step."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _ROUNDING_ROLE), step)


def widened(tree: Any) -> Any:
    """Return the tree with bfloat16 arrays converted to float32, which is exact."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree)


def rounded_like(tree: Any, stored: Any, key: Array) -> Any:
    """Return the tree with each array stochastically rounded if that of `stored` is bfloat16.

    Args:
        tree: tree of arrays; float32 where `stored` is bfloat16.
        stored: tree of the same structure.
        key: JAX PRNG key; every array gets its own random bits.
    """
    leaves, structure = jax.tree.flatten(tree)
    rounded = [
        stochastically_rounded(x, jax.random.bits(jax.random.fold_in(key, i), x.shape, jnp.uint16))
        if old.dtype == jnp.bfloat16
        else x
        for i, (x, old) in enumerate(zip(leaves, jax.tree.leaves(stored), strict=True))
    ]
    return jax.tree.unflatten(structure, rounded)


def stochastically_rounded(
    x: Float32[Array, "..."], bits: UInt16[Array, "..."]
) -> BFloat16[Array, "..."]:
    """Return x rounded to a bfloat16 neighbour, away from zero if adding `bits` carries over."""
    # bfloat16 is the upper half of a float32. The lower half over 65536 is the relative distance to
    # the next number, and uniform bits carry into the upper half with that probability.
    carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    upper = (carried >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))
