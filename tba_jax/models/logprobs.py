# SPDX-License-Identifier: Apache-2.0
"""Token log-probs of given responses, with one definition for policy and reference.

The log-prob of a response token, end-of-sequence included, is the float32 log-softmax over the full
vocabulary of logits divided by the sampling temperature. `fused_logprobs` computes logits for one
block of the vocabulary at a time, unless the logits are small.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from tba_jax.models import attention, shared_prompts
from tba_jax.models.fused_logprobs import fused_logprobs
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig, apply

Readout = Callable[[Float[Array, "n t d"]], Float[Array, "n t"]]
"""Returns a number per state. Functions with a readout return, on a last axis, log-probs and the
readout of the state that predicts each token."""
KEPT_BYTES = 256 * 2**20
"""Size of four blocks for 8,192 tokens: small compared to the activations of a model on an
accelerator, and enough for a micro-batch on a CPU. On CPU, two more arrays of that size exist for a
while."""


@dataclasses.dataclass(frozen=True)
class Scoring:
    """Definition of log pi(y|x), and options of its computation.

    Invariant: the same `Scoring` and the same weights give the same log-probs everywhere.

    Attributes:
        temperature: sampling temperature, which divides the logits.
        eos_ids: end-of-sequence IDs; used if `min_new_tokens` > 0.
        min_new_tokens: minimum length of a response. Earlier, `eos_ids` have probability 0, as in
            decoding, and the probabilities of the other tokens are renormalised.
        kept_bytes: logits up to this size, over all devices, are kept for the backward pass instead
            of recomputed.
        compute_dtype: name of the matmul input dtype; the log-softmax is always float32.
    """

    temperature: float = 1.0
    eos_ids: tuple[int, ...] = ()
    min_new_tokens: int = 0
    kept_bytes: int = KEPT_BYTES
    compute_dtype: str = "float32"


def row_token_logprobs(
    params: Any,
    tokens: Int[Array, "b s"],
    prompt_lengths: Int[Array, " b"],
    response_lengths: Int[Array, "b c"],
    *,
    response_bucket: int,
    scoring: Scoring,
    **options: Any,
) -> Float[Array, "b c t *both"]:
    """Return log pi(y_t | x, y_<t) of c responses per prompt; for c > 1 a prompt is computed once.

    Args:
        params: model parameters; gradients flow here.
        tokens: prompt left-padded to s - c t, then c responses right-padded to t, as
            `Batch.tokens`.
        prompt_lengths: prompt tokens without padding.
        response_lengths: response tokens, EOS included; 0 for no response.
        response_bucket: t, static.
        scoring: temperature, minimum length, dtypes.
        options: as in `_logprobs`.

    Raises:
        ValueError: the model is a classifier.

    References:
        TBA, arXiv:2503.18929, section 3.2 and table 2 (temperature).
    """
    (b, c), t, s = response_lengths.shape, response_bucket, tokens.shape[1]
    x = s - c * t
    # Padding rows get a prompt of one token.
    start = x - jnp.maximum(prompt_lengths, 1)[:, None]
    index, of_response = jnp.arange(s)[None], jnp.arange(t)[None]
    behind = jnp.where(index < x, index, x + (index - x) % t)
    visible: Any = shared_prompts.Rows((index >= start)[:, :x], c)
    if c == 1:  # one softmax
        visible = attention.causal((index >= start) & (index < x + response_lengths))

    def predictors(hidden: Array) -> Array:
        # The state at position i predicts token i + 1; the last state of the prompt predicts the
        # first token of every response.
        states = hidden[:, x:].reshape(b, c, t, -1)
        first = jnp.broadcast_to(hidden[:, None, x - 1, None], (b, c, 1, states.shape[-1]))
        return jnp.concatenate([first, states[:, :, :-1]], axis=2).reshape(b * c, t, -1)

    found = _logprobs(
        params,
        (tokens, jnp.maximum(behind - start, 0), visible),
        predictors,
        tokens[:, x:].reshape(b * c, t),
        of_response < response_lengths.reshape(b * c, 1),
        scoring=scoring,
        **options,
    )
    return found.reshape(b, c, *found.shape[1:])


def packed_token_logprobs(
    params: Any,
    tokens: Int[Array, "n s"],
    segments: Int[Array, "n s"],
    positions: Int[Array, "n s"],
    *shared: Array,
    **options: Any,
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
        options: as in `_logprobs`; `scoring` without a minimum length.

    Raises:
        ValueError: as `row_token_logprobs`.
    """

    def predictors(hidden: Array) -> Array:
        if not shared:
            return jnp.concatenate([hidden[:, :1], hidden[:, :-1]], axis=1)
        # The last token of the prompt predicts the first of a response.
        is_prompt, index = shared[1], jnp.broadcast_to(jnp.arange(segments.shape[1]), tokens.shape)
        last_of_prompt = jax.lax.cummax(jnp.where(is_prompt, index, 0), axis=1)
        goes_on = is_prompt | (segments == jnp.roll(segments, 1, axis=1))
        before = jnp.where(goes_on, jnp.maximum(index - 1, 0), last_of_prompt)
        return jnp.take_along_axis(hidden, before[..., None], axis=1)

    inputs = tokens, positions, attention.packed(segments, *shared)
    return _logprobs(params, inputs, predictors, tokens, positions > 0, **options)


def _logprobs(
    params: Any,
    inputs: tuple[Array, Array, Any],
    predictors: Callable[[Float[Array, "b s d"]], Float[Array, "n t d"]],
    targets: Int[Array, "n t"],
    is_scored: Bool[Array, "n t"],
    *,
    config: TransformerConfig,
    scoring: Scoring,
    remat: Remat = "none",
    sharding: ComputeSharding | None = None,
    readout: Readout | None = None,
) -> Float[Array, "n t *both"]:
    """Return the log-probs of tokens; 0 where `is_scored` is False.

    Args:
        inputs: tokens, positions and visibility of rows, as in `transformer.apply`.
        predictors: hidden states of the rows -> the state that predicts each target.
        targets: the tokens. Before `scoring.min_new_tokens` of them, end-of-sequence tokens have
            probability 0.
        remat: what the backward pass recomputes.
        sharding: use of parameters that are divided over a mesh; None: one device.
        readout: function of the hidden states, evaluated besides the log-probs; None: no function.
    """
    dtype, table = jnp.dtype(scoring.compute_dtype), config.output_table
    params = params if sharding is None else sharding.ends(params, dtype)
    how: Any = {"compute_dtype": dtype, "remat": remat, "sharding": sharding}
    states = predictors(apply(params, *inputs, config=config, **how))
    excluded = None
    if scoring.min_new_tokens:
        is_short = jnp.arange(targets.shape[1])[None] < scoring.min_new_tokens
        excluded = scoring.eos_ids, jnp.broadcast_to(is_short, targets.shape)
    logprobs = fused_logprobs(
        states.astype(dtype),
        params[table],
        targets,
        temperature=scoring.temperature,
        vocab_shards=1 if sharding is None else sharding.vocab_shards,
        kept_bytes=scoring.kept_bytes,
        cap=config.logits_cap,
        num_tokens=config.num_tokens,
        excluded=excluded,
    )
    if readout is None:
        return jnp.where(is_scored, logprobs, 0.0)
    both = jnp.stack([logprobs, readout(states)], axis=-1)
    return jnp.where(is_scored[..., None], both, 0.0)
