# SPDX-License-Identifier: Apache-2.0
"""Scores of the tokens of a batch's rows, and gradients, computed in micro-batches.

Row q of micro-batch b of `num` is row q * num + b: sharded rows stay on their device if the number
of devices also divides the rows of a micro-batch. Invariant: the division into micro-batches
changes scores and gradients by rounding only.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.flow.layout import Batch, rows_at_once
from tba_jax.models import lora
from tba_jax.models.logprobs import packed_token_logprobs, row_token_logprobs

Rows = dict[str, Array]
"""Arrays of some rows that the model reads, by the names of `Batch`; the first axis is rows."""

Score = Callable[[Any, Rows], Array]
"""(trained parameters, some rows) -> scores of these rows, [n x ...]."""


def rows_of(batch: Batch) -> Rows:
    """Return the arrays of a batch that the model reads."""
    names = ("tokens", "prompt_lengths", "response_lengths", "segments", "positions")
    found = {name: getattr(batch, name) for name in (*names, "contexts", "is_prompt")}
    return {name: x for name, x in found.items() if x is not None}


def make_score(base: Any, response_length: int, *, has_head: bool, **options: Any) -> Score:
    """Return the model as a function of rows: the log-prob of each scored position, [n x].

    With a head, scores are [n x 2]: the log-prob, and the head on the state before the token.
    The trained parameters are then a pair (policy, head); gradients flow into both.

    Args:
        base: frozen parameters that the trained adapters extend; None: all parameters are trained.
        response_length: t, padded length of the responses of rows by prompt.
        options: config, scoring, remat and sharding, as in `logprobs.row_token_logprobs`.
    """

    def score(trained: Any, rows: Rows) -> Float[Array, "n x *both"]:
        policy, head = trained if has_head else (trained, None)
        params = policy if base is None else lora.combine(base, policy)
        own: dict[str, Any] = options | {"readout": None}
        if head is not None:
            own["readout"] = lambda x: x.astype(jnp.float32) @ head.weight + head.bias
        tokens = rows["tokens"]
        if "segments" in rows:
            shared = (rows["contexts"], rows["is_prompt"]) if "contexts" in rows else ()
            packed = rows["segments"], rows["positions"], *shared
            return packed_token_logprobs(params, tokens, *packed, **own)
        lengths, t = rows["response_lengths"], response_length
        found = row_token_logprobs(
            params, tokens, rows["prompt_lengths"], lengths, response_bucket=t, **own
        )
        return found.reshape(len(tokens), lengths.shape[1] * t, *found.shape[3:])

    return score


class MicroBatches(NamedTuple):
    """Division of rows into `num` micro-batches, of which the first `used` have sequences."""

    num: int
    used: Array | int

    def take(self, tree: Any, index: Array | int) -> Any:
        """Return the rows of a micro-batch from each array."""
        if self.num == 1:
            return tree

        def take(x: Array) -> Array:
            x = x.reshape(-1, self.num, *x.shape[1:])
            return jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)

        return jax.tree.map(take, tree)

    def put(self, x: Array, index: Array | int, rows: Array) -> Array:
        """Return `x` with the rows of a micro-batch replaced."""
        pieces = x.reshape(-1, self.num, *x.shape[1:])
        return jax.lax.dynamic_update_index_in_dim(pieces, rows, index, axis=1).reshape(x.shape)


def divide(rows: Rows, num_computed: Array | int, size: int, multiple: int) -> MicroBatches:
    """Divide rows into micro-batches, as `RowLayout` does.

    Args:
        num_computed: number of rows of the micro-batches that have a sequence.
        size: maximum number of responses of a micro-batch; 0: all.
        multiple: number of devices that divide the rows of a micro-batch.
    """
    num_rows = len(rows["tokens"])
    responses = rows["response_lengths"].shape[1] if "response_lengths" in rows else 1
    at_once = rows_at_once(size, responses, multiple)
    num = num_rows // at_once if 0 < at_once < num_rows else 1
    assert num_rows % num == 0, f"{num_rows} rows in micro-batches of {at_once}"
    return MicroBatches(num, num_computed // (num_rows // num))


def score_all(score: Score, trained: Any, rows: Rows, cut: MicroBatches) -> Array:
    """Return the scores of all rows, by micro-batches; 0 in unused micro-batches."""
    if cut.num == 1:
        return score(trained, rows)

    def one(i: Array, scored: Array) -> Array:
        return cut.put(scored, i, score(trained, cut.take(rows, i)))

    return jax.lax.fori_loop(0, cut.used, one, _zeros(score, trained, rows))


def _zeros(score: Score, trained: Any, rows: Rows) -> Array:
    shape = jax.eval_shape(score, trained, rows)
    return jnp.zeros(shape.shape, shape.dtype)


def gradients(
    score: Score,
    loss_of: Callable[[Array], Array],
    trained: Any,
    rows: Rows,
    cut: MicroBatches,
    *,
    is_whole: bool,
) -> tuple[Array, Any]:
    """Return (scores of all rows, gradient of the loss by the trained parameters).

    The gradient of the loss by each score is pulled back through the model, one micro-batch at a
    time. If each group is in one micro-batch, the groups of a micro-batch need the scores of its
    own rows only, and each row is scored once. Otherwise all rows are first scored without
    gradient.

    Args:
        loss_of: loss from the scores of all rows; a sum over prompts.
        trained: parameters by which the gradient is taken.
        is_whole: whether each group is in one micro-batch.
    """
    weigh = jax.grad(loss_of)
    if cut.num == 1:
        scored, pull = jax.vjp(lambda x: score(x, rows), trained)
        return scored, pull(weigh(scored))[0]
    start = _zeros(score, trained, rows) if is_whole else score_all(score, trained, rows, cut)
    of_all = None if is_whole else weigh(start)

    def one(i: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        total, scored = carry
        found, pull = jax.vjp(lambda x: score(x, cut.take(rows, i)), trained)
        scored = cut.put(scored, i, found)
        weights = weigh(scored) if of_all is None else of_all
        (grads,) = pull(cut.take(weights, i))
        return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, grads), scored

    first = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
    total, scored = jax.lax.fori_loop(0, cut.used, one, (first, start))
    return scored, jax.tree.map(lambda x, p: x.astype(p.dtype), total, trained)
