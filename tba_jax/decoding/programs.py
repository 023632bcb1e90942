# SPDX-License-Identifier: Apache-2.0
"""Functions that decoding compiles: prefill, admission of prompts to slots, a chunk of steps.

They are pure functions over arrays; the host (`session`) decides when each runs. A slot holds one
response. Its cache row has the prompt and then the response; columns [0, length) are valid.
Invariant: the position of a key depends only on its prompt's length and its index in the response,
so a response does not depend on its slot, on other slots or on the time of its admission.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.decoding.sampling import RowSettings, random_bits, sample_tokens
from tba_jax.models import attention, delta, kv_cache, transformer
from tba_jax.models.architecture import LayerKind
from tba_jax.models.kv_cache import KVCache, LayerCache
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


def prefill(
    weights: Params,
    tokens: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    implementation: attention.Implementation = "xla",
    cache_sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[LayerCache, ...]:
    """Return the caches of right-padded prompts: keys and values [p g s e], or states, per layer.

    The caches exclude the last token of each prompt. The first decode step reads that token and
    samples the first token of the response, so that one program samples all tokens.

    Args:
        weights: weights in the decoder's layout (`transformer.unstack_layers`).
        tokens: prompts without their last token.
        lengths: number of valid tokens in each row, possibly 0.
        implementation: attention implementation.
        cache_sharding: sharding of the KV cache on a mesh.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    ropes = transformer.rotary(positions, config)
    mask = positions < jnp.asarray(lengths)[:, None]
    visible = attention.causal(mask, is_right_padded=True)

    def attend(
        q: Array, k: Array, v: Array, sinks: Array | None, kind: LayerKind
    ) -> tuple[Array, KVCache]:
        kept = KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        out = attention.attend_causal(
            q,
            k,
            v,
            visible,
            scores=transformer.scores_of(kind, config, sinks),
            implementation=implementation,
            sharding=cache_sharding,
        )
        return out, kept

    def mix(x: delta.Inputs) -> tuple[Array, kv_cache.State]:
        return delta.mix(x, visible, ends=jnp.asarray(lengths))

    x = transformer.embed(weights, tokens, positions, config=config, compute_dtype=compute_dtype)
    uses = [
        mix if kind == "delta" else functools.partial(attend, kind=kind)
        for kind in config.layer_kinds
    ]
    return _run_layers(weights, x, ropes, uses, config, cache_sharding)[1]


def extend(
    weights: Params,
    prefixes: Prefixes,
    tokens: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    implementation: attention.Implementation = "xla",
    cache_sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[LayerCache, ...]:
    """Return caches [p g c e] of prompts whose first tokens are in kept caches.

    Args:
        weights: in the decoder's layout.
        prefixes: the first tokens of the prompts.
        tokens: the rest of each prompt except its last token, right-padded.
        lengths: number of valid tokens of each row, possibly 0.
        config, compute_dtype, implementation, cache_sharding: as in `prefill`.
    """
    s, before = tokens.shape[1], jnp.asarray(prefixes.lengths)
    length = kv_cache.of_attention(prefixes.caches).keys.shape[2]
    positions = before[:, None] + jnp.arange(s)[None]
    ropes = transformer.rotary(positions, config)
    mask = jnp.arange(s)[None] < jnp.asarray(lengths)[:, None]
    visible = attention.causal(mask, is_right_padded=True)
    columns = jnp.arange(length)[None, None]

    @jax.vmap
    def write(old: Array, new: Array, at: Array) -> Array:
        # A start near the end would be moved to the front; so the columns are widened for padding.
        wide = jnp.pad(old, ((0, 0), (0, s), (0, 0)))
        return jax.lax.dynamic_update_slice(wide, new, (0, at, 0))[:, :length]

    def attend(
        q: Array, k: Array, v: Array, sinks: Array | None, kind: LayerKind, old: KVCache
    ) -> tuple[Array, KVCache]:
        new = KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
        cache = jax.tree.map(lambda x, y: write(x, y, before), old, new)
        scores = transformer.scores_of(kind, config, sinks)
        seen = columns <= positions[:, :, None]
        if scores.window is not None:
            seen = seen & (columns > positions[:, :, None] - scores.window)
        keys, values = (jnp.swapaxes(part, 1, 2) for part in cache)
        bias = jnp.where(seen, 0.0, attention.MASKED)
        heads_first = implementation in ("xla", "cudnn")
        return attention.attend(q, keys, values, bias, scores, heads_first=heads_first), cache

    def mix(x: delta.Inputs, old: kv_cache.State) -> tuple[Array, kv_cache.State]:
        return delta.mix(x, visible, old, ends=jnp.asarray(lengths))

    x = transformer.embed(weights, tokens, positions, config=config, compute_dtype=compute_dtype)
    uses: list[Callable[..., Any]] = []
    for kind, whole in zip(config.layer_kinds, prefixes.caches, strict=True):
        old: Any = jax.tree.map(lambda x: x[prefixes.rows], whole)
        use: Callable[..., Any] = functools.partial(attend, kind=kind)
        uses.append(functools.partial(mix if kind == "delta" else use, old=old))
    return _run_layers(weights, x, ropes, uses, config, cache_sharding)[1]


def admit(
    history: tuple[LayerCache, ...],
    prefilled: tuple[LayerCache, ...],
    slots: Int[Array, " a"],
    rows: Int[Array, " a"],
) -> tuple[LayerCache, ...]:
    """Return `history` with prefilled rows copied to the first columns of slots; donate `history`.

    Args:
        history: caches [n g c e] of the slots, per layer.
        prefilled: caches [p g s e] of the prompts, per layer; s <= c.
        slots: slot to write for each copy; n means that nothing is written. Such copies are last;
            they pad the call to a compiled shape.
        rows: row of `prefilled` for each copy, ascending where a slot is written.
    """

    def copy(into: Array, source: Array) -> Array:
        args = into, source, jnp.asarray(slots), jnp.asarray(rows)
        return jax.lax.platform_dependent(*args, tpu=_write_in_turn, default=_write_at_once)

    return jax.tree.map(copy, history, prefilled)


def _write_at_once(
    into: Array, source: Array, slots: Int[Array, " a"], rows: Int[Array, " a"]
) -> Array:
    # Scatter a window into each slot. With `into.at[slots, :, :s]`, columns would be scattered
    # like slots, and XLA for GPUs would transpose the whole cache and back.
    windows = jax.lax.ScatterDimensionNumbers(
        update_window_dims=tuple(range(1, into.ndim)),
        inserted_window_dims=(0,),
        scatter_dims_to_operand_dims=(0,),
    )
    mode = jax.lax.GatherScatterMode.FILL_OR_DROP
    return jax.lax.scatter(into, slots[:, None], source[rows], windows, mode=mode)


def _write_in_turn(
    into: Array, source: Array, slots: Int[Array, " a"], rows: Int[Array, " a"]
) -> Array:
    # XLA for TPUs turns a scatter into a loop over slots that also reads their old contents, in
    # case a slot is out of range. In this loop a prompt stays in fast memory for all its slots.
    is_slot = slots < into.shape[0]

    def write_prompt(row: Array, into: Array) -> Array:
        prompt = jax.lax.dynamic_slice_in_dim(source, row, 1)

        def write(i: Array, into: Array) -> Array:
            return jax.lax.dynamic_update_slice(into, prompt, (slots[i], *[0] * (into.ndim - 1)))

        first, end = jnp.sum(is_slot & (rows < row)), jnp.sum(is_slot & (rows <= row))
        return jax.lax.fori_loop(first, end, write, into)

    return jax.lax.fori_loop(0, source.shape[0], write_prompt, into)


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
        attend = functools.partial(attention.attend_cached, index=step, history_length=start)
        uses = _uses_of_caches(history, carry.recent, attend, config)
        at_step = jax.tree.map(lambda x: x[step], ropes)
        x, recent = _run_layers(weights, x, at_step, uses, config, cache_sharding)
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
            recent=_of_live(carry.recent, recent, is_live),
        )

    first = _first_carry(history, slots, num_steps, pad_id, config)
    last = jax.lax.while_loop(
        lambda carry: (carry.step < num_steps) & jnp.any(carry.is_live), body, first
    )
    return last.tokens, last.logprobs, _kept(history, last.recent, start)


def _first_carry(
    history: tuple[LayerCache, ...],
    slots: Slots,
    num_steps: int,
    pad_id: int,
    config: TransformerConfig,
) -> _Carry:
    """Return the carry with empty keys and values, and with the states of the history."""
    n, dtype = len(slots.last), kv_cache.of_attention(history).keys.dtype
    empty = kv_cache.empty_layers(config, n, num_steps, dtype)
    return _Carry(
        step=jnp.int32(0),
        last=jnp.asarray(slots.last),
        count=jnp.asarray(slots.count),
        is_live=jnp.asarray(slots.is_live),
        tokens=jnp.full((num_steps, n), pad_id, jnp.int32),
        logprobs=jnp.zeros((num_steps, n), jnp.float32),
        recent=tuple(
            new if isinstance(new, KVCache) else old
            for old, new in zip(history, empty, strict=True)
        ),
    )


def _of_live(
    old: tuple[LayerCache, ...], new: tuple[LayerCache, ...], is_live: Bool[Array, " n"]
) -> tuple[LayerCache, ...]:
    """Return the new caches; slots whose response has ended keep their old state."""

    def of_slots(old: Array, new: Array) -> Array:
        return jnp.where(is_live.reshape(-1, *[1] * (new.ndim - 1)), new, old)

    return tuple(
        jax.tree.map(of_slots, before, after) if isinstance(after, kv_cache.State) else after
        for before, after in zip(old, new, strict=True)
    )


def _run_layers(
    weights: Params,
    x: Float[Array, "n *s d"],
    ropes: Mapping[LayerKind, Any],
    uses: Sequence[Callable[..., Any]],
    config: TransformerConfig,
    cache_sharding: jax.sharding.NamedSharding | None,
) -> tuple[Float[Array, "n *s d"], tuple[LayerCache, ...]]:
    """Return the hidden states after all layers, and the cache that each layer returns.

    Args:
        ropes: rotary angles of each kind of layer.
        uses: attention or delta rule of each layer, as `transformer.run_layer` calls it.
    """
    mesh = None if cache_sharding is None else cast("jax.sharding.Mesh", cache_sharding.mesh)
    caches = []
    for layer, kind, use in zip(weights["layers"], config.layer_kinds, uses, strict=True):
        x, cache = transformer.run_layer(layer, x, ropes[kind], use, config=config, mesh=mesh)
        caches.append(cache)
    return x, tuple(caches)


def _uses_of_caches(
    history: tuple[LayerCache, ...],
    recent: tuple[LayerCache, ...],
    attend: Callable[..., Any],
    config: TransformerConfig,
) -> list[Callable[..., Any]]:
    """Return the attention or delta rule of each layer for one token per slot."""

    def mix(x: delta.Inputs, before: Any) -> tuple[Array, LayerCache]:
        is_new = attention.causal(jnp.ones((len(x.qkv), 1), bool), is_right_padded=True)
        columns = {name: getattr(x, name)[:, None] for name in ("qkv", "decay", "rate")}
        out, state = delta.mix(x._replace(**columns), is_new, before)
        return out[:, 0], state

    def with_caches(
        q: Array, k: Array, v: Array, sinks: Array | None, layer: int
    ) -> tuple[Array, KVCache]:
        scores = transformer.scores_of(config.layer_kinds[layer], config, sinks)
        return attend(q, k, v, history=history[layer], recent=recent[layer], scores=scores)

    return [
        functools.partial(mix, before=recent[i])
        if kind == "delta"
        else functools.partial(with_caches, layer=i)
        for i, kind in enumerate(config.layer_kinds)
    ]


def _kept(
    history: tuple[LayerCache, ...], recent: tuple[LayerCache, ...], lengths: Int[Array, " n"]
) -> tuple[LayerCache, ...]:
    """Append the columns of a chunk to the history of each slot, and replace its states."""

    @jax.vmap
    def write(old: Array, new: Array, at: Array) -> Array:
        # Finished slots are written, too, but never read.
        return jax.lax.dynamic_update_slice(old, new, (0, at, 0))

    def of_layer(old: LayerCache, new: LayerCache) -> LayerCache:
        if isinstance(old, kv_cache.State):
            return new
        return jax.tree.map(lambda old, new: write(old, new, lengths), old, new)

    return tuple(map(of_layer, history, recent))


def _mask_stops(
    logits: Float32[Array, "n v"], stop_ids: Int[Array, "n q"], is_short: Bool[Array, " n"]
) -> Float32[Array, "n v"]:
    """Set stop ids to -inf for responses below their minimum length."""
    # Padding and longer responses get an index outside the vocabulary, which has no effect.
    columns = jnp.where(is_short[:, None] & (stop_ids >= 0), stop_ids, logits.shape[1])
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")
