# SPDX-License-Identifier: Apache-2.0
"""Keys and values of one layer in the decoder's cache: in their dtype, or 8-bit.

A decode step reads the whole cache for one token of each slot, so the size of the cache determines
the time. An 8-bit key or value is a vector of integers times a scale, with one scale per slot, head
and column. Scales multiply scores and weights, so no wider copy is stored. Invariant: the contents
of a column do not depend on the time or the other columns of its write.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.models.architecture import TransformerConfig

_LARGEST = 127.0


class Rounded(NamedTuple):
    """8-bit keys or values.

    Attributes:
        values: int8 [n g c e], from -127 to 127.
        scale: float32 [n g c], factor of each column.
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape [n g c e] of the keys or values."""
        return self.values.shape


Part = Any
"""Keys or values of a cache: an array [n g c e], or `Rounded`."""


class KVCache(NamedTuple):
    """Rotated keys and values of one layer, [n g c e] for n slots of c positions."""

    keys: Part
    values: Part


class State(NamedTuple):
    """State of a delta layer after some tokens, from which later tokens continue.

    Attributes:
        memory: float32 [n h r k f], the matrix of each of r value heads of h key heads.
        inputs: float32 [n h t-1 w], inputs of the convolution of the last tokens.
    """

    memory: Array
    inputs: Array


LayerCache = KVCache | State


def keep(keys: Float[Array, "n g c e"], values: Float[Array, "n g c e"], dtype: Any) -> KVCache:
    """Return a cache of these keys and values.

    Args:
        keys, values: keys after rotation, and values.
        dtype: int8 or a floating-point dtype.
    """
    if jnp.dtype(dtype) == jnp.int8:
        return KVCache(_rounded(keys), _rounded(values))
    return KVCache(keys.astype(dtype), values.astype(dtype))


def _rounded(x: Float[Array, "n g c e"]) -> Rounded:
    wide = x.astype(jnp.float32)
    most = jnp.max(jnp.abs(wide), axis=-1)
    scale = jnp.where(most > 0, most / _LARGEST, 1.0)
    return Rounded(jnp.round(wide / scale[..., None]).astype(jnp.int8), scale)


def open_part(part: Part, dtype: Any) -> tuple[Array, Array | None]:
    """Return keys or values as the operand of a product: (array [n g c e], scales [n g c] or None).

    An 8-bit array is converted to `dtype`; its product must be multiplied by the scales.

    Args:
        part: keys or values.
        dtype: dtype of the product; integers up to 127 are exact in any float.
    """
    if isinstance(part, Rounded):
        return part.values.astype(dtype), part.scale
    return part, None


def empty(shape: tuple[int, int, int, int], dtype: Any) -> KVCache:
    """Return zeros [n g c e] in int8 or a floating-point dtype."""
    zeros: Part = jnp.zeros(shape, dtype)
    if zeros.dtype == jnp.int8:
        zeros = Rounded(zeros, jnp.ones(shape[:3]))
    return KVCache(zeros, zeros)


def empty_layers(
    config: TransformerConfig, num_slots: int, length: int, dtype: Any
) -> tuple[LayerCache, ...]:
    """Return the caches of all layers without tokens: keys and values, or states.

    Args:
        num_slots: n, number of slots.
        length: c, number of columns.
        dtype: dtype of keys and values, int8 or floating-point; states are float32.
    """
    shape = (num_slots, config.num_kv_heads, length, config.head_dim)

    def state() -> State:
        h, k, f = config.delta_key_heads, config.delta_key_dim, config.delta_value_dim
        r = config.delta_value_heads // h
        inputs = (num_slots, h, config.delta_taps - 1, 2 * k + r * f)
        return State(jnp.zeros((num_slots, h, r, k, f)), jnp.zeros(inputs))

    return tuple(state() if kind == "delta" else empty(shape, dtype) for kind in config.layer_kinds)


def abstract_layers(
    config: TransformerConfig, num_slots: int, length: int, dtype: Any
) -> tuple[LayerCache, ...]:
    """Return `empty_layers` as ShapeDtypeStructs."""
    return jax.eval_shape(lambda: empty_layers(config, num_slots, length, dtype))


def of_attention(caches: Sequence[LayerCache]) -> KVCache:
    """Return the cache of the first layer with keys and values."""
    return next(cache for cache in caches if isinstance(cache, KVCache))
