# SPDX-License-Identifier: Apache-2.0
"""Functions that decoding compiles: reading of prompts, copies to slots, a chunk of steps.

They are pure functions over arrays; the host (`session`) decides when each runs. A slot holds one
response. Its cache row has the prompt and then the response; columns [0, length) are valid.
Invariant: the position of a key depends only on its prompt's length and its index in the response,
so a response does not depend on its slot, on other slots or on the time of its admission.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.decoding.sampling import RowSettings, random_bits, sample_tokens
from tba_jax.models import attention, delta, kv_cache, transformer
from tba_jax.models.architecture import LayerKind
from tba_jax.models.kv_cache import KVCache, LayerCache, State
from tba_jax.models.transformer import Params, TransformerConfig


class Slots(NamedTuple):
    """State of n slots on the host; an argument of every chunk.

    Attributes:
        last: int32 [n], the next token that the model reads.
        length: int32 [n], number of cached tokens, which is the position of `last`.
        count: int32 [n], number of tokens of the response so far.
        is_live: bool [n], the slot holds an unfinished response.
        keys: uint32 [n 2], threefry key data of the response.
        settings: temperature, top_p, top_k of each slot.
        min_new_tokens, max_new_tokens: int32 [n].
        stop_ids: int32 [n q], tokens that end the response, padded with -1.
    """

    last: Any
    length: Any
    count: Any
    is_live: Any
    keys: Any
    settings: RowSettings
    min_new_tokens: Any
    max_new_tokens: Any
    stop_ids: Any


def empty_slots(num_slots: int, num_stop_ids: int) -> Slots:
    """Return slots without responses, as host arrays."""

    def of(value: Any, dtype: Any, *shape: int) -> Any:
        return np.full((num_slots, *shape), value, dtype)

    return Slots(
        last=of(0, np.int32),
        length=of(0, np.int32),
        count=of(0, np.int32),
        is_live=of(False, bool),
        keys=of(0, np.uint32, 2),
        settings=RowSettings(of(1, np.float32), of(1, np.float32), of(0, np.int32)),
        min_new_tokens=of(0, np.int32),
        max_new_tokens=of(1, np.int32),
        stop_ids=of(-1, np.int32, num_stop_ids),
    )


class Prefixes(NamedTuple):
    """The first tokens of p prompts, in kept caches.

    Attributes:
        caches: [r g c e] per layer, of the length of the slots' caches.
        rows: int32 [p], row of each prompt.
        lengths: int32 [p], tokens of each prompt in its row.
    """

    caches: tuple[LayerCache, ...]
    rows: Any
    lengths: Any


class _Carry(NamedTuple):
    step: Int[Array, ""]
    last: Int[Array, " n"]
    count: Int[Array, " n"]
    is_live: Bool[Array, " n"]
    tokens: Int[Array, "m n"]
    logprobs: Float32[Array, "m n"]
    recent: tuple[LayerCache, ...]


def extend(
    weights: Params,
    tokens: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    prefixes: Prefixes | None = None,
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    kernels: attention.Kernels = attention.NO_KERNELS,
    cache_sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[LayerCache, ...]:
    """Return the caches of prompts: keys and values, or states, per layer.

    Keys and values are [p g s e]; after prefixes [p g c e], as long as the caches of the prefixes.
    The caches exclude the last token of each prompt. The first decode step reads that token and
    samples the first token of the response, so that one program samples all tokens.

    Args:
        weights: weights in the decoder's layout (`transformer.unstack_layers`).
        tokens: prompts without their prefixes and without their last token, right-padded.
        lengths: number of valid tokens in each row, possibly 0.
        prefixes: the first tokens of the prompts; None: no prompt has a prefix.
        kernels: what decides the implementation of attention.
        cache_sharding: sharding of the KV cache on a mesh.
    """
    lengths = jnp.asarray(lengths)
    index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    visible = attention.causal(index < lengths[:, None], is_right_padded=True)
    positions, old = index, None
    if prefixes is not None:
        positions = index + jnp.asarray(prefixes.lengths)[:, None]
        old = jax.tree.map(lambda x: x[prefixes.rows], prefixes.caches)

    @jax.vmap
    def write(old: Array, new: Array, at: Array) -> Array:
        # A start near the end would be moved to the front; so the columns are widened for padding.
        wide = jnp.pad(old, ((0, 0), (0, new.shape[1]), (0, 0)))
        return jax.lax.dynamic_update_slice(wide, new, (0, at, 0))[:, : old.shape[1]]

    def attend(
        q: Array, k: Array, v: Array, sinks: Array | None, layer: int
    ) -> tuple[Array, KVCache]:
        new = KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        scores = transformer.scores_of(config.layer_kinds[layer], config, sinks)
        if old is None:
            return attention.attend_causal(q, k, v, visible, scores=scores, kernels=kernels), new
        cache = jax.tree.map(lambda x, y: write(x, y, positions[:, 0]), old[layer], new)
        column, query = jnp.arange(cache.keys.shape[2])[None, None], positions[:, :, None]
        seen = column <= query
        if scores.window is not None:
            seen = seen & (column > query - scores.window)
        keys, values = (jnp.swapaxes(part, 1, 2) for part in cache)
        bias = jnp.where(seen, 0.0, attention.MASKED)
        return attention.attend(q, keys, values, bias, scores), cache

    def mix(x: delta.Inputs, layer: int) -> tuple[Array, State]:
        return delta.mix(x, visible, None if old is None else old[layer], ends=lengths)

    x = transformer.embed(weights, tokens, positions, config=config, compute_dtype=compute_dtype)
    ropes = transformer.rotary(positions, config)
    return _run_layers(weights, x, ropes, attend, mix, config, cache_sharding)[1]


def copy(
    history: tuple[LayerCache, ...],
    prefilled: tuple[LayerCache, ...],
    slots: Int[Array, " a"],
    rows: Int[Array, " a"],
) -> tuple[LayerCache, ...]:
    """Return `history` with prefilled rows copied to the first columns of slots; donate `history`.

    Args:
        history: caches [n g c e] of the slots, per layer.
        prefilled: caches [p g s e] of the prompts, per layer; s <= c.
        slots: slot to write for each copy; n means that nothing is written.
        rows: row of `prefilled` for each copy.
    """

    def of_leaf(into: Array, source: Array) -> Array:
        # Scatter a window into each slot. With `into.at[slots, :, :s]`, columns would be scattered
        # like slots, and XLA for GPUs would transpose the whole cache and back.
        windows = jax.lax.ScatterDimensionNumbers(
            update_window_dims=tuple(range(1, into.ndim)),
            inserted_window_dims=(0,),
            scatter_dims_to_operand_dims=(0,),
        )
        mode = jax.lax.GatherScatterMode.FILL_OR_DROP
        at = jnp.asarray(slots)[:, None]
        return jax.lax.scatter(into, at, source[jnp.asarray(rows)], windows, mode=mode)

    return jax.tree.map(of_leaf, history, prefilled)


def run_chunk(
    weights: Params,
    history: tuple[LayerCache, ...],
    slots: Slots,
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    num_steps: int,
    pad_id: int,
    is_truncated: bool,
    cache_sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[Int[Array, "m n"], Float32[Array, "m n"], tuple[LayerCache, ...]]:
    """Return (tokens, log-probs, history) of up to `num_steps` tokens per slot.

    The history is donated.

    The chunk stops early when no slot is live. A slot whose response has ended gets `pad_id` and
    log-prob 0 until the end of the chunk. Every live slot needs `num_steps` free columns.

    Args:
        weights: weights in the decoder's layout.
        history: caches [n g c e] per layer.
        slots: state and settings of the slots.
        num_steps: m, maximum number of steps.
        pad_id: token at positions after the end of a response.
        is_truncated: at least one slot uses top-p or top-k.
        cache_sharding: sharding of the KV cache on a mesh.
    """
    stop_ids, start = jnp.asarray(slots.stop_ids), jnp.asarray(slots.length)
    steps = jnp.arange(num_steps, dtype=jnp.int32)[:, None]
    ropes = transformer.rotary(start[None] + steps, config)
    bits = random_bits(slots.keys, slots.count, num_steps)

    def body(carry: _Carry) -> _Carry:
        step, is_live = carry.step, carry.is_live
        x = transformer.embed(
            weights, carry.last, start + step, config=config, compute_dtype=compute_dtype
        )
        at_step = jax.tree.map(lambda x: x[step], ropes)
        uses = _over_caches(history, start, carry, config)
        x, recent = _run_layers(weights, x, at_step, *uses, config, cache_sharding)
        hidden = transformer.final_norm(weights, x, config=config)
        logits = transformer.unembed(weights, hidden, config=config, compute_dtype=compute_dtype)
        logits = _mask_stops(logits, stop_ids, carry.count < slots.min_new_tokens)
        tokens, logprobs = sample_tokens(
            logits, bits[step], slots.settings, is_truncated=is_truncated
        )
        tokens = jnp.where(is_live, tokens, pad_id)
        count = carry.count + is_live
        is_stop = jnp.any(tokens[:, None] == stop_ids, axis=1)
        return _Carry(
            step=step + 1,
            last=tokens,
            count=count,
            is_live=is_live & ~is_stop & (count < slots.max_new_tokens),
            tokens=carry.tokens.at[step].set(tokens),
            logprobs=carry.logprobs.at[step].set(jnp.where(is_live, logprobs, 0.0)),
            recent=recent,
        )

    empty = kv_cache.empty_layers(config, len(slots.last), num_steps, compute_dtype)
    first = _Carry(
        step=jnp.int32(0),
        last=jnp.asarray(slots.last),
        count=jnp.asarray(slots.count),
        is_live=jnp.asarray(slots.is_live),
        tokens=jnp.full((num_steps, len(slots.last)), pad_id, jnp.int32),
        logprobs=jnp.zeros((num_steps, len(slots.last)), jnp.float32),
        recent=tuple(
            old if isinstance(old, State) else new for old, new in zip(history, empty, strict=True)
        ),
    )
    last = jax.lax.while_loop(
        lambda carry: (carry.step < num_steps) & jnp.any(carry.is_live), body, first
    )

    return last.tokens, last.logprobs, _appended(history, last.recent, start)


def _over_caches(
    history: tuple[LayerCache, ...],
    lengths: Int[Array, " n"],
    carry: _Carry,
    config: TransformerConfig,
) -> tuple[Callable[..., tuple[Array, KVCache]], Callable[..., tuple[Array, State]]]:
    """Return attention and delta rule of one token per slot, as `_run_layers` calls them.

    Args:
        history: caches before the chunk.
        lengths: number of tokens of each slot in them.
        carry: caches of the chunk.
    """
    is_new = attention.causal(jnp.ones((len(carry.last), 1), bool), is_right_padded=True)

    def attend(
        q: Array, k: Array, v: Array, sinks: Array | None, layer: int
    ) -> tuple[Array, KVCache]:
        scores = transformer.scores_of(config.layer_kinds[layer], config, sinks)
        caches: Any = {"history": history[layer], "recent": carry.recent[layer]}
        return attention.attend_cached(
            q, k, v, **caches, history_length=lengths, index=carry.step, scores=scores
        )

    def mix(x: delta.Inputs, layer: int) -> tuple[Array, State]:
        columns = {name: getattr(x, name)[:, None] for name in ("qkv", "decay", "rate")}
        before = cast("State", carry.recent[layer])
        out, state = delta.mix(x._replace(**columns), is_new, before)

        def of_live(old: Array, new: Array) -> Array:
            # Slots whose response has ended keep their state.
            return jnp.where(carry.is_live.reshape(-1, *[1] * (new.ndim - 1)), new, old)

        return out[:, 0], jax.tree.map(of_live, before, state)

    return attend, mix


def _appended(
    history: tuple[LayerCache, ...], recent: tuple[LayerCache, ...], lengths: Int[Array, " n"]
) -> tuple[LayerCache, ...]:
    """Append the columns of a chunk to the history of each slot, and replace its states."""

    @jax.vmap
    def write(old: Array, new: Array, at: Array) -> Array:
        # Finished slots are written, too, but never read.
        return jax.lax.dynamic_update_slice(old, new, (0, at, 0))

    def of_layer(old: LayerCache, new: LayerCache) -> LayerCache:
        if isinstance(old, State):
            return new
        return jax.tree.map(lambda old, new: write(old, new, lengths), old, new)

    return tuple(map(of_layer, history, recent))


def _run_layers(
    weights: Params,
    x: Float[Array, "n *s d"],
    ropes: Mapping[LayerKind, Any],
    attend: Callable[..., tuple[Array, KVCache]],
    mix: Callable[..., tuple[Array, State]],
    config: TransformerConfig,
    cache_sharding: jax.sharding.NamedSharding | None,
) -> tuple[Float[Array, "n *s d"], tuple[LayerCache, ...]]:
    """Return the hidden states after all layers, and the cache that each layer returns.

    Args:
        ropes: rotary angles of each kind of layer.
        attend, mix: attention and delta rule, as `transformer.run_layer` calls them, with the index
            of the layer as `layer`.
    """
    mesh = None if cache_sharding is None else cast("jax.sharding.Mesh", cache_sharding.mesh)
    caches = []
    for i, (layer, kind) in enumerate(zip(weights["layers"], config.layer_kinds, strict=True)):
        use = functools.partial(mix if kind == "delta" else attend, layer=i)
        x, cache = transformer.run_layer(layer, x, ropes[kind], use, config=config, mesh=mesh)
        caches.append(cache)
    return x, tuple(caches)


def _mask_stops(
    logits: Float32[Array, "n v"], stop_ids: Int[Array, "n q"], is_short: Bool[Array, " n"]
) -> Float32[Array, "n v"]:
    """Set stop ids to -inf for responses below their minimum length."""
    # Padding and longer responses get an index outside the vocabulary, which has no effect.
    columns = jnp.where(is_short[:, None] & (stop_ids >= 0), stop_ids, logits.shape[1])
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")
