# SPDX-License-Identifier: Apache-2.0
"""Log-probs and gradients of a batch, computed in micro-batches.

Invariant: the division into micro-batches changes log-probs and gradients by rounding only.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tba_jax.train.rows import Rows, Tokens

Score = Callable[[Any, Any], Array]
"""(parameters, inputs of some rows) -> as `Rows.score` or `Rows.score_values`."""

LossOf = Callable[[Array, Tokens], Float[Array, ""]]
"""(scores of some rows, tokens of the same rows) -> their contribution to the loss."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """Division of the rows of a batch into micro-batches.

    Row q of micro-batch b is row q * num + b. Sharded rows then stay on their device if the number
    of devices also divides the rows of a micro-batch.

    Attributes:
        num: number of micro-batches; static.
        is_whole: whether each group is in a single micro-batch.
        used: number of micro-batches before the first that has only padding; the rest is skipped.
    """

    num: int
    is_whole: bool
    used: Int[Array, ""]

    def take(self, tree: Any, index: Int[Array, ""]) -> Any:
        """Return the rows of micro-batch `index` from each array."""

        def take(x: Array) -> Array:
            x = x.reshape(-1, self.num, *x.shape[1:])
            return jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)

        return jax.tree.map(take, tree)

    def put(self, x: Array, index: Int[Array, ""], rows: Array) -> Array:
        """Return `x` with the rows of micro-batch `index` replaced."""
        parts = x.reshape(-1, self.num, *x.shape[1:])
        parts = jax.lax.dynamic_update_index_in_dim(parts, rows, index, axis=1)
        return parts.reshape(x.shape)


def cut_rows(rows: Rows, size: int, *, is_whole: bool) -> Cut:
    """Divide a batch into micro-batches of `size` rows; 0 or a large size gives one micro-batch.

    Args:
        rows: the batch.
        size: rows per micro-batch.
        is_whole: whether each group is in a single micro-batch.

    Raises:
        ValueError: `size` does not divide the number of rows.
    """
    num_rows = rows.tokens.slots.shape[0]
    is_one = not size or num_rows < size
    if not is_one and num_rows % size:
        raise ValueError(
            f"batch.micro_batch_rows={size} does not divide the {num_rows} rows of a batch. Set "
            f"--config.batch.micro_batch_rows to a divisor of {num_rows}, or to 0"
        )
    num = 1 if is_one else num_rows // size
    slots = rows.tokens.slots.reshape(num_rows // num, num, -1)
    holds = jnp.any(slots > 0, (0, 2))
    return Cut(num, is_whole, jnp.max(jnp.where(holds, jnp.arange(1, num + 1), 0)))


def gradients(
    rows: Rows, params: Any, loss_of: LossOf, cut: Cut, score: Score
) -> tuple[Array, Any]:
    """Return (scores of all rows, gradients of the loss with respect to the parameters).

    Args:
        rows: the batch.
        params: parameters of the policy, and of the head if `score` takes a head.
        loss_of: loss of whole groups; losses of disjoint groups add up to the batch's loss.
        cut: division into micro-batches.
        score: `rows.score` or `rows.score_values`.
    """
    # Gradient of the loss with respect to each token's log-prob.
    weigh = jax.grad(loss_of)

    def pull_of(inputs: Any) -> tuple[Array, Callable[[Array], tuple[Any]]]:
        return jax.vjp(lambda p: score(p, inputs), params)

    if cut.num == 1:
        token_logprobs, pull = pull_of(rows.inputs)
        return token_logprobs, pull(weigh(token_logprobs, rows.tokens))[0]

    def add(total: Any, pull: Callable[[Array], tuple[Any]], weights: Array) -> Any:
        return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, pull(weights)[0])

    first = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    if cut.is_whole:

        def one_pass(i: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
            total, scored = carry
            token_logprobs, pull = pull_of(cut.take(rows.inputs, i))
            weights = weigh(token_logprobs, cut.take(rows.tokens, i))
            return add(total, pull, weights), cut.put(scored, i, token_logprobs)

        total, scored = jax.lax.fori_loop(0, cut.used, one_pass, (first, _zeros(rows, score)))
    else:
        scored = score_all(rows, params, cut, score)
        weights = weigh(scored, rows.tokens)

        def second_pass(i: Array, total: Any) -> Any:
            _, pull = pull_of(cut.take(rows.inputs, i))
            return add(total, pull, cut.take(weights, i))

        total = jax.lax.fori_loop(0, cut.used, second_pass, first)
    return scored, jax.tree.map(lambda x, p: x.astype(p.dtype), total, params)


def score_all(rows: Rows, params: Any, cut: Cut, score: Score) -> Array:
    """Return the scores of all rows, computed by micro-batches; 0 in skipped micro-batches."""
    if cut.num == 1:
        return score(params, rows.inputs)

    def one(i: Array, scored: Array) -> Array:
        return cut.put(scored, i, score(params, cut.take(rows.inputs, i)))

    return jax.lax.fori_loop(0, cut.used, one, _zeros(rows, score))


def _zeros(rows: Rows, score: Score) -> Array:
    """Return zeros in the shape of the scores of all rows."""
    last = () if score is rows.score else (2,)
    return jnp.zeros((*rows.tokens.behavior.shape, *last), rows.tokens.behavior.dtype)
