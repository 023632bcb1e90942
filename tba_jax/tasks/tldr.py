# SPDX-License-Identifier: Apache-2.0
"""The `tldr` task: summaries of Reddit posts, for preference tuning with a reward model."""

from typing import Any

from tba_jax.tasks.published import RowTask


class TLDR(RowTask):
    """TL;DR (Stiennon et al., arXiv:2009.01325) as TRL publishes it.

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
    hub = {"train": "hf://trl-lib/tldr", "eval": "hf://trl-lib/tldr"}
    hub_eval_split = "validation"

    def _read(self, row: dict[str, Any], where: str) -> tuple[str, dict[str, Any]]:
        prompt, columns = super()._read(row, where)
        return prompt.removesuffix("TL;DR:").rstrip() if self._chat else prompt, columns

    def response_kind(self, text: str) -> str:
        return "several_paragraphs" if "\n" in text.strip() else "one_paragraph"
