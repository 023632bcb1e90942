# SPDX-License-Identifier: Apache-2.0
"""Batches of token rows for models that grade.

Invariant: the score of a row does not depend on the other rows of the call, up to rounding.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
from jaxtyping import Array

from tba_jax.devices.site import Site
from tba_jax.flow.padding import bucket_length

ROWS = 32
"""Rows of a batch."""


def judge_dtype(site: Site) -> str:
    """Return the dtype of models that grade: bfloat16, but float32 on CPUs, where it is faster."""
    return "float32" if site.platform == "cpu" else "bfloat16"


class RowScorer(NamedTuple):
    """Scores of token rows by a model.

    Attributes:
        program: jitted (params, tokens [b s], mask [b s]) -> scores [b]; rows are right-padded.
        params: weights on a device.
        lengths: padded lengths that are compiled, ascending.
        pad_id: token at padding.
    """

    program: Callable[..., Array]
    params: Any
    lengths: Sequence[int]
    pad_id: int

    def __call__(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the score of each row, float64 [n]; rows of similar length share a batch.

        Args:
            rows: int32 [t] each, tokens.

        Raises:
            ValueError: a row is longer than the largest padded length.
        """
        scores = np.zeros(len(rows))
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        pending: list[tuple[list[int], Array]] = []
        for start in range(0, len(order), ROWS):
            chosen = order[start : start + ROWS]
            length = bucket_length(len(rows[chosen[-1]]), self.lengths)
            tokens = np.full((ROWS, length), self.pad_id, np.int32)
            mask = np.zeros((ROWS, length), bool)
            for j, i in enumerate(chosen + chosen[:1] * (ROWS - len(chosen))):
                tokens[j, : len(rows[i])], mask[j, : len(rows[i])] = rows[i], True
            # Dispatched without waiting, so that the next batch is packed concurrently.
            pending.append((chosen, self.program(self.params, tokens, mask)))
        for chosen, values in pending:
            scores[chosen] = np.asarray(values, np.float64)[: len(chosen)]
        return scores
