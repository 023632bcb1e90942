# SPDX-License-Identifier: Apache-2.0
"""Log-probs and gradients of a batch, row by row and in micro-batches.

It knows rows that can be scored in any number at a time, and a loss of the groups in them; it does
not know what a row holds, which objective it is, or what is done with a gradient. The invariant it
owns: how rows are cut into micro-batches changes neither result beyond rounding.
"""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.train.rows import Responses, Rows, Tokens

LossOf = Callable[[Float[Array, "m t"], Tokens, Responses], Float[Array, ""]]
"""(the policy's token log-probs, what else is known of these rows) -> their part of the loss."""


def num_micro_batches(rows: Rows, wanted: int) -> int:
    """Micro-batches of `wanted` rows each; of all rows, one, where it is 0.

    Raises:
        ValueError: they do not divide the rows.
    """
    num_rows = rows.tokens.counted.shape[0]
    if wanted and num_rows % wanted:
        raise ValueError(
            f"a batch of {num_rows} rows cannot be cut into micro-batches of {wanted}; make "
            "config.batch.micro_batch_rows a divisor of the rows of a batch"
        )
    return num_rows // wanted if wanted else 1


def gradients(
    rows: Rows, params: Any, loss_of: LossOf, responses: Responses, num: int, num_parts: int = 1
) -> tuple[Float[Array, "n t"], Any]:
    """(token log-probs of all rows, gradients of the loss by the parameters).

    Args:
        rows: the batch.
        params: of the policy.
        loss_of: the loss of whole groups; over disjoint groups it adds up to the batch's.
        responses: of the batch.
        num: micro-batches.
        num_parts: into how many parts devices divide the rows.
    """
    # Gradient of the loss by each token's log-prob.
    weigh = jax.grad(loss_of)

    def pull_of(inputs: Any) -> tuple[Array, Callable[[Array], tuple[Any]]]:
        return jax.vjp(lambda p: rows.score(p, inputs), params)

    if num == 1:
        token_logprobs, pull = pull_of(rows.inputs)
        return token_logprobs, pull(weigh(token_logprobs, rows.tokens, responses))[0]

    def add(total: Any, pull: Callable[[Array], tuple[Any]], weights: Array) -> Any:
        return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, pull(weights)[0])

    num_rows, size = rows.tokens.counted.shape[0], rows.rows_per_prompt
    first = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), params)
    if size and num_rows // num % (size * num_parts) == 0:

        def one_pass(total: Any, xs: Any) -> tuple[Any, Array]:
            (inputs, tokens), responses = xs
            token_logprobs, pull = pull_of(inputs)
            return add(total, pull, weigh(token_logprobs, tokens, responses)), token_logprobs

        xs = _cut((rows.inputs, rows.tokens), num, size), _cut(responses, num, 1)
        total, scored = jax.lax.scan(one_pass, first, xs)
        token_logprobs = _joined(scored, size)
    else:

        def second_pass(total: Any, xs: Any) -> tuple[Any, None]:
            inputs, weights = xs
            _, pull = pull_of(inputs)
            return add(total, pull, weights), None

        token_logprobs = score_all(rows, params, num)
        weights = weigh(token_logprobs, rows.tokens, responses)
        total, _ = jax.lax.scan(second_pass, first, _cut((rows.inputs, weights), num, 1))
    return token_logprobs, jax.tree.map(lambda x, p: x.astype(p.dtype), total, params)


def score_all(rows: Rows, params: Any, num: int) -> Float[Array, "n t"]:
    """Token log-probs of all rows, by as many micro-batches."""
    if num == 1:
        return rows.score(params, rows.inputs)
    scored = jax.lax.map(lambda inputs: rows.score(params, inputs), _cut(rows.inputs, num, 1))
    return _joined(scored, 1)


def _cut(tree: Any, num: int, size: int) -> Any:
    """[n ...] as [num n/num ...]: micro-batch i has unit i of every `num` units of `size` rows."""

    def cut(x: Array) -> Array:
        x = x.reshape(-1, num, size, *x.shape[1:])
        return jnp.swapaxes(x, 0, 1).reshape(num, -1, *x.shape[3:])

    return jax.tree.map(cut, tree)


def _joined(x: Float[Array, "num m t"], size: int) -> Float[Array, "n t"]:
    """The inverse of `_cut`."""
    num, _, t = x.shape
    return jnp.swapaxes(x.reshape(num, -1, size, t), 0, 1).reshape(-1, t)
