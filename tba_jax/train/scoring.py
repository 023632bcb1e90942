# SPDX-License-Identifier: Apache-2.0
"""Log-probs of the tokens of a batch's rows, and gradients, computed in micro-batches.

Row q of micro-batch b of `num` is row q * num + b: sharded rows stay on their device if the number
of devices also divides the rows of a micro-batch. Invariant: the division into micro-batches
changes log-probs and gradients by rounding only.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.flow.layout import Batch, rows_at_once
from tba_jax.models import lora
from tba_jax.models.logprobs import packed_token_logprobs, row_token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig
from tba_jax.train.heads import Head, read_out

Rows = dict[str, Array]
"""Arrays of some rows that the model reads, by the names of `Batch`; the first axis is rows."""


def rows_of(batch: Batch) -> Rows:
    """Return the arrays of a batch that the model reads."""
    names = ("tokens", "prompt_lengths", "response_lengths", "segments", "positions")
    found = {name: getattr(batch, name) for name in (*names, "contexts", "is_prompt")}
    return {name: x for name, x in found.items() if x is not None}


def all_params(base: Any, params: Any) -> Any:
    """Return all parameters: the trained parameters, or the frozen ones with their adapters."""
    return params if base is None else lora.combine(base, params)


@dataclasses.dataclass(frozen=True, eq=False)
class Scorer:
    """The model as a function of rows.

    Attributes:
        config, scoring, remat, sharding: as in `logprobs.token_logprobs`.
        response_length: t, padded length of the responses of rows by prompt.
        base: frozen parameters that the adapters extend; None: all parameters are trained.
    """

    config: TransformerConfig
    scoring: Scoring
    remat: Remat
    sharding: ComputeSharding | None
    response_length: int
    base: Any = None

    def __call__(self, params: Any, rows: Rows, head: Head | None = None) -> Float[Array, "n x"]:
        """Return the log-prob of each scored position; with a head, [n x 2] with values of states.

        Args:
            params: trained parameters; gradients flow into them.
            rows: some rows.
            head: head of the values of states.
        """
        options: Any = {
            "config": self.config,
            "scoring": self.scoring,
            "remat": self.remat,
            "sharding": self.sharding,
            "readout": None if head is None else functools.partial(read_out, head),
        }
        params, tokens = all_params(self.base, params), rows["tokens"]
        if "segments" in rows:
            shared = (rows["contexts"], rows["is_prompt"]) if "contexts" in rows else ()
            packed = rows["segments"], rows["positions"], *shared
            return packed_token_logprobs(params, tokens, *packed, **options)
        lengths, t = rows["response_lengths"], self.response_length
        found = row_token_logprobs(
            params, tokens, rows["prompt_lengths"], lengths, response_bucket=t, **options
        )
        return found.reshape(len(tokens), lengths.shape[1] * t, *found.shape[3:])


class Cut(NamedTuple):
    """Division of rows into `parts` minibatches of `num` micro-batches each.

    Row (q * parts + j) * num + i belongs to micro-batch i of minibatch j.
    """

    num: int
    parts: int = 1

    def take(self, tree: Any, part: Array | int, index: Array | int) -> Any:
        """Return the rows of micro-batch `index` of minibatch `part` from each array."""
        if self.num * self.parts == 1:
            return tree
        at = part * self.num + index

        def take(x: Array) -> Array:
            x = x.reshape(-1, self.parts * self.num, *x.shape[1:])
            return jax.lax.dynamic_index_in_dim(x, at, axis=1, keepdims=False)

        return jax.tree.map(take, tree)

    def put(self, x: Array, part: Array | int, index: Array | int, rows: Array) -> Array:
        """Return `x` with the rows of a micro-batch replaced."""
        if self.num * self.parts == 1:
            return rows
        pieces = x.reshape(-1, self.parts * self.num, *x.shape[1:])
        at = part * self.num + index
        return jax.lax.dynamic_update_index_in_dim(pieces, rows, at, axis=1).reshape(x.shape)

    def part_of(self, row: Array) -> Array:
        """Return the minibatch of each row."""
        return row // self.num % self.parts


def cut_rows(
    num_rows: int, responses_per_row: int, micro_batch_rows: int, row_multiple: int, parts: int = 1
) -> Cut:
    """Divide rows into micro-batches, as `RowLayout` does, and into minibatches.

    Raises:
        ValueError: micro-batches or minibatches do not divide the rows.
    """
    size = rows_at_once(micro_batch_rows, responses_per_row, row_multiple)
    num = 1 if not size or num_rows < size else num_rows // size
    if num > 1 and num_rows % size:
        raise ValueError(
            f"batch.micro_batch_rows={size} does not divide the {num_rows} rows of a batch. Set "
            f"--config.batch.micro_batch_rows to a divisor of {num_rows}, or to 0"
        )
    if num_rows % (num * parts):
        raise ValueError(
            f"objective.minibatches={parts} does not divide {num_rows} rows in {num} "
            f"micro-batches. Set --config.objective.minibatches to a divisor of {num_rows // num}"
        )
    return Cut(num, parts)


Score = Callable[[Any, Rows], Array]
"""(trained parameters, some rows) -> scores of these rows."""


def score_all(
    score: Score,
    trained: Any,
    rows: Rows,
    cut: Cut,
    used: Array | int,
    part: Array | int | None = None,
) -> Array:
    """Return the scores of all rows, by micro-batches; 0 in micro-batches from `used` on.

    Args:
        part: minibatch to score, the scores of others are 0; None: all.
    """
    if cut.num == cut.parts == 1:
        return score(trained, rows)

    def one(i: Array, scored: Array) -> Array:
        own, index = (i // used, i % used) if part is None else (part, i)
        return cut.put(scored, own, index, score(trained, cut.take(rows, own, index)))

    num = used * cut.parts if part is None else used
    return jax.lax.fori_loop(0, num, one, _zeros(score, trained, rows))


def _zeros(score: Score, trained: Any, rows: Rows) -> Array:
    shape = jax.eval_shape(score, trained, rows)
    return jnp.zeros(shape.shape, shape.dtype)


def gradients(
    score: Score,
    loss_of: Callable[[Array], Array],
    trained: Any,
    rows: Rows,
    cut: Cut,
    *,
    used: Array | int,
    is_whole: bool,
    part: Array | int = 0,
) -> tuple[Array, Any]:
    """Return (scores of all rows, gradient of the loss by the trained parameters).

    The gradient of the loss by each score is pulled back through the model, one micro-batch at a
    time. If each group is in one micro-batch, the groups of a micro-batch need the scores of its
    own rows only, and each row is scored once. Otherwise all rows are first scored without
    gradient.

    Args:
        score: scores of rows.
        loss_of: loss from the scores of all rows; a sum over prompts.
        trained: what the gradient is taken by.
        rows: all rows.
        cut: division of the rows.
        used: number of micro-batches before the first that has only padding.
        is_whole: whether each group is in one micro-batch.
        part: the minibatch that is scored; the scores of others stay 0.
    """
    weigh = jax.grad(loss_of)
    if cut.num == 1 and cut.parts == 1:
        scored, pull = jax.vjp(lambda x: score(x, rows), trained)
        return scored, pull(weigh(scored))[0]
    first = jax.tree.map(lambda x: jnp.zeros(x.shape, jnp.float32), trained)
    start = _zeros(score, trained, rows)
    if not is_whole:
        start = score_all(score, trained, rows, cut, used, part)
    of_all = None if is_whole else weigh(start)

    def one(i: Array, carry: tuple[Any, Array]) -> tuple[Any, Array]:
        total, scored = carry
        found, pull = jax.vjp(lambda x: score(x, cut.take(rows, part, i)), trained)
        scored = cut.put(scored, part, i, found)
        weights = weigh(scored) if of_all is None else of_all
        (grads,) = pull(cut.take(weights, part, i))
        return jax.tree.map(lambda x, y: x + y.astype(jnp.float32), total, grads), scored

    total, scored = jax.lax.fori_loop(0, used, one, (first, start))
    return scored, jax.tree.map(lambda x, p: x.astype(p.dtype), total, trained)
