# SPDX-License-Identifier: Apache-2.0
"""What the decoding engine compiles: prefill, admission of prompts to slots, a chunk of steps.

Pure functions over arrays; the host side (`engine`) decides what runs when. A slot holds one
response: its row of the cache has the prompt and the response side by side, columns [0, length)
valid. The invariant owned here: where a key lies depends on the length of its own prompt and its
place in the response only, so a response does not depend on its slot, on its neighbours or on when
it was admitted.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int, UInt32

from tba_jax.decoding.sampling import Mode, RowSettings, random_bits, sample_tokens
from tba_jax.models import attention, kv_cache, transformer
from tba_jax.models.kv_cache import KVCache
from tba_jax.models.transformer import Params, TransformerConfig


class Slots(NamedTuple):
    """What the host knows of n slots, passed to every chunk.

    Attributes:
        last: int32 [n], the token to read next.
        length: int32 [n], cached tokens; also the position of `last`.
        count: int32 [n], tokens of the response so far.
        is_live: bool [n], the slot holds an unfinished response.
        keys: uint32 [n 2], threefry key of the response.
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


class _Carry(NamedTuple):
    step: Int[Array, ""]
    last: Int[Array, " n"]
    count: Int[Array, " n"]
    is_live: Bool[Array, " n"]
    tokens: Int[Array, "m n"]
    logprobs: Float32[Array, "m n"]
    recent: tuple[KVCache, ...]


def init_history(
    config: TransformerConfig, num_slots: int, length: int, dtype: Any
) -> tuple[KVCache, ...]:
    """Zeroed caches, one per layer [n g c e]."""
    shape = (num_slots, config.num_kv_heads, length, config.head_dim)
    return tuple(kv_cache.empty(shape, dtype) for _ in range(config.num_layers))


def prefill(
    weights: Params,
    tokens: Int[Array, "p s"],
    lengths: Int[Array, " p"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    cache_dtype: Any,
    implementation: attention.Implementation = "xla",
    cache_sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[KVCache, ...]:
    """Keys and values of right-padded prompts, one cache per layer [p g s e].

    The last token of a prompt is not among them: the first decode step reads it and draws the
    response's first token, so that tokens are drawn in one place.

    Args:
        weights: in the decoder's layout (`transformer.unstack_layers`).
        tokens: prompts without their last token.
        lengths: valid tokens of each, possibly 0.
        implementation: who computes attention.
        cache_sharding: of a cache on a mesh.
    """
    positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
    rope = transformer.rotary(positions, config)
    mask = positions < jnp.asarray(lengths)[:, None]
    visible = attention.causal(mask, is_right_padded=True)

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, KVCache]:
        kept = kv_cache.keep(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2), cache_dtype)
        out = attention.attend_causal(
            q, k, v, visible, implementation=implementation, sharding=cache_sharding
        )
        return out, kept

    x = transformer.embed(weights, tokens, positions, config=config, compute_dtype=compute_dtype)
    caches = []
    for layer in weights["layers"]:
        x, cache = transformer.run_layer(layer, x, rope, attend, config=config)
        caches.append(cache)
    return tuple(caches)


def admit(
    history: tuple[KVCache, ...],
    prefilled: tuple[KVCache, ...],
    slots: Int[Array, " a"],
    rows: Int[Array, " a"],
) -> tuple[KVCache, ...]:
    """`history` with prefilled rows copied to the front of slots; donate `history`.

    Args:
        history: [n g c e] per layer.
        prefilled: [p g s e] per layer, s <= c.
        slots: where to, n for "nowhere" (so that few shapes are compiled), which come last.
        rows: which prefilled prompt, ascending but for "nowhere".
    """

    def copy(into: Array, source: Array) -> Array:
        args = into, source, jnp.asarray(slots), jnp.asarray(rows)
        return jax.lax.platform_dependent(*args, tpu=_write_in_turn, default=_write_at_once)

    return jax.tree.map(copy, history, prefilled)


def _write_at_once(
    into: Array, source: Array, slots: Int[Array, " a"], rows: Int[Array, " a"]
) -> Array:
    # A window of each slot. Indexed as `into.at[slots, :, :s]`, columns are scattered like slots,
    # and XLA for GPUs transposes the whole cache to bring the two side by side, and back.
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
    # Of a scatter XLA for TPUs makes a loop over slots, which reads what each of them held, in case
    # there is no such slot. Here a prompt stays in fast memory while its slots are written.
    is_slot = slots < into.shape[0]

    def write_prompt(row: Array, into: Array) -> Array:
        prompt = jax.lax.dynamic_slice_in_dim(source, row, 1)

        def write(i: Array, into: Array) -> Array:
            return jax.lax.dynamic_update_slice(into, prompt, (slots[i], *[0] * (into.ndim - 1)))

        first, end = jnp.sum(is_slot & (rows < row)), jnp.sum(is_slot & (rows <= row))
        return jax.lax.fori_loop(first, end, write, into)

    return jax.lax.fori_loop(0, source.shape[0], write_prompt, into)


def resize(cache: KVCache, *, length: int) -> KVCache:
    """The same cache with `length` columns: padded, or cut where no slot holds anything."""

    def to_length(x: Array) -> Array:
        if length <= x.shape[2]:
            return x[:, :, :length]
        more = ((0, 0), (0, 0), (0, length - x.shape[2]), (0, 0))
        return jnp.pad(x, more[: x.ndim])

    return jax.tree.map(to_length, cache)


def take(cache: KVCache, rows: Int[Array, " a"]) -> KVCache:
    """The cache of some of the slots."""
    return jax.tree.map(lambda x: x[rows], cache)


def run_chunk(
    weights: Params,
    history: tuple[KVCache, ...],
    slots: Slots,
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    num_steps: int,
    pad_id: int,
    mode: Mode,
    is_truncated: bool,
    has_minimum: bool,
    implementation: attention.Implementation = "xla",
    cache_sharding: jax.sharding.NamedSharding | None = None,
) -> tuple[Int[Array, "m n"], Float32[Array, "m n"], tuple[KVCache, ...]]:
    """(tokens, log-probs, history) of up to `num_steps` new tokens per slot; donate `history`.

    Stops early when no slot is live. A slot whose response ends writes `pad_id` and log-prob 0
    until the chunk is over. Every live slot needs `num_steps` free columns.

    Args:
        weights: in the decoder's layout.
        history: caches [n g c e] per layer.
        slots: state and settings.
        num_steps: m.
        pad_id: token written after the end.
        mode: whether slots are all sampled, all greedy, or mixed.
        is_truncated: some slot uses top-p or top-k.
        has_minimum: some slot has a least number of tokens.
        implementation: who computes attention.
        cache_sharding: of a cache on a mesh.
    """
    stop_ids = jnp.asarray(slots.stop_ids)
    bits = _bits(slots, num_steps, mode)
    ropes = _rotations(slots, num_steps, config)
    unwritten = _init_recent(history, config, num_steps, compute_dtype)

    def body(carry: _Carry) -> _Carry:
        step = carry.step
        positions = slots.length + step
        rope = jax.tree.map(lambda x: x[step], ropes)
        x = transformer.embed(
            weights, carry.last, positions, config=config, compute_dtype=compute_dtype
        )
        attend = functools.partial(
            attention.attend_cached,
            index=step,
            history_length=slots.length,
            implementation=implementation,
            sharding=cache_sharding,
        )
        x, recent = _run_layers(weights, x, rope, history, carry.recent, attend, config)
        hidden = transformer.final_norm(weights, x, config=config)
        logits = transformer.unembed(weights, hidden, config=config, compute_dtype=compute_dtype)
        if has_minimum:
            logits = _mask_stops(logits, stop_ids, carry.count < slots.min_new_tokens)
        tokens, logprobs = sample_tokens(
            logits, bits[step], slots.settings, is_truncated=is_truncated, mode=mode
        )
        tokens = jnp.where(carry.is_live, tokens, pad_id)
        count = carry.count + carry.is_live
        is_stop = jnp.any(tokens[:, None] == stop_ids, axis=1)
        return _Carry(
            step=step + 1,
            last=tokens,
            count=count,
            is_live=carry.is_live & ~is_stop & (count < slots.max_new_tokens),
            tokens=carry.tokens.at[step].set(tokens),
            logprobs=carry.logprobs.at[step].set(jnp.where(carry.is_live, logprobs, 0.0)),
            recent=recent,
        )

    carry = jax.lax.while_loop(
        lambda carry: (carry.step < num_steps) & jnp.any(carry.is_live),
        body,
        _first_carry(slots, num_steps, pad_id, unwritten),
    )

    return carry.tokens, carry.logprobs, _kept(history, carry.recent, slots)


def _first_carry(slots: Slots, num_steps: int, pad_id: int, recent: tuple[KVCache, ...]) -> _Carry:
    n = slots.last.shape[0]
    return _Carry(
        step=jnp.int32(0),
        last=jnp.asarray(slots.last),
        count=jnp.asarray(slots.count),
        is_live=jnp.asarray(slots.is_live),
        tokens=jnp.full((num_steps, n), pad_id, jnp.int32),
        logprobs=jnp.zeros((num_steps, n), jnp.float32),
        recent=recent,
    )


def _run_layers(
    weights: Params,
    x: Float[Array, "n d"],
    rope: Any,
    history: tuple[KVCache, ...],
    recent: tuple[KVCache, ...],
    attend: Callable[..., Any],
    config: TransformerConfig,
) -> tuple[Float[Array, "n d"], tuple[KVCache, ...]]:
    """Hidden states of one token per slot after all layers, and the caches with that token."""
    written = []
    for layer, old, new in zip(weights["layers"], history, recent, strict=True):
        with_caches = functools.partial(attend, history=old, recent=new)
        x, cache = transformer.run_layer(layer, x, rope, with_caches, config=config)
        written.append(cache)
    return x, tuple(written)


def _init_recent(
    history: tuple[KVCache, ...], config: TransformerConfig, num_steps: int, compute_dtype: Any
) -> tuple[KVCache, ...]:
    """Caches of a chunk; beside a history in eight bits as they are, until the chunk is over."""
    keys = history[0].keys
    dtype = compute_dtype if isinstance(keys, kv_cache.Rounded) else keys.dtype
    return init_history(config, keys.shape[0], num_steps, dtype)


def _kept(
    history: tuple[KVCache, ...], recent: tuple[KVCache, ...], slots: Slots
) -> tuple[KVCache, ...]:
    """The history with the columns of a chunk behind what each slot held."""

    @jax.vmap
    def write(old: Array, new: Array, at: Array) -> Array:
        # Finished slots are written too; nobody reads them again.
        return jax.lax.dynamic_update_slice(old, new, (0, at, 0)[: old.ndim])

    if isinstance(history[0].keys, kv_cache.Rounded):
        recent = tuple(kv_cache.keep(*of_layer, jnp.int8) for of_layer in recent)
    lengths = jnp.asarray(slots.length)
    return jax.tree.map(lambda old, new: write(old, new, lengths), history, recent)


def _rotations(slots: Slots, num_steps: int, config: TransformerConfig) -> Any:
    """What the steps of the chunk rotate by, [m n f], ahead: no layer then makes its own cosines.

    Nothing for a model without rotations.
    """
    steps = jnp.arange(num_steps, dtype=jnp.int32)[:, None]
    return transformer.rotary(jnp.asarray(slots.length)[None] + steps, config)


def _bits(slots: Slots, num_steps: int, mode: Mode) -> UInt32[Array, "m n 2"]:
    """The random words of the chunk, drawn ahead; greedy decoding reads none of them."""
    if mode == "greedy":
        return jnp.zeros((num_steps, *slots.last.shape, 2), jnp.uint32)
    return random_bits(slots.keys, slots.count, num_steps)


def _mask_stops(
    logits: Float32[Array, "n v"], stop_ids: Int[Array, "n q"], is_short: Bool[Array, " n"]
) -> Float32[Array, "n v"]:
    """-inf at the stop ids of responses that must not end yet."""
    # An index outside the vocabulary is dropped: that of padding, and of longer responses.
    columns = jnp.where(is_short[:, None] & (stop_ids >= 0), stop_ids, logits.shape[1])
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")
