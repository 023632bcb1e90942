# SPDX-License-Identifier: Apache-2.0
"""The `math` task: the competition problems of Hendrycks et al. (MATH) with boxed answers.

Invariant: a problem's index is its row in the file; MATH-500 problems are never trained on.
"""

import functools
from collections.abc import Sequence
from typing import Any

from tba_jax.rewards.boxed import last_boxed
from tba_jax.tasks.rows import Placed, Row, RowTask

MESSAGE = "{problem}\n\nReason step by step, and put the final answer within \\boxed{{}}."
PROMPT = f"Problem:\n{MESSAGE}\n\nSolution:"


class HendrycksMath(RowTask):
    """MATH; files are read when a split is first used.

    Args:
        data_path: folder with train.jsonl and test.jsonl whose rows have `problem` and `solution`
            (with the answer in \\boxed{}); empty: the hub.
    """

    name = "math"
    reward = "tba_jax.rewards.math_answers:math_reward"
    metric = "pass_at_1"
    response_kinds = ("boxed", "unboxed")

    columns = ("problem", "solution")
    # The 12,000 problems outside MATH-500, and MATH-500 itself.
    hub = {"train": "hf://nlile/hendrycks-MATH-benchmark", "test": "hf://HuggingFaceH4/MATH-500"}

    @functools.cached_property
    def _train(self) -> Sequence[Placed]:
        rows = super()._train
        if self._data_path:
            return rows
        # Two publishers made the two data sets: remove problems that are in both.
        held_out = {row["problem"] for _, row in self._eval}
        return [placed for placed in rows if placed[1]["problem"] not in held_out]

    @staticmethod
    def problem(row: Row) -> tuple[str, dict[str, Any]]:
        """Return the prompt text; column `answer` is the whole gold solution."""
        return PROMPT.format(problem=row["problem"]), {"answer": row["solution"]}

    @staticmethod
    def message(row: Row) -> str:
        """Return the problem with an instruction about the answer's format."""
        return MESSAGE.format(problem=row["problem"])

    def response_kind(self, text: str) -> str:
        """Return the kind of the response: with or without a boxed answer."""
        return "unboxed" if last_boxed(text) is None else "boxed"
