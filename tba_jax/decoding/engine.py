# SPDX-License-Identifier: Apache-2.0
"""The decoding engine: prompts in, S sampled responses per prompt out, one program per shape.

One prefill per prompt; its keys and values are shared by the prompt's S samples. A jitted
while_loop then draws one token per row and step and stops when every row has ended. It does not
know text, rewards, tasks or training. The invariants it owns: a row's draws depend neither on the
other rows nor on when they end, and every response is (tokens up to and including the first
end-of-sequence token, log-probs of the distribution actually sampled from, padding).
"""

import functools
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Bool, Float, Int

from tba_jax.decoding.sampling import greedy_tokens, row_uniforms, sample_tokens
from tba_jax.models import transformer
from tba_jax.models.transformer import KVCache, Params, TransformerConfig
from tba_jax.trajectory import bucket_length, left_pad


class Decoded(NamedTuple):
    """Responses of one decode call; host arrays.

    Attributes:
        tokens: int32 [p k t], `pad_id` after the end; t = max_new_tokens.
        lengths: int32 [p k], tokens of each response, the end-of-sequence token included.
        token_logprobs: float32 [p k t], of the distribution sampled from; 0 at padding.
        has_eos: bool [p k], False where the length limit cut the response.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    token_logprobs: np.ndarray
    has_eos: np.ndarray


class _State(NamedTuple):
    """Carry of the decode loop.

    Attributes:
        step: number of tokens drawn for every row.
        last: int32 [p k], the token drawn last.
        tokens: int32 [t p k], time first so that a step writes one contiguous slice.
        logprobs: float32 [t p k].
        lengths: int32 [p k], tokens of the response so far.
        is_done: bool [p k], the row has ended (or pads the batch).
        cache: per layer, keys and values of the responses [p g k t e].
    """

    step: Array
    last: Array
    tokens: Array
    logprobs: Array
    lengths: Array
    is_done: Array
    cache: tuple[KVCache, ...]


class Decoder:
    """Compiled decoding for one architecture; safe to share between threads.

    Runs where the parameters live. Programs are kept per (prompt bucket, number of prompts,
    samples, max_new_tokens, greedy or not); a temperature does not compile a new one.

    Args:
        config: the architecture.
        compute_dtype: dtype of activations and caches.
        eos_ids: tokens that end a response; may be empty.
        pad_id: token written after the end.
        prompt_buckets: ascending prompt lengths to pad to.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        compute_dtype: Any,
        eos_ids: Sequence[int],
        pad_id: int,
        prompt_buckets: Sequence[int],
    ):
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.eos_ids = tuple(eos_ids)
        self.pad_id = pad_id
        self.prompt_buckets = tuple(prompt_buckets)
        self._programs: set[tuple[Any, ...]] = set()
        self._run = jax.jit(
            self._trace, static_argnames=("num_samples", "max_new_tokens", "is_greedy")
        )

    @property
    def compile_count(self) -> int:
        """Number of distinct programs traced so far."""
        return len(self._programs)

    def decode(
        self,
        params: Params,
        prompts: Sequence[np.ndarray],
        *,
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
        key: Array,
        batch_prompts: int | None = None,
    ) -> Decoded:
        """Draw `num_samples` responses to each prompt.

        Args:
            params: parameters in our layout, on the devices to run on.
            prompts: p rows of token ids, each at least one token long.
            num_samples: S.
            max_new_tokens: t, the length limit.
            temperature: divides the logits; 0 is greedy.
            key: JAX PRNG key; sample j of prompt i draws from fold_in(key, i * S + j).
            batch_prompts: prompts per program call, the last call padded to as many; None: all
                in one call.

        Raises:
            ValueError: a prompt that is empty or does not fit, or a negative temperature.
        """
        self._check(prompts, num_samples, max_new_tokens, temperature)
        size = batch_prompts or len(prompts)
        # The key travels as numbers: a key array committed to another device could not.
        key_data = np.asarray(jax.random.key_data(key))
        chunks = []
        for start in range(0, len(prompts), size):
            rows = list(prompts[start : start + size])
            real = len(rows)
            length = bucket_length(max(len(row) for row in rows), self.prompt_buckets)
            rows += [np.zeros(0, np.int32)] * (size - real)
            out = self._run(
                params,
                left_pad(rows, length, self.pad_id),
                np.array([len(row) for row in rows], np.int32),
                key_data,
                np.int32(start * num_samples),
                np.float32(temperature),
                num_samples=num_samples,
                max_new_tokens=max_new_tokens,
                is_greedy=temperature == 0,
            )
            chunks.append((out, real))
        # Fetched after the last dispatch: the device works on while the host waits.
        fetched = [[np.asarray(x)[:real] for x in out] for out, real in chunks]
        return Decoded(*(np.concatenate(parts) for parts in zip(*fetched, strict=True)))

    def _check(
        self,
        prompts: Sequence[np.ndarray],
        num_samples: int,
        max_new_tokens: int,
        temperature: float,
    ) -> None:
        for name, value in (
            ("number of prompts", len(prompts)),
            ("num_samples", num_samples),
            ("max_new_tokens", max_new_tokens),
        ):
            if value < 1:
                raise ValueError(f"decode() got {name} = {value}; wanted at least 1")
        if not temperature >= 0:
            raise ValueError(
                f"decode() got temperature = {temperature}; wanted 0 (greedy) or a positive number"
            )
        lengths = [len(prompt) for prompt in prompts]
        if min(lengths) == 0:
            raise ValueError(
                f"decode() got an empty prompt (row {lengths.index(0)}); give at least one token, "
                "such as the beginning-of-sequence token"
            )
        limit = self.config.max_positions
        if max(lengths) + max_new_tokens > limit:
            raise ValueError(
                f"decode() got a prompt of {max(lengths)} tokens and max_new_tokens = "
                f"{max_new_tokens}; the model has {limit} positions. Shorten one of them"
            )

    def _trace(
        self,
        params: Params,
        prompts: Int[Array, "p c"],
        prompt_lengths: Int[Array, " p"],
        key_data: Array,
        first_row: Int[Array, ""],
        temperature: Float[Array, ""],
        *,
        num_samples: int,
        max_new_tokens: int,
        is_greedy: bool,
    ) -> tuple[Array, Array, Array, Array]:
        self._programs.add((prompts.shape, num_samples, max_new_tokens, is_greedy))
        config, dtype = self.config, self.compute_dtype
        p, k, t = prompts.shape[0], num_samples, max_new_tokens
        if is_greedy:
            uniforms = jnp.zeros((t, 1, 1))
        else:
            key = jax.random.wrap_key_data(key_data)
            uniforms = row_uniforms(key, first_row, p * k, t).reshape(t, p, k)

        def draw(hidden: Float[Array, "p k d"], step: Int[Array, ""]) -> tuple[Array, Array]:
            logits = transformer.unembed(params, hidden, config=config, compute_dtype=dtype)
            if is_greedy:
                return greedy_tokens(logits)
            return sample_tokens(logits, uniforms[step], temperature)

        def record(state: _State, tokens: Array, logprobs: Array) -> _State:
            tokens = jnp.where(state.is_done, self.pad_id, tokens)
            logprobs = jnp.where(state.is_done, 0.0, logprobs)
            is_eos = functools.reduce(
                jnp.logical_or, [tokens == i for i in self.eos_ids], jnp.zeros((p, k), bool)
            )
            return state._replace(
                step=state.step + 1,
                last=tokens,
                tokens=state.tokens.at[state.step].set(tokens),
                logprobs=state.logprobs.at[state.step].set(logprobs),
                lengths=state.lengths + ~state.is_done,
                is_done=state.is_done | is_eos,
            )

        hidden, prompt_cache, prompt_mask = _prefill(
            params, prompts, prompt_lengths, config=config, compute_dtype=dtype
        )
        state = _State(
            step=jnp.int32(0),
            last=jnp.zeros((p, k), jnp.int32),
            tokens=jnp.full((t, p, k), self.pad_id, jnp.int32),
            logprobs=jnp.zeros((t, p, k), jnp.float32),
            lengths=jnp.zeros((p, k), jnp.int32),
            is_done=jnp.broadcast_to(prompt_lengths[:, None] == 0, (p, k)),
            cache=transformer.init_decode_cache(config, p, k, t, dtype),
        )
        first = jnp.broadcast_to(hidden[:, None], (p, k, hidden.shape[-1]))
        state = record(state, *draw(first, state.step))
        layers = transformer.unstack_layers(params, config)

        def body(state: _State) -> _State:
            # The token drawn last, number step - 1 of the response, is what the model reads now.
            index = state.step - 1
            hidden, cache = transformer.decode_step(
                params,
                layers,
                state.last,
                jnp.broadcast_to((prompt_lengths + index)[:, None], (p, k)),
                prompt_cache,
                prompt_mask,
                state.cache,
                index,
                config=config,
                compute_dtype=dtype,
            )
            return record(state._replace(cache=cache), *draw(hidden, state.step))

        state = jax.lax.while_loop(
            lambda state: (state.step < t) & ~jnp.all(state.is_done), body, state
        )
        return (
            jnp.moveaxis(state.tokens, 0, -1),
            state.lengths,
            jnp.moveaxis(state.logprobs, 0, -1),
            state.is_done,
        )


def _prefill(
    params: Params,
    prompts: Int[Array, "p c"],
    prompt_lengths: Int[Array, " p"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
) -> tuple[Float[Array, "p d"], tuple[KVCache, ...], Bool[Array, "p c"]]:
    """(hidden state of each prompt's last token, keys and values per layer, valid slots)."""
    p, c = prompts.shape
    padding = (c - prompt_lengths)[:, None]
    slots = jnp.arange(c)[None, :]
    mask = slots >= padding
    hidden, cache = transformer.apply(
        params,
        prompts,
        jnp.maximum(slots - padding, 0),
        mask,
        config=config,
        compute_dtype=compute_dtype,
        cache=transformer.init_cache(config, p, c, compute_dtype),
        cache_start=0,
    )
    assert cache is not None
    layers = tuple(KVCache(cache.keys[i], cache.values[i]) for i in range(config.num_layers))
    return hidden[:, -1], layers, mask
