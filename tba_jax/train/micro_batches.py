# SPDX-License-Identifier: Apache-2.0
"""Log-probs and gradients of a batch, row by row and in micro-batches.

It knows rows that can be scored in any number at a time, and a loss of the groups in them; it does
not know what a row holds, which objective it is, or what is done with a gradient. The invariant it
owns: how rows are cut into micro-batches changes neither result beyond rounding.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tba_jax.train.rows import Rows, Tokens

Score = Callable[[Any, Any], Array]
"""(parameters, some rows of inputs) -> token log-probs, and on a last axis values beside them."""

LossOf = Callable[[Array, Tokens], Float[Array, ""]]
"""(what these rows were scored, what else is known of them) -> their part of the loss."""


@dataclasses.dataclass(frozen=True)
class Cut:
    """How rows are cut into micro-batches.

    Row q of micro-batch b is row q * num + b, so that rows divided over devices stay where they
    are if those of a micro-batch divide over them too.

    Attributes:
        num: micro-batches, static.
        is_whole: all rows of a group are in one of them.
        used: those before the first that holds nothing but padding; the others are not worked on.
    """

    num: int
    is_whole: bool
    used: Int[Array, ""]

    def take(self, tree: Any, index: Int[Array, ""]) -> Any:
        """The rows of a micro-batch."""

        def take(x: Array) -> Array:
            x = x.reshape(-1, self.num, *x.shape[1:])
            return jax.lax.dynamic_index_in_dim(x, index, axis=1, keepdims=False)

        return jax.tree.map(take, tree)

    def put(self, x: Array, index: Int[Array, ""], rows: Array) -> Array:
        """`x` with these rows for the micro-batch's."""
        parts = x.reshape(-1, self.num, *x.shape[1:])
        parts = jax.lax.dynamic_update_index_in_dim(parts, rows, index, axis=1)
        return parts.reshape(x.shape)


def cut_rows(rows: Rows, size: int, *, is_whole: bool) -> Cut:
    """Micro-batches of `size` rows each; of all rows, one, where it is 0 or there are fewer.

    Args:
        rows: the batch.
        size: rows of a micro-batch.
        is_whole: all rows of a group are in one of them.

    Raises:
        ValueError: they do not divide the rows.
    """
    num_rows = rows.tokens.slots.shape[0]
    is_one = not size or num_rows < size
    if not is_one and num_rows % size:
        raise ValueError(
            f"a batch of {num_rows} rows cannot be cut into micro-batches of {size}; make "
            "config.batch.micro_batch_rows a divisor of the rows of a batch"
        )
    num = 1 if is_one else num_rows // size
    slots = rows.tokens.slots.reshape(num_rows // num, num, -1)
    holds = jnp.any(slots > 0, (0, 2))
    return Cut(num, is_whole, jnp.max(jnp.where(holds, jnp.arange(1, num + 1), 0)))


def gradients(
    rows: Rows, params: Any, loss_of: LossOf, cut: Cut, score: Score
) -> tuple[Array, Any]:
    """(what all rows are scored, gradients of the loss by the parameters).

    Args:
        rows: the batch.
        params: of the policy, and of a head where `score` takes one.
        loss_of: the loss of whole groups; over disjoint groups it adds up to the batch's.
        cut: into micro-batches.
        score: `rows.score` or `rows.score_values`.
    """
    # Gradient of the loss by each token's log-prob.
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

        nothing = _nothing(rows, score)
        total, scored = jax.lax.fori_loop(0, cut.used, one_pass, (first, nothing))
    else:
        scored = score_all(rows, params, cut, score)
        weights = weigh(scored, rows.tokens)

        def second_pass(i: Array, total: Any) -> Any:
            _, pull = pull_of(cut.take(rows.inputs, i))
            return add(total, pull, cut.take(weights, i))

        total = jax.lax.fori_loop(0, cut.used, second_pass, first)
    return scored, jax.tree.map(lambda x, p: x.astype(p.dtype), total, params)


def score_all(rows: Rows, params: Any, cut: Cut, score: Score) -> Array:
    """Scores of all rows, micro-batch by micro-batch; 0 where none was worked on."""
    if cut.num == 1:
        return score(params, rows.inputs)

    def one(i: Array, scored: Array) -> Array:
        return cut.put(scored, i, score(params, cut.take(rows.inputs, i)))

    return jax.lax.fori_loop(0, cut.used, one, _nothing(rows, score))


def _nothing(rows: Rows, score: Score) -> Array:
    """No row scored yet."""
    if score is rows.score:
        return jnp.zeros_like(rows.tokens.behavior)
    return jnp.zeros((*rows.tokens.behavior.shape, 2), rows.tokens.behavior.dtype)
