# SPDX-License-Identifier: Apache-2.0
"""The `tldr` task: summaries of Reddit posts, for preference tuning with a reward model.

Invariant: a problem's index is its row in the file.
"""

from typing import Any

from tba_jax.tasks.rows import Row, RowTask

MESSAGE = "Write the TL;DR of this Reddit post, as its author would: one short paragraph.\n\n{post}"


class TLDR(RowTask):
    """TL;DR (Stiennon et al., arXiv:2009.01325) as TRL publishes it; files are read on first use.

    The paper's runs read another version of the same posts, already truncated to 512 tokens. Here
    prompts are never truncated; longer ones are left out.

    Args:
        data_path: folder with train.jsonl and test.jsonl whose rows have `prompt` ("SUBREDDIT: ...
            TITLE: ... POST: ... TL;DR:") and `completion` (the author's own summary); empty: the
            hub, evaluated on its validation split as in the paper.
    """

    name = "tldr"
    reward = ""
    metric = "win_rate"
    response_kinds = ("one_paragraph", "several_paragraphs")

    columns = ("prompt", "completion")
    hub = {"train": "hf://trl-lib/tldr", "test": "hf://trl-lib/tldr"}
    hub_eval_split = "validation"

    @staticmethod
    def problem(row: Row) -> tuple[str, dict[str, Any]]:
        """Return the prompt unchanged; column `answer` is the human reference."""
        return row["prompt"], {"answer": row["completion"]}

    @staticmethod
    def message(row: Row) -> str:
        """Return the post with an instruction to summarise it."""
        return MESSAGE.format(post=row["prompt"].removesuffix("TL;DR:").rstrip())

    def response_kind(self, text: str) -> str:
        """Return "one_paragraph", as human summaries have, or "several_paragraphs"."""
        return "several_paragraphs" if "\n" in text.strip() else "one_paragraph"
