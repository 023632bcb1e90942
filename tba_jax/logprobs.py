# SPDX-License-Identifier: Apache-2.0
"""Token log-probs of given responses: the one definition used for policy and reference.

The log-softmax is float32, over the full vocabulary, of logits divided by the sampling temperature,
at every response token including the end-of-sequence token (design: log-probabilities have one
definition). Logits exist for `chunk_tokens` tokens at a time, in the forward and in the backward
pass. This module does not know who sampled the responses or what loss follows.
"""

from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tba_jax.models.transformer import TransformerConfig, apply, unembed


def response_mask(
    response_tokens: Int[Array, "p k t"],
    response_lengths: Int[Array, "p k"],
    *,
    eos_ids: tuple[int, ...],
    mask_eos: bool,
) -> Bool[Array, "p k t"]:
    """Which positions count in log pi(y|x): all tokens of the response, EOS included.

    Args:
        response_tokens: right-padded responses.
        response_lengths: tokens, EOS included.
        eos_ids: end-of-sequence ids of the tokenizer.
        mask_eos: leave the EOS out, as the official GSM8K code does (its tokenizer pads with EOS).
    """
    t = response_tokens.shape[-1]
    mask = jnp.arange(t)[None, None] < response_lengths[..., None]
    if mask_eos:
        is_eos = jnp.isin(response_tokens, jnp.array(eos_ids, jnp.int32))
        mask = mask & ~is_eos
    return mask


def _chunked_logprobs(
    params: Any,
    hidden: Float[Array, "n d"],
    targets: Int[Array, " n"],
    *,
    config: TransformerConfig,
    temperature: float,
    compute_dtype: jnp.dtype,
    chunk_tokens: int,
) -> Float[Array, " n"]:
    """log softmax(unembed(hidden) / temperature)[targets], logits of one chunk alive at a time."""
    n, d = hidden.shape
    num_chunks = -(-n // chunk_tokens)
    size = -(-n // num_chunks)
    padding = num_chunks * size - n
    hidden = jnp.pad(hidden, ((0, padding), (0, 0))).reshape(num_chunks, size, d)
    targets = jnp.pad(targets, (0, padding)).reshape(num_chunks, size)

    # checkpoint: the backward pass recomputes a chunk's logits instead of keeping all of them.
    @jax.checkpoint
    def chunk(hidden: Float[Array, "c d"], targets: Int[Array, " c"]) -> Float[Array, " c"]:
        logits = unembed(params, hidden, config=config, compute_dtype=compute_dtype) / temperature
        chosen = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
        return chosen - jax.nn.logsumexp(logits, axis=-1)

    if num_chunks == 1:
        return chunk(hidden[0], targets[0])[:n]
    _, out = jax.lax.scan(lambda _, xs: (None, chunk(*xs)), None, (hidden, targets))
    return out.reshape(-1)[:n]


def token_logprobs(
    params: Any,
    tokens: Int[Array, "p k s"],
    prompt_lengths: Int[Array, "p k"],
    response_lengths: Int[Array, "p k"],
    *,
    response_bucket: int,
    config: TransformerConfig,
    temperature: float,
    compute_dtype: Any = jnp.float32,
    chunk_tokens: int = 1024,
    remat: bool = False,
) -> Float[Array, "p k t"]:
    """log pi(y_t | x, y_<t) of every response token, float32, 0 at padding.

    Args:
        params: model parameters; gradients flow here.
        tokens: prompt left-padded to s - t, response right-padded to t, as `Batch.tokens`.
        prompt_lengths: prompt tokens without padding.
        response_lengths: response tokens, EOS included.
        response_bucket: t, static.
        config: model shape.
        temperature: the sampling temperature; divides the logits.
        compute_dtype: matmul input type; the log-softmax is float32 whatever it is.
        chunk_tokens: most tokens whose [., v] logits exist at a time.
        remat: recompute each layer in the backward pass instead of keeping its activations.

    References:
        TBA, arXiv:2503.18929, section 3.2 and table 2 (temperature).
    """
    p, k, s = tokens.shape
    t = response_bucket
    rows = tokens.reshape(p * k, s)
    index = jnp.arange(s)[None]
    first = (s - t - prompt_lengths).reshape(p * k, 1)
    end = (s - t + response_lengths).reshape(p * k, 1)
    mask = (index >= first) & (index < end)
    positions = jnp.maximum(index - first, 0)
    hidden = apply(
        params, rows, positions, mask, config=config, compute_dtype=compute_dtype, remat=remat
    )
    # The state at position i predicts token i + 1.
    hidden = jax.lax.slice_in_dim(hidden, s - t - 1, s - 1, axis=1)
    logprobs = _chunked_logprobs(
        params,
        hidden.reshape(p * k * t, -1),
        rows[:, s - t :].reshape(-1),
        config=config,
        temperature=temperature,
        compute_dtype=compute_dtype,
        chunk_tokens=chunk_tokens,
    )
    in_response = jnp.arange(t)[None, None] < response_lengths[..., None]
    return jnp.where(in_response, logprobs.reshape(p, k, t), 0.0)
