# SPDX-License-Identifier: Apache-2.0
"""Rows of supervised fine-tuning as tokens: `prompt` and `completion` (or `response`).

Both are texts, or lists of chat messages; a row may also have the chat as `messages`. A chat's last
message, of the assistant, is the response in the form that the chat template gives it.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from tba_jax.models.tokenizer import Tokenizer
from tba_jax.tasks.config import template_options
from tba_jax.tasks.custom import is_chat
from tba_jax.tasks.rows import Split, read_rows

ANSWER = "assistant"


class Example(NamedTuple):
    """A prompt with its response; int32 arrays.

    Attributes:
        prompt: [s].
        response: [t], end-of-sequence token included.
    """

    prompt: np.ndarray
    response: np.ndarray


def read_examples(
    source: str, split: Split, tokenizer: Tokenizer, chat: bool | str = False
) -> list[Example]:
    """Return the examples of a split, in the order of its rows.

    Args:
        source: as in `rows`: a file, a folder or a data set on the hub.
        chat: as `task.chat`.

    Raises:
        ValueError: the source or a row is unusable (the message has the place), or the model has
            no end-of-sequence token.
    """
    if not tokenizer.eos_ids:
        raise ValueError("the tokenizer_config.json of the model has no eos_token. Set one")
    found, options = [], template_options(chat)
    for where, row in read_rows(source, split):
        prompt, response = row.get("prompt", ""), row.get("completion", row.get("response"))
        messages = row.get("messages") or [*_messages("user", prompt), *_messages(ANSWER, response)]
        in_template = bool(chat) or "messages" in row or isinstance(response, list)
        is_text = isinstance(prompt, str) and isinstance(response, str)
        is_answered = is_chat(messages) and messages[-1]["role"] == ANSWER
        if not (is_answered if in_template else is_text):
            raise ValueError(
                f"{where}: got the columns {', '.join(map(str, row)) or '(none)'}; wanted texts "
                "under 'prompt' and 'completion' (or 'response'), or a chat that ends with a "
                "message of the assistant. Rename the columns of the file"
            )
        try:
            texts: Any = prompt, response
            if in_template:
                texts = _in_template(messages, tokenizer, options)
            tokens = tokenizer.encode(texts[0], add_bos=not in_template)
            answer = np.append(tokenizer.encode(texts[1], add_bos=False), tokenizer.eos_ids[0])
        except ValueError as error:
            raise ValueError(f"{where}: {error}") from error
        if not len(tokens):
            raise ValueError(
                f"{where}: the prompt is empty, and this model has no beginning-of-sequence token "
                "to replace it. Give a 'prompt'"
            )
        found.append(Example(tokens, answer.astype(np.int32)))
    return found


def _messages(role: str, content: Any) -> list[Any]:
    return content if isinstance(content, list) else [{"role": role, "content": content}]


def _in_template(
    messages: list[dict[str, Any]], tokenizer: Tokenizer, options: Mapping[str, Any]
) -> tuple[str, str]:
    """Return the texts of a chat before its last answer, and of this answer without its end.

    If the template drops a part of the answer, such as its thinking, the answer's own text is used,
    without a beginning that the template has already written.
    """
    start = tokenizer.format_chat(messages[:-1], variables=options)
    whole = tokenizer.format_chat(messages, variables=options)
    content, shown = messages[-1]["content"], whole.removeprefix(start)
    if whole.startswith(start) and "".join(shown.split()).endswith("".join(content.split())):
        return start, shown
    sizes = range(len(content), -1, -1)
    return start, content[next(n for n in sizes if start.endswith(content[:n])) :]
