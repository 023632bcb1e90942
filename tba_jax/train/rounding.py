# SPDX-License-Identifier: Apache-2.0
"""Stochastic rounding: parameters and moments kept in bfloat16 that move on the mean as in float32.

bfloat16 has eight significant bits, so an update below 1/512 of a weight is lost when the sum is
rounded to the nearest number, however often it comes. Rounded up or down at random, in proportion
to the distance, the sum is kept on the mean. This module knows neither optimisers nor steps. The
invariant it owns: a rounded number is one of the two neighbours of the exact one, its mean is the
exact one, and which it is depends on the key and the place in the tree, not on the devices.

References:
    Gupta et al. 2015, arXiv:1502.02551; Zamirai et al. 2020, arXiv:2010.06192.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, BFloat16, Float32, UInt16

# First fold of the root key: keeps these draws apart from those of searchers and adapters.
_ROUNDING_ROLE = 4


def rounding_key(seed: int, step: Array) -> Array:
    """The JAX PRNG key of a step's rounding."""
    return jax.random.fold_in(jax.random.fold_in(jax.random.key(seed), _ROUNDING_ROLE), step)


def widened(tree: Any) -> Any:
    """The tree with bfloat16 arrays as float32, which is exact."""
    return jax.tree.map(lambda x: x.astype(jnp.float32) if _is_narrow(x) else x, tree)


def rounded_like(tree: Any, stored: Any, key: Array) -> Any:
    """The tree, rounded stochastically where `stored` is bfloat16; other arrays stay as they are.

    Args:
        tree: of float32 where `stored` is bfloat16.
        stored: a tree of the same structure.
        key: JAX PRNG key; every array draws bits of its own from it.
    """
    leaves, structure = jax.tree.flatten(tree)
    rounded = [
        stochastically_rounded(x, jax.random.bits(jax.random.fold_in(key, i), x.shape, jnp.uint16))
        if _is_narrow(old)
        else x
        for i, (x, old) in enumerate(zip(leaves, jax.tree.leaves(stored), strict=True))
    ]
    return jax.tree.unflatten(structure, rounded)


def stochastically_rounded(
    x: Float32[Array, "..."], bits: UInt16[Array, "..."]
) -> BFloat16[Array, "..."]:
    """x rounded to a neighbour in bfloat16, away from zero where `bits` say so."""
    # bfloat16 is the upper half of a float32. The lower half over 65536 is the share of the way to
    # the next number, and uniform bits carry into the upper half with that probability.
    carried = jax.lax.bitcast_convert_type(x, jnp.uint32) + bits.astype(jnp.uint32)
    upper = (carried >> 16).astype(jnp.uint16)
    rounded = jax.lax.bitcast_convert_type(upper, jnp.bfloat16)
    return jnp.where(jnp.isfinite(x), rounded, x.astype(jnp.bfloat16))


def _is_narrow(x: Array) -> bool:
    return x.dtype == jnp.bfloat16
