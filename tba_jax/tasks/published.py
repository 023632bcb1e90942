# SPDX-License-Identifier: Apache-2.0
"""The tasks of published data sets: `gsm8k`, `gsm8k_official`, `math` and `tldr`."""

from typing import Any

from tba_jax.rewards.graders import gsm8k_gold, last_boxed, last_number
from tba_jax.tasks import rows
from tba_jax.tasks.custom import Custom


class RowTask(Custom):
    """Rows with the columns of a published data set; without `task.data_path`, from the hub.

    Attributes:
        text: prompt of a row, with the names of columns in braces.
        message: the user message that replaces the prompt in a chat.
        columns: columns of a row that are read; the last is the reward's column `answer`.
        hub: source of the training rows.
        hub_eval: source and split of the held-out rows.
        is_disjoint: whether training rows of the hub with a held-out problem are left out.
    """

    text: str
    message: str
    columns: tuple[str, ...]
    hub: str
    hub_eval: tuple[str, rows.Split]
    is_disjoint = False

    def __init__(self, settings: Any) -> None:
        super().__init__(settings, settings.data_path or self.hub)
        if not settings.data_path:
            self._sets[0].test = self.hub_eval
            self._sets[0].is_disjoint = self.is_disjoint

    def _read(self, row: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
        for column in self.columns:
            if not isinstance(row.get(column), str):
                got = f"{column} = {row.get(column)!r:.80}, of {', '.join(map(str, row))}"
                raise ValueError(
                    f"{where}: {got}; wanted text in column {column!r}. Correct the row"
                )
        form = self.message if self._chat else self.text
        return form.format(**row), {"answer": row[self.columns[-1]]}


class GSM8K(RowTask):
    """7,473 training and 1,319 held-out problems; the column `answer` is the whole gold solution.

    Args:
        data_path: folder with train.jsonl and test.jsonl as OpenAI published them; empty: the hub.
    """

    name = "gsm8k"
    reward = "tba_jax.rewards.graders:gsm8k_reward"
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
    hub = "hf://openai/gsm8k:main"
    hub_eval = hub, "test"

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


class HendrycksMath(RowTask):
    """MATH, the competition problems of Hendrycks et al.; `answer` is the whole gold solution.

    Invariant: MATH-500 problems are never trained on.

    Args:
        data_path: folder with train.jsonl and test.jsonl whose rows have `problem` and `solution`
            (with the answer in \\boxed{}); empty: the hub.
    """

    name = "math"
    reward = "tba_jax.rewards.graders:math_reward"
    metric = "pass_at_1"
    response_kinds = ("boxed", "unboxed")

    message = "{problem}\n\nReason step by step, and put the final answer within \\boxed{{}}."
    text = f"Problem:\n{message}\n\nSolution:"
    columns = ("problem", "solution")
    # The 12,000 problems outside MATH-500, and MATH-500 itself.
    # Two publishers made the two data sets: some problems are in both.
    hub = "hf://nlile/hendrycks-MATH-benchmark"
    hub_eval = "hf://HuggingFaceH4/MATH-500", "test"
    is_disjoint = True

    def response_kind(self, text: str) -> str:
        return "unboxed" if last_boxed(text) is None else "boxed"


class TLDR(RowTask):
    """TL;DR summaries of Reddit posts (Stiennon et al., arXiv:2009.01325) as TRL publishes them.

    The column `answer` is the human reference; human summaries have one paragraph. The paper's runs
    read another version of the same posts, already truncated to 512 tokens. Here prompts are never
    truncated; longer ones are left out.

    Args:
        data_path: folder with train.jsonl and test.jsonl whose rows have `prompt` ("SUBREDDIT: ...
            TITLE: ... POST: ... TL;DR:") and `completion` (the author's own summary); empty: the
            hub, evaluated on its validation split as in the paper.
    """

    name = "tldr"
    metric = "win_rate"
    response_kinds = ("one_paragraph", "several_paragraphs")

    text = "{prompt}"
    message = (
        "Write the TL;DR of this Reddit post, as its author would: one short paragraph.\n\n{prompt}"
    )
    columns = ("prompt", "completion")
    hub = "hf://trl-lib/tldr"
    hub_eval = hub, "validation"

    def _read(self, row: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
        prompt, columns = super()._read(row, where)
        return prompt.removesuffix("TL;DR:").rstrip() if self._chat else prompt, columns

    def response_kind(self, text: str) -> str:
        return "several_paragraphs" if "\n" in text.strip() else "one_paragraph"
