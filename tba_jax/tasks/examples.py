# SPDX-License-Identifier: Apache-2.0
"""Rows of supervised fine-tuning: texts `prompt` and `completion` (or `response`) as tokens."""

from typing import NamedTuple

import numpy as np

from tba_jax.models.tokenizer import Tokenizer
from tba_jax.tasks.rows import Split, read_rows


class Example(NamedTuple):
    """A prompt with its response; int32 arrays.

    Attributes:
        prompt: [s].
        response: [t], end-of-sequence token included.
    """

    prompt: np.ndarray
    response: np.ndarray


def read_examples(source: str, split: Split, tokenizer: Tokenizer) -> list[Example]:
    """Return the examples of a split, in the order of its rows.

    Args:
        source: as in `rows`: a file, a folder or a data set on the hub.

    Raises:
        ValueError: the source or a row is unusable (the message has the place), or the model has
            no end-of-sequence token.
    """
    if not tokenizer.eos_ids:
        raise ValueError("this model has no end-of-sequence token, so no response can end")
    found = []
    for where, row in read_rows(source, split):
        prompt, response = row.get("prompt", ""), row.get("completion", row.get("response"))
        if not isinstance(prompt, str) or not isinstance(response, str):
            raise ValueError(
                f"{where}: got the columns {', '.join(map(str, row)) or '(none)'}; wanted texts "
                "under 'prompt' and 'completion' (or 'response'). Rename the columns of the file"
            )
        tokens = tokenizer.encode(prompt, add_bos=True)
        if not len(tokens):
            raise ValueError(
                f"{where}: the prompt is empty, and this model has no beginning-of-sequence token "
                "to replace it. Give a 'prompt'"
            )
        answer = np.append(tokenizer.encode(response, add_bos=False), tokenizer.eos_ids[0])
        found.append(Example(tokens, answer.astype(np.int32)))
    return found
