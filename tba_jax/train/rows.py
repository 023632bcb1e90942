# SPDX-License-Identifier: Apache-2.0
"""A batch as rows that can be scored in any number at a time, padded or packed.

It knows how batches are laid out and the one definition of log-probs, not what is minimised. The
invariant it owns: what an objective is shown of the responses does not depend on the layout.
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
    """What is known of every token, as n rows [n *r t]; 0 and False outside responses.

    Packed rows have no axis r: responses lie side by side along t. Of padded rows it is that of
    the c responses of a row.

    Attributes:
        slots: int32, the response of each token, [n c 1] in padded rows; 0 at padding.
        counted: bool, the tokens that count in log pi(y|x).
        behavior: log-probs of the sampler.
        begins: bool, the first token of each response; None in padded rows.
        reference: log-probs of the reference, where the trainer scores it.
        advantages: that came with the responses; None: none did.
        start_values: learned values of the states before them, of the policy that the step began
            with, where it makes several updates.
    """

    slots: Array
    counted: Array
    behavior: Array
    begins: Array | None = None
    reference: Array | None = None
    start_values: Array | None = None
    advantages: Array | None = None


class Responses(NamedTuple):
    """What is known of every response of a batch, [p k] each; 0 at empty places.

    Attributes:
        reference_logprob: summed over the tokens that count.
        reward: raw.
        weight: how often it was drawn.
        length: its tokens.
        staleness: int32, steps since the version that drew it; 0 where no version did.
        soft_value: of its prompt, nan where none is known; None unless a cached log Z reads it.
    """

    reference_logprob: Array
    reward: Array
    weight: Array
    length: Array
    staleness: Array
    soft_value: Array | None = None


class Rows(NamedTuple):
    """A batch as n rows.

    Attributes:
        inputs: arrays of n rows each, what `score` reads.
        score: (params, some rows of inputs) -> log-prob of every token of a response, as `tokens`.
        score_values: ((params, head), the same) -> on a last axis of two that, and the head's value
            of the state before each token.
        tokens: of all rows.
        is_current: bool, broadcastable to [n *r t], drawn by the very version that is trained.
        responses: of all rows.
    """

    inputs: Any
    score: Callable[[Any, Any], Float[Array, "m *r t"]]
    score_values: Callable[[Any, Any], Float[Array, "m *r t 2"]]
    tokens: Tokens
    is_current: Array
    responses: Responses

    def sums(self, values: Float[Array, "n *r t"]) -> Float[Array, "p k"]:
        """Sum over each response."""
        return _sums(values, self.tokens, self.responses.weight.shape)

    def of_first_prompt(self, values: Float[Array, "n *r t"]) -> Float[Array, "k t"]:
        """Values of the tokens of each response to the first prompt of the batch."""
        return _by_response(values, tokens=self.tokens, length=self.responses.length[:1])[0]

    def is_here(self, tokens: Tokens) -> Bool[Array, "p k"]:
        """Which responses lie in some rows."""
        shape = self.responses.weight.shape
        return _sums((tokens.slots > 0).astype(jnp.int32), tokens, shape) > 0

    def totals(self) -> Totals:
        """Of the whole batch."""
        weight = self.responses.weight
        counted = self.sums(self.tokens.counted.astype(jnp.float32))
        # Of those that have responses: a slot may be empty.
        prompts = jnp.sum(jnp.any(weight > 0, axis=1).astype(jnp.float32))
        return Totals(prompts, jnp.sum(weight), jnp.sum(counted * weight))

    def group_data(
        self,
        policy: Float[Array, "m *r t"],
        values: Float[Array, "m *r t"] | None,
        tokens: Tokens,
        totals: Totals,
    ) -> GroupData:
        """What an objective sees of some rows: responses in other rows are 0 and have no weight.

        Args:
            policy: the policy's log-prob of every token.
            values: learned, of the state before it; None without that head.
            tokens: of the same rows, all or those of some groups.
            totals: of the whole batch.
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
            soft_value=here.soft_value,
            token_advantages=None if advantages is None else by_response(advantages),
            start_values=None if start_values is None else by_response(start_values),
        )


def num_valid_tokens(batch: Batch | PackedBatch) -> Array:
    """Tokens of all rows, padding apart; a prompt as often as it is in them."""
    if isinstance(batch, PackedBatch):
        return jnp.sum(batch.slots > 0)
    of_prompts = _of_rows(batch.prompt_lengths, batch.slots[:, 0])
    return jnp.sum(of_prompts) + jnp.sum(batch.response_lengths)


def _sums(values: Float[Array, "m *r t"], tokens: Tokens, shape: tuple[int, ...]) -> Array:
    """[p k], sum over each response of these rows; 0 where it is in others."""
    if tokens.begins is None:
        values = jnp.sum(values, axis=-1, keepdims=True)
    sums = jax.ops.segment_sum(values.reshape(-1), tokens.slots.reshape(-1), math.prod(shape) + 1)
    return sums[1:].reshape(shape)


def _by_response(values: Array, *, tokens: Tokens, length: Array) -> Array:
    """[m *r t] -> [p k t], the tokens of each response of these rows from its first on."""
    t = values.shape[-1]
    if tokens.begins is None:
        slots = tokens.slots.reshape(-1)
        found = jax.ops.segment_sum(values.reshape(-1, t), slots, length.size + 1)
        return found[1:].reshape(*length.shape, t)
    place = jnp.arange(values.size, dtype=jnp.int32).reshape(values.shape)
    # One more, so that 0 says that a response is in other rows.
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
    """The rows of a batch.

    Args:
        batch: on the device.
        step: the version that is trained.
        config, scoring, remat, sharding: as in `token_logprobs`.
        base: the frozen parameters that adapters complete; None: `score` takes all parameters.
    """
    options: Any = {"config": config, "scoring": scoring, "remat": remat, "sharding": sharding}
    if isinstance(batch, PackedBatch):
        rows, score = _packed_rows(batch, step, scoring, options)
    else:
        rows, score = _padded_rows(batch, step, scoring, options)

    def score_values(trained: tuple[Any, LogZHead], x: Any) -> Array:
        params, head = trained
        return score(whole(base, params), x, functools.partial(read_out, head))

    return rows._replace(
        score=lambda params, x: score(whole(base, params), x, None), score_values=score_values
    )


def whole(base: Any, params: Any) -> Any:
    """All parameters: those that are trained, or the frozen ones with their adapters."""
    return params if base is None else lora.combine(base, params)


def _responses(batch: Batch | PackedBatch, step: Array) -> Responses:
    staleness = jnp.where(batch.versions < 0, 0, step - batch.versions)
    return Responses(
        batch.reference_logprob,
        batch.rewards,
        batch.weights,
        batch.response_lengths,
        staleness,
        batch.soft_values,
    )


def _of_rows(values: Array, slots: Array) -> Array:
    """[p k] at the slots; 0 at padding."""
    found = values.reshape(-1)[jnp.maximum(slots - 1, 0)]
    return jnp.where(slots > 0, found, jnp.zeros_like(found))


Score = Callable[[Any, Any, Readout | None], Array]
"""(parameters, some rows of inputs, what is read off their states) -> as `Readout` says."""


def _unscored(params: Any, inputs: Any) -> Array:
    """Of rows that are still to be given how they are scored."""
    raise AssertionError("make_rows says how rows are scored")


def _padded_rows(batch: Batch, step: Array, scoring: Scoring, options: Any) -> tuple[Rows, Score]:
    c, t = batch.behavior_token_logprobs.shape[1:]
    slots, is_sampled = batch.slots, batch.is_sampled
    response_lengths = _of_rows(batch.response_lengths, slots)
    is_current = (slots > 0) & (_of_rows(batch.versions, slots) == step)
    responses = batch.tokens[:, -c * t :].reshape(-1, c, t)
    options = options | {"response_bucket": t}

    def score(params: Any, inputs: Any, readout: Readout | None) -> Array:
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
        ),
        is_current=is_current[..., None],
        responses=_responses(batch, step),
    )
    return rows, score


def _only(is_scored: Array, found: Array) -> Array:
    """0 where nothing is scored, whether there is a last axis of two or not."""
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

    shared = ()
    if batch.contexts is not None:
        shared = batch.contexts, (batch.slots > 0) & ~is_response

    def score(params: Any, inputs: Any, readout: Readout | None) -> Array:
        *rows, is_scored = inputs
        return _only(is_scored, packed_token_logprobs(params, *rows, **options, readout=readout))

    rows = Rows(
        inputs=(batch.tokens, batch.slots, batch.positions, *shared, is_scored),
        score=_unscored,
        score_values=_unscored,
        tokens=Tokens(
            batch.slots,
            counted,
            batch.behavior_token_logprobs,
            begins=is_response & (batch.positions == prompt_lengths),
            advantages=batch.token_advantages,
        ),
        is_current=is_response & (_of_rows(batch.versions, batch.slots) == step),
        responses=_responses(batch, step),
    )
    return rows, score
