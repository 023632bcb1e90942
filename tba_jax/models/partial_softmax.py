# SPDX-License-Identifier: Apache-2.0
"""Softmax in parts: two sets of positions are merged by their normalisers; caps of scores."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float


class Partial(NamedTuple):
    """Unnormalised softmax over a set of positions, to be merged with that over another set.

    Attributes:
        out: float32 [n g r e], sum of exp(score - most) * value.
        most: float32 [n g r 1], the largest score; very negative if nothing is visible.
        total: float32 [n g r 1], sum of exp(score - most).
    """

    out: Array
    most: Array
    total: Array


def merge(old: Partial, new: Partial) -> Float[Array, "n g r e"]:
    """Return the normalised softmax over both sets of positions, without concatenation."""
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


# Logit of a row of the vocabulary that is no token: its probability is 0, and its square is finite.
NO_TOKEN = -1e15


def capped(scores: Float[Array, "*b"], cap: float | None) -> Float[Array, "*b"]:
    """Return the scores, smoothly limited to [-cap, cap]; None: unchanged."""
    return scores if cap is None else cap * jnp.tanh(scores / cap)
