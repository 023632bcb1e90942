# SPDX-License-Identifier: Apache-2.0
"""The `math` task: the competition problems of Hendrycks et al. (MATH) with boxed answers.

Invariant: MATH-500 problems are never trained on.
"""

from tba_jax.rewards.numeric import last_boxed
from tba_jax.tasks.published import RowTask


class HendrycksMath(RowTask):
    """MATH; the column `answer` is the whole gold solution.

    Args:
        data_path: folder with train.jsonl and test.jsonl whose rows have `problem` and `solution`
            (with the answer in \\boxed{}); empty: the hub.
    """

    name = "math"
    reward = "tba_jax.rewards.math_answers:math_reward"
    metric = "pass_at_1"
    response_kinds = ("boxed", "unboxed")

    message = "{problem}\n\nReason step by step, and put the final answer within \\boxed{{}}."
    text = f"Problem:\n{message}\n\nSolution:"
    columns = ("problem", "solution")
    # The 12,000 problems outside MATH-500, and MATH-500 itself.
    # Two publishers made the two data sets: some problems are in both.
    hub = {"train": "hf://nlile/hendrycks-MATH-benchmark", "eval": "hf://HuggingFaceH4/MATH-500"}
    is_disjoint = True

    def response_kind(self, text: str) -> str:
        return "unboxed" if last_boxed(text) is None else "boxed"
