# SPDX-License-Identifier: Apache-2.0
"""The `gsm8k` task: grade-school word problems, with our prompts or those of the paper's code."""

from tba_jax.rewards.numeric import gsm8k_gold, last_number
from tba_jax.tasks.published import RowTask


class GSM8K(RowTask):
    """7,473 training and 1,319 held-out problems; the column `answer` is the whole gold solution.

    Args:
        data_path: folder with train.jsonl and test.jsonl as OpenAI published them; empty: the hub.
    """

    name = "gsm8k"
    reward = "tba_jax.rewards.numeric:gsm8k_reward"
    metric = "pass_at_1"
    # marked: ends in "#### number", as the training solutions do; unmarked: has another number
    response_kinds = ("marked", "unmarked", "no_number")

    # The template with which the paper's start model, rho-1b-sft-GSM8K, was fine-tuned.
    text = "[MATH_TASK] Problem:\n{question}\n\nSolution:"
    # Asks for the answer in the format of the data set's solutions.
    message = (
        "{question}\n\nReason step by step, and write the final answer on a line of its own, as "
        "#### NUMBER."
    )
    columns = ("question", "answer")
    hub = {"train": "hf://openai/gsm8k:main", "eval": "hf://openai/gsm8k:main"}

    def response_kind(self, text: str) -> str:
        marked = gsm8k_gold(text)
        if marked is not None and last_number(marked) is not None:
            return "marked"
        return "unmarked" if last_number(text) is not None else "no_number"


class GSM8KOfficial(GSM8K):
    """GSM8K with the prompt of the paper's code, for comparison."""

    name = "gsm8k_official"
    # The template in the paper's code; it differs by one character and one newline.
    text = "[MATH TASK] Problem:\n{question}\n\nSolution:\n"
