# SPDX-License-Identifier: Apache-2.0
"""Functions that decoding compiles: reading of prompts, copies to slots, a chunk of steps.

They are pure functions over arrays; the host (`session`) decides when each runs. A slot holds one
response. Its cache row has the prompt and then the response; columns [0, length) are valid.
Invariant: the position of a key depends only on its prompt's length and its index in the response,
so a response does not depend on its slot, on other slots or on the time of its admission.
"""

import dataclasses
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

Caches = tuple[LayerCache, ...]


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
    ints: Any = np.zeros((6, num_slots), np.int32)
    ones: Any = np.ones((2, num_slots), np.float32)
    return Slots(
        last=ints[0],
        length=ints[1],
        count=ints[2],
        is_live=np.zeros(num_slots, bool),
        keys=np.zeros((num_slots, 2), np.uint32),
        settings=RowSettings(temperature=ones[0], top_p=ones[1], top_k=ints[3]),
        min_new_tokens=ints[4],
        max_new_tokens=ints[5],
        stop_ids=np.full((num_slots, num_stop_ids), -1, np.int32),
    )


class Prefixes(NamedTuple):
    """The first tokens of p prompts, in kept caches.

    Attributes:
        caches: [r g c e] per layer, of the length of the slots' caches.
        rows: int32 [p], row of each prompt.
        lengths: int32 [p], tokens of each prompt in its row.
    """

    caches: Caches
    rows: Any
    lengths: Any


class _Carry(NamedTuple):
    step: Int[Array, ""]
    last: Int[Array, " n"]
    count: Int[Array, " n"]
    is_live: Bool[Array, " n"]
    tokens: Int[Array, "m n"]
    logprobs: Float32[Array, "m n"]
    recent: Caches


@dataclasses.dataclass(frozen=True)
class Programs:
    """The programs of one architecture.

    Attributes:
        compute_dtype: dtype of activations, and of cached keys and values.
        kernels: what decides the implementation of attention; has the sharding of the caches.
        num_steps: m, maximum number of steps of a chunk.
        pad_id: token at positions after the end of a response.
    """

    config: TransformerConfig
    compute_dtype: Any
    kernels: attention.Kernels
    num_steps: int
    pad_id: int

    def extend(
        self,
        weights: Params,
        tokens: Int[Array, "p s"],
        lengths: Int[Array, " p"],
        prefixes: Prefixes | None = None,
    ) -> Caches:
        """Return the caches of prompts: keys and values, or states, per layer.

        Keys and values are [p g s e]; after prefixes [p g c e], as long as the caches of the
        prefixes. The caches exclude the last token of each prompt. The first decode step reads that
        token and samples the first token of the response, so that one program samples all tokens.

        Args:
            weights: weights in the decoder's layout (`transformer.unstack_layers`).
            tokens: prompts without their prefixes and without their last token, right-padded.
            lengths: number of valid tokens in each row, possibly 0.
            prefixes: the first tokens of the prompts; None: no prompt has a prefix.
        """
        lengths = jnp.asarray(lengths)
        index = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        visible = attention.causal(index < lengths[:, None], is_right_padded=True)
        positions, old = index, None
        if prefixes is not None:
            positions = index + jnp.asarray(prefixes.lengths)[:, None]
            old = jax.tree.map(lambda x: x[prefixes.rows], prefixes.caches)

        def append(old: Array, new: Array) -> Array:
            # A start near the end would be moved to the front; so the columns are widened.
            wide = jnp.pad(old, ((0, 0), (0, 0), (0, new.shape[2]), (0, 0)))
            return _written(wide, new, positions[:, 0])[:, :, : old.shape[2]]

        def attend(
            q: Array, k: Array, v: Array, scores: attention.Scores, layer: int
        ) -> tuple[Array, KVCache]:
            new = KVCache(jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2))
            if old is None:
                kernels = self.kernels
                out = attention.attend_causal(q, k, v, visible, scores=scores, kernels=kernels)
                return out, new
            cache = jax.tree.map(append, old[layer], new)
            column, query = jnp.arange(cache.keys.shape[2])[None, None], positions[:, :, None]
            seen = column <= query
            if scores.window is not None:
                seen = seen & (column > query - scores.window)
            keys, values = (jnp.swapaxes(part, 1, 2) for part in cache)
            bias = jnp.where(seen, 0.0, attention.MASKED)
            return attention.attend(q, keys, values, bias, scores), cache

        def mix(x: delta.Inputs, layer: int) -> tuple[Array, State]:
            return delta.mix(x, visible, None if old is None else old[layer], ends=lengths)

        ropes = transformer.rotary(positions, self.config)
        return self._run_layers(weights, tokens, positions, ropes, attend, mix)[1]

    def copy(
        self, history: Caches, source: Caches, slots: Int[Array, " a"], rows: Int[Array, " a"]
    ) -> Caches:
        """Return `history` with rows of `source` copied to the first columns of slots.

        Args:
            history: caches [n g c e] of the slots, per layer; donated.
            source: caches [p g s e], per layer; s <= c.
            slots: slot to write for each copy; n means that nothing is written.
            rows: row of `source` for each copy.
        """

        def of_leaf(into: Array, source: Array) -> Array:
            # Scatter a window into each slot. With `into.at[slots, :, :s]`, columns would be
            # scattered like slots, and XLA for GPUs would transpose the whole cache and back.
            windows = jax.lax.ScatterDimensionNumbers(
                update_window_dims=tuple(range(1, into.ndim)),
                inserted_window_dims=(0,),
                scatter_dims_to_operand_dims=(0,),
            )
            mode = jax.lax.GatherScatterMode.FILL_OR_DROP
            at = jnp.asarray(slots)[:, None]
            return jax.lax.scatter(into, at, source[jnp.asarray(rows)], windows, mode=mode)

        return jax.tree.map(of_leaf, history, source)

    def run_chunk(
        self, weights: Params, history: Caches, slots: Slots, *, is_truncated: bool
    ) -> tuple[Int[Array, "m n"], Float32[Array, "m n"], Caches]:
        """Return (tokens, log-probs, history) of up to `num_steps` tokens per slot.

        The chunk stops early when no slot is live. A slot whose response has ended gets `pad_id`
        and log-prob 0 until the end of the chunk. Every live slot needs `num_steps` free columns.

        Args:
            weights: weights in the decoder's layout.
            history: caches [n g c e] per layer; donated.
            slots: state and settings of the slots.
            is_truncated: static; at least one slot uses top-p or top-k.
        """
        num_steps, num_slots = self.num_steps, len(slots.last)
        stop_ids, start = jnp.asarray(slots.stop_ids), jnp.asarray(slots.length)
        steps = jnp.arange(num_steps, dtype=jnp.int32)[:, None]
        ropes = transformer.rotary(start[None] + steps, self.config)
        bits = random_bits(slots.keys, slots.count, num_steps)

        def body(carry: _Carry) -> _Carry:
            step, is_live = carry.step, carry.is_live
            at_step = jax.tree.map(lambda x: x[step], ropes)
            uses = _over_caches(history, start, carry)
            x, recent = self._run_layers(weights, carry.last, start + step, at_step, *uses)
            hidden = transformer.final_norm(weights, x, config=self.config)
            logits = transformer.unembed(
                weights, hidden, config=self.config, compute_dtype=self.compute_dtype
            )
            logits = _mask_stops(logits, stop_ids, carry.count < slots.min_new_tokens)
            tokens, logprobs = sample_tokens(
                logits, bits[step], slots.settings, is_truncated=is_truncated
            )
            tokens = jnp.where(is_live, tokens, self.pad_id)
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

        empty = kv_cache.empty_layers(self.config, num_slots, num_steps, self.compute_dtype)
        first = _Carry(
            step=jnp.int32(0),
            last=jnp.asarray(slots.last),
            count=jnp.asarray(slots.count),
            is_live=jnp.asarray(slots.is_live),
            tokens=jnp.full((num_steps, num_slots), self.pad_id, jnp.int32),
            logprobs=jnp.zeros((num_steps, num_slots), jnp.float32),
            recent=tuple(
                old if isinstance(old, State) else new
                for old, new in zip(history, empty, strict=True)
            ),
        )
        last = jax.lax.while_loop(
            lambda carry: (carry.step < num_steps) & jnp.any(carry.is_live), body, first
        )
        # States are replaced. Finished slots are written, too, but never read.
        written = tuple(
            new
            if isinstance(new, State)
            else jax.tree.map(lambda old, new: _written(old, new, start), old, new)
            for old, new in zip(history, last.recent, strict=True)
        )
        return last.tokens, last.logprobs, written

    def _run_layers(
        self,
        weights: Params,
        tokens: Int[Array, "*b"],
        positions: Int[Array, "*b"],
        ropes: Mapping[LayerKind, Any],
        attend: Callable[..., tuple[Array, KVCache]],
        mix: Callable[..., tuple[Array, State]],
    ) -> tuple[Float[Array, "*b d"], Caches]:
        """Return the hidden states after all layers, and the cache that each layer returns.

        Args:
            ropes: rotary angles of each kind of layer.
            attend: (q, k, v, scores, index of the layer) -> (output, cache).
            mix: (inputs of the delta rule, index of the layer) -> (output, state).
        """
        config, sharding = self.config, self.kernels.sharding
        mesh = None if sharding is None else cast("jax.sharding.Mesh", sharding.mesh)
        x = transformer.embed(
            weights, tokens, positions, config=config, compute_dtype=self.compute_dtype
        )

        def attend_in(q: Array, k: Array, v: Array, sinks: Array | None, *, layer: int) -> Any:
            scores = transformer.scores_of(config.layer_kinds[layer], config, sinks)
            return attend(q, k, v, scores, layer)

        caches = []
        for i, (layer, kind) in enumerate(zip(weights["layers"], config.layer_kinds, strict=True)):
            use = functools.partial(mix if kind == "delta" else attend_in, layer=i)
            x, cache = transformer.run_layer(layer, x, ropes[kind], use, config=config, mesh=mesh)
            caches.append(cache)
        return x, tuple(caches)


def _over_caches(
    history: Caches, lengths: Int[Array, " n"], carry: _Carry
) -> tuple[Callable[..., tuple[Array, KVCache]], Callable[..., tuple[Array, State]]]:
    """Return `attend` and `mix` of one token per slot, as `_run_layers` calls them.

    Args:
        history: caches before the chunk.
        lengths: number of tokens of each slot in them.
        carry: caches of the chunk.
    """
    is_new = attention.causal(jnp.ones((len(carry.last), 1), bool), is_right_padded=True)

    def attend(
        q: Array, k: Array, v: Array, scores: attention.Scores, layer: int
    ) -> tuple[Array, KVCache]:
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


@jax.vmap
def _written(old: Array, new: Array, at: Array) -> Array:
    """Return caches [n g c e] with columns [n g m e] written from column at [n] of each row."""
    return jax.lax.dynamic_update_slice(old, new, (0, at, 0))


def _mask_stops(
    logits: Float32[Array, "n v"], stop_ids: Int[Array, "n q"], is_short: Bool[Array, " n"]
) -> Float32[Array, "n v"]:
    """Set stop ids to -inf for responses below their minimum length."""
    # Padding and longer responses get an index outside the vocabulary, which has no effect.
    columns = jnp.where(is_short[:, None] & (stop_ids >= 0), stop_ids, logits.shape[1])
    rows = jnp.arange(logits.shape[0])[:, None]
    return logits.at[rows, columns].set(-jnp.inf, mode="drop")
