# SPDX-License-Identifier: Apache-2.0
"""Keys, values and states of the layers in the decoder's cache."""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tba_jax.models.architecture import LayerKind, TransformerConfig


class KVCache(NamedTuple):
    """Rotated keys and values of a layer, [n g c e] for n slots; position i is in column i % c."""

    keys: Float[Array, "n g c e"]
    values: Float[Array, "n g c e"]

    def positions(self, length: Int[Array, " n"]) -> Int[Array, "n c"]:
        """Return the newest position in each column after `length` tokens; negative: empty."""
        num, last = self.keys.shape[2], length[:, None] - 1
        return last - (last - jnp.arange(num)[None]) % num

    def seen(
        self, length: Int[Array, " n"], query: Int[Array, "n s"], window: int | None
    ) -> Bool[Array, "n s c"]:
        """Return whether queries at these positions see each column, after `length` tokens."""
        position, query = self.positions(length)[:, None], query[:, :, None]
        seen = (position >= 0) & (position <= query)
        return seen if window is None else seen & (position > query - window)


class State(NamedTuple):
    """State of a delta layer after some tokens, from which later tokens continue.

    Attributes:
        memory: float32 [n h r k f], the matrix of each of r value heads of h key heads.
        inputs: float32 [n h t-1 w], inputs of the convolution of the last tokens.
    """

    memory: Array
    inputs: Array


LayerCache = KVCache | State


def empty_layers(
    config: TransformerConfig, num_slots: int, length: int, dtype: Any, added: int | None = None
) -> tuple[LayerCache, ...]:
    """Return the caches of all layers without tokens: keys and values, or states.

    Args:
        num_slots: n, number of slots.
        length: number of positions.
        dtype: dtype of keys and values; states are float32.
        added: layers with windows have columns for a window and `added` positions; None: for all.
    """

    def columns(kind: LayerKind) -> KVCache:
        num = length if kind == "full" or added is None else min(length, config.window + added)
        shape = num_slots, config.num_kv_heads, num, config.head_dim
        return KVCache(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype))

    def state() -> State:
        h, k, f = config.delta_key_heads, config.delta_key_dim, config.delta_value_dim
        r = config.delta_value_heads // h
        inputs = (num_slots, h, config.delta_taps - 1, 2 * k + r * f)
        return State(jnp.zeros((num_slots, h, r, k, f)), jnp.zeros(inputs))

    return tuple(state() if kind == "delta" else columns(kind) for kind in config.layer_kinds)
