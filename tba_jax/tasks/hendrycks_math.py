# SPDX-License-Identifier: Apache-2.0
"""The `math` task: the competition problems of Hendrycks et al. (MATH), boxed answers.

It does not know how grading works (`rewards.math_answers` does). Invariant: a problem's index is
its row in the file.
"""

from typing import Any

from tba_jax.rewards.math_answers import last_boxed
from tba_jax.tasks.rows import Row, RowTask

PROMPT = (
    "Problem:\n{problem}\n\n"
    "Reason step by step, and put the final answer within \\boxed{{}}.\n\nSolution:"
)


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
    hub = ("nlile/hendrycks-MATH-benchmark", None)

    @staticmethod
    def problem(row: Row) -> tuple[str, dict[str, Any]]:
        """Prompt text; column `answer` is the whole gold solution."""
        return PROMPT.format(problem=row["problem"]), {"answer": row["solution"]}

    def response_kind(self, text: str) -> str:
        """Whether the response boxes an answer."""
        return "unboxed" if last_boxed(text) is None else "boxed"
