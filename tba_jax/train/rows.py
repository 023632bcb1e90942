# SPDX-License-Identifier: Apache-2.0
"""A batch as rows that can be scored in any number at a time, padded or packed.

It knows how batches are laid out and the one definition of log-probs, not what is minimised. The
invariant it owns: what an objective is shown of the responses does not depend on the layout.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.models import lora
from tba_jax.models.logprobs import packed_token_logprobs, response_mask, token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig
from tba_jax.train.objectives.base import GroupData, Totals


class Tokens(NamedTuple):
    """What is known of every token, as rows [n t]; 0 and False outside responses.

    Attributes:
        counted: bool, the tokens that count in log pi(y|x).
        behavior: log-probs of the sampler.
        reference: log-probs of the reference, where the trainer scores it.
    """

    counted: Array
    behavior: Array
    reference: Array | None = None


class Responses(NamedTuple):
    """What is known of every response, [p k] each.

    Attributes:
        reference_logprob: summed over the tokens that count.
        reward: raw.
        weight: how often it was drawn.
        length: its tokens.
        log_z: [p 1], learned log Z, if there is one.
    """

    reference_logprob: Array
    reward: Array
    weight: Array
    length: Array
    log_z: Array | None = None


class Rows(NamedTuple):
    """A batch as n rows.

    Attributes:
        inputs: arrays of n rows each, what `score` reads.
        score: (params, some rows of inputs) -> [rows t] log-prob of every token of a response.
        tokens: of all rows.
        is_current: bool, broadcastable to [n t], drawn by the very version that is trained.
        sums: [n t] -> [p k], sum over each response.
        by_response: [n t] -> [p k t], the tokens of each response from its first on.
        rows_per_prompt: K where the rows of a prompt lie side by side, and `sums` and `by_response`
            then take the rows of any prompts; 0 where they do not.
    """

    inputs: Any
    score: Callable[[Any, Any], Float[Array, "m t"]]
    tokens: Tokens
    is_current: Array
    sums: Callable[[Array], Float[Array, "p k"]]
    by_response: Callable[[Array], Array]
    rows_per_prompt: int

    def totals(self, responses: Responses) -> Totals:
        """Of the whole batch."""
        counted = self.sums(self.tokens.counted.astype(jnp.float32))
        prompts = jnp.float32(responses.weight.shape[0])
        return Totals(prompts, jnp.sum(responses.weight), jnp.sum(counted * responses.weight))

    def group_data(
        self, policy: Float[Array, "n t"], tokens: Tokens, responses: Responses, totals: Totals
    ) -> GroupData:
        """What an objective sees of these rows.

        Args:
            policy: the policy's log-prob of every token.
            tokens, responses: of the same rows: all, or those of some prompts.
            totals: of the whole batch.
        """
        reference, log_z = tokens.reference, responses.log_z
        return GroupData(
            policy_logprob=self.sums(policy * tokens.counted),
            policy_token_logprobs=self.by_response(policy),
            behavior_token_logprobs=self.by_response(tokens.behavior),
            reference_logprob=responses.reference_logprob,
            reference_token_logprobs=None if reference is None else self.by_response(reference),
            mask=self.by_response(tokens.counted),
            reward=responses.reward,
            weight=responses.weight,
            length=responses.length,
            log_z=None if log_z is None else log_z[:, 0],
            totals=totals,
        )


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
        rows = _packed_rows(batch, step, scoring, options)
    else:
        rows = _padded_rows(batch, step, scoring, options)
    return rows._replace(score=lambda trained, x: rows.score(whole(base, trained), x))


def whole(base: Any, params: Any) -> Any:
    """All parameters: those that are trained, or the frozen ones with their adapters."""
    return params if base is None else lora.combine(base, params)


def _padded_rows(batch: Batch, step: Array, scoring: Scoring, options: Any) -> Rows:
    p, k, t = batch.behavior_token_logprobs.shape
    is_action = batch.is_action
    mask = response_mask(batch.tokens[..., -t:], batch.response_lengths, scoring, is_action)

    def flat(x: Array) -> Array:
        return x.reshape(p * k, *x.shape[2:])

    def score(params: Any, inputs: tuple[Array, ...]) -> Float[Array, "m t"]:
        # To the log-probs every row is a prompt of its own.
        one_each = (x[:, None] for x in inputs[:3])
        values = token_logprobs(params, *one_each, response_bucket=t, **options)[:, 0]
        return values if is_action is None else jnp.where(inputs[3], values, 0.0)

    return Rows(
        inputs=(
            flat(batch.tokens),
            flat(batch.prompt_lengths),
            flat(batch.response_lengths),
            *(() if is_action is None else (flat(is_action),)),
        ),
        score=score,
        tokens=Tokens(flat(mask), flat(batch.behavior_token_logprobs)),
        is_current=flat(batch.versions == step)[:, None],
        sums=lambda values: jnp.sum(values, axis=-1).reshape(-1, k),
        by_response=lambda values: values.reshape(-1, k, t),
        rows_per_prompt=k,
    )


def _packed_rows(batch: PackedBatch, step: Array, scoring: Scoring, options: Any) -> Rows:
    shape, t = batch.rewards.shape, batch.tokens.shape[1]
    sequence = jnp.maximum(batch.segments - 1, 0)
    prompt_lengths = batch.prompt_lengths.reshape(-1)[sequence]
    is_response = (batch.segments > 0) & (batch.positions >= prompt_lengths)
    is_scored = is_response if batch.is_action is None else is_response & batch.is_action
    counted = is_scored
    if scoring.mask_eos:
        counted = counted & ~jnp.isin(batch.tokens, jnp.array(scoring.eos_ids, jnp.int32))

    def score(params: Any, inputs: tuple[Array, ...]) -> Float[Array, "m s"]:
        *rows, is_scored = inputs
        return jnp.where(is_scored, packed_token_logprobs(params, *rows, **options), 0.0)

    def sums(values: Array) -> Float[Array, "p k"]:
        of_sequences = jax.ops.segment_sum(
            values.reshape(-1), batch.segments.reshape(-1), num_segments=batch.rewards.size + 1
        )
        return of_sequences[1:].reshape(shape)

    def by_response(values: Array) -> Array:
        place = jnp.arange(batch.tokens.size).reshape(batch.tokens.shape)
        is_first = is_response & (batch.positions == prompt_lengths)
        first = sums(jnp.where(is_first, place, 0))[..., None]
        index = jnp.arange(t)[None, None]
        found = jnp.take(values.reshape(-1), first + index, mode="clip")
        inside = index < batch.response_lengths[..., None]
        return jnp.where(inside, found, jnp.zeros_like(found))

    return Rows(
        inputs=(batch.tokens, batch.segments, batch.positions, is_scored),
        score=score,
        tokens=Tokens(counted, batch.behavior_token_logprobs),
        is_current=is_response & (batch.versions == step).reshape(-1)[sequence],
        sums=sums,
        by_response=by_response,
        rows_per_prompt=0,
    )
