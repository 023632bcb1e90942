# SPDX-License-Identifier: Apache-2.0
"""Attention in two parts: softmaxes over two sets of positions, merged by their normalisers."""

from typing import NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float


class Partial(NamedTuple):
    """An unnormalised softmax, to be merged with another one.

    Attributes:
        out: float32 [n g r e], sum of exp(score - most) * value.
        most: float32 [n g r 1], the largest score; very negative if nothing is visible.
        total: float32 [n g r 1], sum of exp(score - most).
    """

    out: Array
    most: Array
    total: Array


def merge(old: Partial, new: Partial) -> Float[Array, "n g r e"]:
    """Return the softmax over both sets of positions; normalised last, without concatenation."""
    most = jnp.maximum(old.most, new.most)
    of_old, of_new = jnp.exp(old.most - most), jnp.exp(new.most - most)
    total = old.total * of_old + new.total * of_new
    return (old.out * of_old + new.out * of_new) / total
