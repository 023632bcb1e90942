# SPDX-License-Identifier: Apache-2.0
"""Token log-probs of given responses, with one definition for policy and reference.

The log-prob of a response token, end-of-sequence included, is the float32 log-softmax over the full
vocabulary of logits divided by the sampling temperature. `fused_logprobs` computes logits for one
block of the vocabulary at a time, unless the logits are small.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tba_jax.models import attention, shared_prompts
from tba_jax.models.fused_logprobs import fused_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig, apply

Readout = Callable[[Float[Array, "n t d"]], Float[Array, "n t"]]
"""Returns a number per state. Functions with a readout return, on a last axis, log-probs and the
readout of the state that predicts each token."""


def token_logprobs(
    params: Any,
    tokens: Int[Array, "p k s"],
    prompt_lengths: Int[Array, "p k"],
    response_lengths: Int[Array, "p k"],
    *,
    response_bucket: int,
    **kwargs: Any,
) -> Float[Array, "p k t *both"]:
    """Return log pi(y_t | x, y_<t) of every response token, float32, 0 at padding.

    Args:
        params: model parameters; gradients flow here.
        tokens: prompt left-padded to s - t, response right-padded to t, as `Batch.tokens`.
        prompt_lengths: prompt tokens without padding.
        response_lengths: response tokens, EOS included.
        response_bucket: t, static.
        kwargs: as in `row_token_logprobs`.
    """
    p, k, s = tokens.shape
    found = row_token_logprobs(
        params,
        tokens.reshape(p * k, s),
        prompt_lengths.reshape(p * k),
        response_lengths.reshape(p * k, 1),
        response_bucket=response_bucket,
        **kwargs,
    )
    return found.reshape(p, k, response_bucket, *found.shape[3:])


def row_token_logprobs(
    params: Any,
    tokens: Int[Array, "b s"],
    prompt_lengths: Int[Array, " b"],
    response_lengths: Int[Array, "b c"],
    *,
    response_bucket: int,
    config: TransformerConfig,
    scoring: Scoring,
    remat: Remat = "none",
    sharding: ComputeSharding | None = None,
    readout: Readout | None = None,
) -> Float[Array, "b c t *both"]:
    """Return log pi(y_t | x, y_<t) of c responses per prompt; for c > 1 a prompt is computed once.

    Args:
        params: model parameters; gradients flow here.
        tokens: prompt left-padded to s - c t, then c responses right-padded to t, as
            `Batch.tokens`.
        prompt_lengths: prompt tokens without padding.
        response_lengths: response tokens, EOS included; 0 for no response.
        response_bucket: t, static.
        config: model shape.
        scoring: temperature, minimum length, dtypes.
        remat: what the backward pass recomputes.
        sharding: use of parameters that are divided over a mesh; None: one device.
        readout: function of the hidden states, evaluated besides the log-probs; None: no function.

    Raises:
        ValueError: the model is a classifier, or `fused_logprobs` refuses a size.

    References:
        TBA, arXiv:2503.18929, section 3.2 and table 2 (temperature).
    """
    _refuse_classifier(config)
    (b, c), t, s = response_lengths.shape, response_bucket, tokens.shape[1]
    prompt, compute_dtype = s - c * t, jnp.dtype(scoring.compute_dtype)
    if sharding is not None:
        params = sharding.ends(params, compute_dtype)
    how: Any = {
        "config": config,
        "compute_dtype": compute_dtype,
        "remat": remat,
        "sharding": sharding,
    }
    responses = tokens[:, prompt:].reshape(b, c, t)
    if c == 1:  # one stream with one softmax
        index, first = jnp.arange(s)[None], prompt - prompt_lengths[:, None]
        mask = (index >= first) & (index < prompt + response_lengths)
        hidden = apply(params, tokens, jnp.maximum(index - first, 0), mask, **how)
        # The state at position i predicts token i + 1.
        hidden = jax.lax.slice_in_dim(hidden, prompt - 1, s - 1, axis=1)
    else:
        # Padding rows get a prompt of one token.
        lengths = jnp.maximum(prompt_lengths, 1)
        end, hidden = shared_prompts.apply(params, tokens[:, :prompt], responses, lengths, **how)
        # The last state of the prompt predicts the first token of every response.
        first = jnp.broadcast_to(end[:, None, None], (b, c, 1, hidden.shape[-1]))
        hidden = jnp.concatenate([first, hidden[:, :, :-1]], axis=2).reshape(b * c, t, -1)
    targets = responses.reshape(b * c, t)
    logprobs = _response_logprobs(params, hidden, targets, config, scoring, sharding)
    in_response = jnp.arange(t)[None, None] < response_lengths[..., None]
    return _with_readout(logprobs.reshape(b, c, t), hidden, in_response, readout)


def _with_readout(
    logprobs: Float[Array, "*n"], states: Array, is_scored: Array, readout: Readout | None
) -> Array:
    """Return log-probs, stacked with the readout on a last axis; 0 at unscored tokens."""
    if readout is None:
        return jnp.where(is_scored, logprobs, 0.0)
    both = jnp.stack([logprobs, readout(states).reshape(logprobs.shape)], axis=-1)
    return jnp.where(is_scored[..., None], both, 0.0)


def _of_tokens(
    params: Any,
    states: Float[Array, "n t d"],
    targets: Int[Array, "n t"],
    config: TransformerConfig,
    scoring: Scoring,
    sharding: ComputeSharding | None,
) -> Float[Array, "n t"]:
    """Return log-probs of tokens from the states that predict the tokens."""
    return fused_logprobs(
        states.astype(scoring.compute_dtype),
        params[config.output_table],
        targets,
        temperature=scoring.temperature,
        vocab_shards=1 if sharding is None else sharding.vocab_shards,
        kept_bytes=scoring.kept_bytes,
        cap=config.logits_cap,
        num_tokens=config.num_tokens,
    )


def _response_logprobs(
    params: Any,
    hidden: Float[Array, "n t d"],
    targets: Int[Array, "n t"],
    config: TransformerConfig,
    scoring: Scoring,
    sharding: ComputeSharding | None,
) -> Float[Array, "n t"]:
    """Return log-probs of response tokens, with EOS excluded below the minimum length."""
    how = config, scoring, sharding
    logprobs = _of_tokens(params, hidden, targets, *how)
    if num_endless := min(scoring.min_new_tokens, targets.shape[1]):
        states = hidden[:, :num_endless]
        ends = [
            _of_tokens(params, states, jnp.full(states.shape[:2], i, jnp.int32), *how)
            for i in scoring.eos_ids
        ]
        end_prob = jnp.sum(jnp.exp(jnp.stack(ends)), axis=0)
        # Limit the probability of EOS to a float32 step below 1, so that log-probs stay finite.
        others = jnp.log(jnp.maximum(1.0 - end_prob, 2.0**-24))
        logprobs = logprobs.at[:, :num_endless].add(-others)
    return logprobs


def packed_token_logprobs(
    params: Any,
    tokens: Int[Array, "n s"],
    segments: Int[Array, "n s"],
    positions: Int[Array, "n s"],
    *shared: Array,
    config: TransformerConfig,
    scoring: Scoring,
    remat: Remat = "none",
    sharding: ComputeSharding | None = None,
    readout: Readout | None = None,
) -> Float[Array, "n s *both"]:
    """Return log pi of every token given the tokens before it in its own sequence, float32.

    The result is 0 at the first token of a sequence and at padding. Prompts are scored, too,
    because the position of responses differs from row to row.

    Args:
        params: model parameters; gradients flow here.
        tokens: rows of several sequences, as `PackedBatch.tokens`.
        segments: index of each position's sequence; 0 at padding.
        positions: position in the sequence.
        shared: empty; or, if responses follow one copy of their prompt, `PackedBatch.contexts` and
            which positions are prompts; [n s] each.
        config, scoring, remat, sharding, readout: as in `row_token_logprobs`; without a minimum
            length.

    Raises:
        ValueError: as `row_token_logprobs`.
    """
    _refuse_classifier(config)
    contexts, is_prompt = shared or (None, None)
    compute_dtype = jnp.dtype(scoring.compute_dtype)
    if sharding is not None:
        params = sharding.ends(params, compute_dtype)
    hidden = apply(
        params,
        tokens,
        positions,
        segments > 0,
        visible=attention.packed(segments, contexts, is_prompt),
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
        sharding=sharding,
    )
    if is_prompt is None:
        states = hidden[:, :-1]
    else:
        before = _predictors(segments, is_prompt)
        states = jnp.take_along_axis(hidden, before[:, 1:, None], axis=1)
    logprobs = _of_tokens(params, states, tokens[:, 1:], config, scoring, sharding)
    # No state predicts the first token of a row.
    first = ((0, 0), (1, 0))
    states = jnp.pad(states, (*first, (0, 0))) if readout is not None else states
    return _with_readout(jnp.pad(logprobs, first), states, positions > 0, readout)


def _predictors(segments: Int[Array, "n s"], is_prompt: Bool[Array, "n s"]) -> Int[Array, "n s"]:
    """Return the position whose state predicts each token: the previous, or the prompt's last."""
    index = jnp.broadcast_to(jnp.arange(segments.shape[1]), segments.shape)
    goes_on = segments == jnp.roll(segments, 1, axis=1)
    last_of_prompt = jax.lax.cummax(jnp.where(is_prompt, index, 0), axis=1)
    return jnp.where(goes_on | is_prompt, jnp.maximum(index - 1, 0), last_of_prompt)


def _refuse_classifier(config: TransformerConfig) -> None:
    if config.num_labels:
        raise ValueError(
            f"a classifier with {config.num_labels} labels has no log-probs of tokens. Load a "
            "language model"
        )
