# SPDX-License-Identifier: Apache-2.0
"""Keys and values of a layer that the decoder keeps: as they are, or in eight bits.

A decode step reads the whole cache for one token of each slot, so bytes are time. In eight bits a
key or value is integers times a scale of its own, one for each slot, head and column: scales leave
a product with the cache as factors of scores and weights, and nothing is widened in memory. It
knows neither slots nor attention. The invariant it owns: what is read of a column does not depend
on when, or beside what, it was written.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

_LARGEST = 127.0


class Rounded(NamedTuple):
    """Keys or values in eight bits.

    Attributes:
        values: int8 [n g c e], from -127 to 127.
        scale: float32 [n g c], what they are times.
    """

    values: Array
    scale: Array

    @property
    def shape(self) -> tuple[int, ...]:
        """[n g c e]."""
        return self.values.shape


Part = Any
"""Keys or values of a cache: an array [n g c e], or `Rounded`."""


class KVCache(NamedTuple):
    """Keys (after rotation) and values of one layer, [n g c e] for n slots of c positions."""

    keys: Part
    values: Part


def keep(keys: Float[Array, "n g c e"], values: Float[Array, "n g c e"], dtype: Any) -> KVCache:
    """A cache of these.

    Args:
        keys, values: after rotation.
        dtype: int8, or a float.
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
    """(what is multiplied [n g c e], what its columns are times [n g c] or None).

    Args:
        part: keys or values.
        dtype: of the product; integers up to 127 are exact in any float.
    """
    if isinstance(part, Rounded):
        return part.values.astype(dtype), part.scale
    return part, None


def empty(shape: tuple[int, int, int, int], dtype: Any) -> KVCache:
    """Zeros [n g c e] of a dtype, int8 or a float."""
    zeros: Part = jnp.zeros(shape, dtype)
    if zeros.dtype == jnp.int8:
        zeros = Rounded(zeros, jnp.ones(shape[:3]))
    return KVCache(zeros, zeros)


def abstract(shape: tuple[int, int, int, int], dtype: Any) -> KVCache:
    """`empty` as ShapeDtypeStructs."""
    return jax.eval_shape(lambda: empty(shape, dtype))
