# SPDX-License-Identifier: Apache-2.0
"""Parts of a softmax: scores with a cap, and two sets of positions merged by their normalisers."""

from typing import NamedTuple

import jax
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


def with_sinks(part: Partial, sinks: Float[Array, "*n g r 1"]) -> Partial:
    """Return the softmax with one more score per head, which has no value (gpt-oss)."""
    # The maximum cancels, so it needs no gradient.
    most = jax.lax.stop_gradient(jnp.maximum(part.most, sinks))
    shrink = jnp.exp(part.most - most)
    return Partial(part.out * shrink, most, part.total * shrink + jnp.exp(sinks - most))


def capped(scores: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return the scores, smoothly limited to the cap."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)
