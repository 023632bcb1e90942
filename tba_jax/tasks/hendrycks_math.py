# SPDX-License-Identifier: Apache-2.0
"""The `math` task: the competition problems of Hendrycks et al. (MATH), boxed answers.

It does not know how grading works (`rewards.math_answers` does). Invariant: a problem's index is
its row in the file.
"""

import functools
from typing import Any

from tba_jax.rewards.math_answers import last_boxed
from tba_jax.tasks.rows import Row, load_rows

PROMPT = (
    "Problem:\n{problem}\n\n"
    "Reason step by step, and put the final answer within \\boxed{{}}.\n\nSolution:"
)
HUB = ("nlile/hendrycks-MATH-benchmark", None)
COLUMNS = ("problem", "solution")


class HendrycksMath:
    """MATH; files are read when a split is first used.

    Args:
        data_path: folder with train.jsonl and test.jsonl whose rows have `problem` and `solution`
            (with the answer in \\boxed{}); empty: the hub.
    """

    name = "math"
    reward = "tba_jax.rewards.math_answers:math_reward"
    response_kinds = ("boxed", "unboxed")

    def __init__(self, data_path: str) -> None:
        self._data_path = data_path

    @functools.cached_property
    def _train(self) -> list[Row]:
        return load_rows(self._data_path, "train", COLUMNS, hub=HUB)

    @functools.cached_property
    def _eval(self) -> list[Row]:
        return load_rows(self._data_path, "test", COLUMNS, hub=HUB)

    def train_size(self) -> int:
        """Number of training problems."""
        return len(self._train)

    def eval_size(self) -> int:
        """Number of held-out problems."""
        return len(self._eval)

    def train_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """Prompt text of a training problem; column `answer` is the whole gold solution."""
        return _problem(self._train[index])

    def eval_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """Prompt text of a held-out problem; column `answer` is the whole gold solution."""
        return _problem(self._eval[index])

    def response_kind(self, text: str) -> str:
        """Whether the response boxes an answer."""
        return "unboxed" if last_boxed(text) is None else "boxed"


def _problem(row: Row) -> tuple[str, dict[str, Any]]:
    return PROMPT.format(problem=row["problem"]), {"answer": row["solution"]}
