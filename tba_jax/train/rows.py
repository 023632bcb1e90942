# SPDX-License-Identifier: Apache-2.0
"""A batch as padded or packed rows, any number of which can be scored at a time.

Invariant: the responses that an objective receives do not depend on the layout.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.models import lora
from tba_jax.models.logprobs import (
    Readout,
    packed_token_logprobs,
    response_mask,
    row_token_logprobs,
)
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig
from tba_jax.train.heads import LogZHead, read_out
from tba_jax.train.objectives.base import GroupData, Totals


class Tokens(NamedTuple):
    """Data of every token, as n rows [n *r t]; 0 and False outside responses.

    Packed rows have no axis r: their responses follow each other along t. In padded rows, r is the
    axis of a row's c responses.

    Attributes:
        slots: int32, index of the response of each token, [n c 1] in padded rows; 0 at padding.
        counted: bool, tokens that count in log pi(y|x).
        behavior: log-probs of the sampler.
        begins: bool, first token of each response; None in padded rows.
        reference: log-probs of the reference; None unless the trainer scores it.
        start_values: learned state values under the policy at the start of the step, if the step
            makes several updates.
        advantages: advantages that the searcher computed, or None.
        places: int32, index of each token within its episode; None if no episode forks.
    """

    slots: Array
    counted: Array
    behavior: Array
    begins: Array | None = None
    reference: Array | None = None
    start_values: Array | None = None
    advantages: Array | None = None
    places: Array | None = None


class Responses(NamedTuple):
    """Data of every response of a batch, [p k] each; 0 in empty slots.

    Attributes:
        reference_logprob: sum over the counted tokens.
        reward: raw reward.
        weight: number of draws of the response.
        length: number of tokens.
        staleness: int32, steps since the version that drew the response; 0 if no version drew it.
    """

    reference_logprob: Array
    reward: Array
    weight: Array
    length: Array
    staleness: Array


Inputs = tuple[Array, ...]
"""Input of `Rows.score`: tokens, lengths and masks of n rows, by layout."""


class Rows(NamedTuple):
    """A batch as n rows.

    Attributes:
        inputs: the input of `score`.
        score: (params, inputs of m rows) -> log-prob of every response token, as in `tokens`.
        score_values: ((params, head), inputs of m rows) -> log-prob and, second on the last axis,
            the head's value of the state before each token.
        tokens: data of all tokens.
        is_current: bool, broadcastable to [n *r t], whether the trained version drew the response.
        responses: data of all responses.
    """

    inputs: Inputs
    score: Callable[[Any, Inputs], Array]
    score_values: Callable[[Any, Inputs], Array]
    tokens: Tokens
    is_current: Array
    responses: Responses

    def sums(self, values: Float[Array, "n *r t"]) -> Float[Array, "p k"]:
        """Return the sum over each response."""
        return _sums(values, self.tokens, self.responses.weight.shape)

    def of_first_prompt(self, values: Float[Array, "n *r t"]) -> Float[Array, "k t"]:
        """Return the values of the tokens of each response to the first prompt of the batch."""
        return _by_response(values, tokens=self.tokens, length=self.responses.length[:1])[0]

    def is_here(self, tokens: Tokens) -> Bool[Array, "p k"]:
        """Return a mask of the responses that are in the rows of `tokens`."""
        shape = self.responses.weight.shape
        return _sums((tokens.slots > 0).astype(jnp.int32), tokens, shape) > 0

    def totals(self) -> Totals:
        """Return the totals of the whole batch."""
        weight = self.responses.weight
        counted = self.sums(self.tokens.counted.astype(jnp.float32))
        # Count only prompts with responses: slots may be empty.
        prompts = jnp.sum(jnp.any(weight > 0, axis=1).astype(jnp.float32))
        return Totals(prompts, jnp.sum(weight), jnp.sum(counted * weight))

    def group_data(
        self,
        policy: Float[Array, "m *r t"],
        values: Float[Array, "m *r t"] | None,
        tokens: Tokens,
        totals: Totals,
    ) -> GroupData:
        """Return the data of some rows for an objective; responses in other rows have weight 0.

        Args:
            policy: the policy's log-prob of every token.
            values: learned values of the state before each token; None without a value head.
            tokens: data of the same rows: all rows, or the rows of some groups.
            totals: totals of the whole batch.
        """
        shape = self.responses.weight.shape
        is_here = self.is_here(tokens)
        by_response = functools.partial(_by_response, tokens=tokens, length=self.responses.length)
        here = jax.tree.map(lambda x: jnp.where(is_here, x, jnp.zeros_like(x)), self.responses)
        reference, start_values = tokens.reference, tokens.start_values
        advantages = tokens.advantages
        return GroupData(
            policy_logprob=_sums(policy * tokens.counted, tokens, shape),
            policy_token_logprobs=by_response(policy),
            behavior_token_logprobs=by_response(tokens.behavior),
            reference_logprob=here.reference_logprob,
            reference_token_logprobs=None if reference is None else by_response(reference),
            mask=by_response(tokens.counted.astype(jnp.float32)) > 0,
            reward=here.reward,
            weight=here.weight,
            length=here.length,
            staleness=here.staleness,
            log_z=None,
            totals=totals,
            token_values=None if values is None else by_response(values),
            token_advantages=None if advantages is None else by_response(advantages),
            start_values=None if start_values is None else by_response(start_values),
        )


def num_valid_tokens(batch: Batch | PackedBatch) -> Array:
    """Return the number of tokens without padding; a prompt counts once for each row with it."""
    if isinstance(batch, PackedBatch):
        return jnp.sum(batch.slots > 0)
    of_prompts = _of_rows(batch.prompt_lengths, batch.slots[:, 0])
    return jnp.sum(of_prompts) + jnp.sum(batch.response_lengths)


def _sums(values: Float[Array, "m *r t"], tokens: Tokens, shape: tuple[int, ...]) -> Array:
    """Return [p k], the sum over each response in these rows; 0 for responses in other rows."""
    if tokens.begins is None:
        values = jnp.sum(values, axis=-1, keepdims=True)
    sums = jax.ops.segment_sum(values.reshape(-1), tokens.slots.reshape(-1), math.prod(shape) + 1)
    return sums[1:].reshape(shape)


def _by_response(values: Array, *, tokens: Tokens, length: Array) -> Array:
    """Convert [m *r t] to [p k t]: the tokens of each response in these rows, left-aligned."""
    t = values.shape[-1]
    if tokens.places is not None:
        index = (tokens.slots * t + tokens.places).reshape(-1)
        found = jax.ops.segment_sum(values.reshape(-1), index, (length.size + 1) * t)
        return found[t:].reshape(*length.shape, t)
    if tokens.begins is None:
        slots = tokens.slots.reshape(-1)
        found = jax.ops.segment_sum(values.reshape(-1, t), slots, length.size + 1)
        return found[1:].reshape(*length.shape, t)
    place = jnp.arange(values.size, dtype=jnp.int32).reshape(values.shape)
    # Add 1: 0 then marks responses in other rows.
    first = _sums(jnp.where(tokens.begins, place + 1, 0), tokens, length.shape)[..., None]
    index = jnp.arange(t)[None, None]
    found = jnp.take(values.reshape(-1), first - 1 + index, mode="clip")
    inside = (first > 0) & (index < length[..., None])
    return jnp.where(inside, found, jnp.zeros_like(found))


def make_rows(
    batch: Batch | PackedBatch,
    step: Array,
    config: TransformerConfig,
    scoring: Scoring,
    remat: Remat,
    sharding: ComputeSharding | None,
    base: Any,
) -> Rows:
    """Return a batch as rows.

    Args:
        batch: batch on the device.
        step: version that is trained.
        config, scoring, remat, sharding: as in `token_logprobs`.
        base: frozen parameters that the adapters extend; None: `score` takes all parameters.
    """
    options: Any = {"config": config, "scoring": scoring, "remat": remat, "sharding": sharding}
    if isinstance(batch, PackedBatch):
        rows, score = _packed_rows(batch, step, scoring, options)
    else:
        rows, score = _padded_rows(batch, step, scoring, options)

    def score_values(trained: tuple[Any, LogZHead], x: Any) -> Array:
        params, head = trained
        return score(all_params(base, params), x, functools.partial(read_out, head))

    return rows._replace(
        score=lambda params, x: score(all_params(base, params), x, None), score_values=score_values
    )


def all_params(base: Any, params: Any) -> Any:
    """Return all parameters: the trained parameters, or the frozen ones with their adapters."""
    return params if base is None else lora.combine(base, params)


def _responses(batch: Batch | PackedBatch, step: Array) -> Responses:
    staleness = jnp.where(batch.versions < 0, 0, step - batch.versions)
    return Responses(
        batch.reference_logprob,
        batch.rewards,
        batch.weights,
        batch.response_lengths,
        staleness,
    )


def _of_rows(values: Array, slots: Array) -> Array:
    """Return the entry of `values` [p k] at each slot index; 0 at padding."""
    found = values.reshape(-1)[jnp.maximum(slots - 1, 0)]
    return jnp.where(slots > 0, found, jnp.zeros_like(found))


Score = Callable[[Any, Any, Readout | None], Array]
"""(parameters, inputs of some rows, readout of the states) -> result of the readout."""


def _unscored(params: Any, inputs: Any) -> Array:
    """Raise an error: placeholder for `score` until `make_rows` sets it."""
    raise AssertionError("make_rows sets score")


def _padded_rows(batch: Batch, step: Array, scoring: Scoring, options: Any) -> tuple[Rows, Score]:
    c, t = batch.behavior_token_logprobs.shape[1:]
    slots, is_sampled = batch.slots, batch.is_sampled
    response_lengths = batch.path_lengths
    if response_lengths is None:
        response_lengths = _of_rows(batch.response_lengths, slots)
    is_current = (slots > 0) & (_of_rows(batch.versions, slots) == step)
    responses = batch.tokens[:, -c * t :].reshape(-1, c, t)
    options = options | {"response_bucket": t}

    def score(params: Any, inputs: Inputs, readout: Readout | None) -> Array:
        found = row_token_logprobs(params, *inputs[:3], **options, readout=readout)
        return found if is_sampled is None else _only(inputs[3], found)

    rows = Rows(
        inputs=(
            batch.tokens,
            _of_rows(batch.prompt_lengths, slots[:, 0]),
            response_lengths,
            *(() if is_sampled is None else (is_sampled,)),
        ),
        score=_unscored,
        score_values=_unscored,
        tokens=Tokens(
            slots[..., None],
            response_mask(responses, response_lengths, scoring, is_sampled),
            batch.behavior_token_logprobs,
            advantages=batch.token_advantages,
            places=batch.places,
        ),
        is_current=is_current[..., None],
        responses=_responses(batch, step),
    )
    return rows, score


def _only(is_scored: Array, found: Array) -> Array:
    """Return `found` with 0 at unscored tokens; `found` may have a last axis in addition."""
    is_scored = is_scored if found.ndim == is_scored.ndim else is_scored[..., None]
    return jnp.where(is_scored, found, 0.0)


def _packed_rows(
    batch: PackedBatch, step: Array, scoring: Scoring, options: Any
) -> tuple[Rows, Score]:
    prompt_lengths = _of_rows(batch.prompt_lengths, batch.slots)
    is_response = (batch.slots > 0) & (batch.positions >= prompt_lengths)
    is_scored = is_response if batch.is_sampled is None else is_response & batch.is_sampled
    counted = is_scored
    if scoring.mask_eos:
        counted = counted & ~jnp.isin(batch.tokens, jnp.array(scoring.eos_ids, jnp.int32))

    # The paths of an episode share one slot, and do not attend to each other.
    sequences = batch.slots
    if batch.paths is not None:
        sequences = sequences + batch.paths * (batch.weights.size + 1)

    shared = ()
    if batch.contexts is not None:
        shared = batch.contexts, (batch.slots > 0) & ~is_response

    def score(params: Any, inputs: Inputs, readout: Readout | None) -> Array:
        *rows, is_scored = inputs
        found = packed_token_logprobs(params, *rows, **options, readout=readout)
        return _only(is_scored, found)

    rows = Rows(
        inputs=(batch.tokens, sequences, batch.positions, *shared, is_scored),
        score=_unscored,
        score_values=_unscored,
        tokens=Tokens(
            batch.slots,
            counted,
            batch.behavior_token_logprobs,
            begins=is_response & (batch.positions == prompt_lengths),
            advantages=batch.token_advantages,
            places=batch.places,
        ),
        is_current=is_response & (_of_rows(batch.versions, batch.slots) == step),
        responses=_responses(batch, step),
    )
    return rows, score
