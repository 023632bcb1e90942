# SPDX-License-Identifier: Apache-2.0
"""Batches of token rows for models that grade."""

from collections.abc import Callable, Sequence

import numpy as np
from jaxtyping import Array

from tba_jax.devices.site import Site
from tba_jax.flow.padding import bucket_length
from tba_jax.rewards.config import JUDGE_ROWS


def judge_dtype(site: Site) -> str:
    """Return the dtype of models that grade: bfloat16, but float32 on CPUs, where it is faster."""
    return "float32" if site.platform == "cpu" else "bfloat16"


def in_batches(
    rows: Sequence[np.ndarray],
    lengths: Sequence[int],
    launch: Callable[[list[np.ndarray], int], Array],
) -> np.ndarray:
    """Return the score of each row, float64 [n]; rows of similar length share a batch.

    Args:
        rows: int32 [t] each, tokens.
        lengths: padded lengths that are compiled, ascending.
        launch: (JUDGE_ROWS rows, padded length) -> scores [JUDGE_ROWS] on a device.
    """
    scores = np.zeros(len(rows))
    order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
    pending: list[tuple[list[int], Array]] = []
    for start in range(0, len(order), JUDGE_ROWS):
        chosen = order[start : start + JUDGE_ROWS]
        batch = [rows[i] for i in chosen]
        filled = batch + batch[:1] * (JUDGE_ROWS - len(batch))
        # Dispatched without waiting, so that the next batch is packed concurrently.
        pending.append((chosen, launch(filled, bucket_length(len(batch[-1]), lengths))))
    for chosen, values in pending:
        scores[chosen] = np.asarray(values, np.float64)[: len(chosen)]
    return scores


def right_pad(
    rows: Sequence[np.ndarray], length: int, pad_id: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the rows left-aligned in int32 [b length], and which tokens are theirs."""
    tokens = np.full((len(rows), length), pad_id, np.int32)
    for i, row in enumerate(rows):
        tokens[i, : len(row)] = row
    lengths = np.array([len(row) for row in rows])
    return tokens, np.arange(length)[None] < lengths[:, None]
