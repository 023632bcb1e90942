# SPDX-License-Identifier: Apache-2.0
"""Rows of supervised fine-tuning: prompts and given responses as tokens.

A row has `prompt` and `completion` (or `response`), texts or lists of chat messages, or it has
`messages`. In a chat, each answer of the assistant is a response, and the model's chat template
writes the other tokens.
"""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np

from tba_jax.models.tokenizer import Tokenizer
from tba_jax.tasks.rows import Split, read_rows


class Example(NamedTuple):
    """A prompt with its response; int32 arrays.

    Attributes:
        prompt: [s].
        response: [t], end-of-sequence token included.
        is_answer: bool [t], False at tokens between two answers; None: all tokens belong to one
            answer.
    """

    prompt: np.ndarray
    response: np.ndarray
    is_answer: np.ndarray | None = None


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
    return [_example(row, where, tokenizer) for where, row in read_rows(source, split)]


def _example(row: Mapping[str, Any], where: str, tokenizer: Tokenizer) -> Example:
    prompt = row.get("prompt", "")
    response = row.get("completion", row.get("response"))
    if isinstance(row.get("messages"), list):
        return _chat(row["messages"], where, tokenizer)
    if isinstance(prompt, list) and isinstance(response, list):
        return _chat([*prompt, *response], where, tokenizer)
    if not isinstance(prompt, str) or not isinstance(response, str):
        raise ValueError(
            f"{where}: got the columns {', '.join(map(str, row)) or '(none)'}; wanted texts or "
            "lists of chat messages under 'prompt' and 'completion' (or 'response'), or a list "
            "under 'messages'. Rename the columns of the file"
        )
    tokens = tokenizer.encode(prompt, add_bos=True)
    if not len(tokens):
        raise ValueError(
            f"{where}: the prompt is empty, and this model has no beginning-of-sequence token to "
            "replace it. Give a 'prompt'"
        )
    return Example(tokens, _answer(response, tokenizer, tokenizer.eos_ids[0]))


def _answer(text: str, tokenizer: Tokenizer, end_id: int) -> np.ndarray:
    return np.append(tokenizer.encode(text, add_bos=False), end_id).astype(np.int32)


def _chat(messages: list[Any], where: str, tokenizer: Tokenizer) -> Example:
    """Return a conversation: the assistant's answers and the template's tokens between them."""
    answers = [i for i, x in enumerate(messages) if isinstance(x, dict) and _role(x) == "assistant"]
    if not answers or not answers[0]:
        raise ValueError(
            f"{where}: got {len(messages)} chat messages; wanted an answer with the role "
            "'assistant' after a first message of another role. Complete the row or remove it"
        )
    try:
        parts = list(_parts(messages, answers, tokenizer))
    except ValueError as error:
        raise ValueError(f"{where}: {error}") from None
    prompt, *rest = (tokens for tokens, _ in parts)
    is_answer = np.concatenate([np.full(len(x), own) for x, own in parts[1:]])
    return Example(prompt, np.concatenate(rest), None if len(answers) == 1 else is_answer)


def _role(message: Mapping[str, Any]) -> Any:
    return message.get("role")


def _parts(
    messages: list[Any], answers: list[int], tokenizer: Tokenizer
) -> Iterator[tuple[np.ndarray, bool]]:
    """Yield (tokens, whether the tokens are an answer) for each part of a conversation.

    Raises:
        ValueError: the template refuses the messages, or changes earlier messages when a message
            is added.
    """
    texts = [tokenizer.format_chat(messages[:i]) for i in answers]
    yield tokenizer.encode(texts[0], add_bos=True), False
    for number, i in enumerate(answers):
        answer = messages[i]["content"]
        is_last = number == len(answers) - 1
        more = [*messages[: i + 1], {"role": "user", "content": "-"}]
        after = _rest(tokenizer.format_chat(more) if is_last else texts[number + 1], texts[number])
        rest = _rest(after, answer)
        ends = ((x, tokenizer.decode([x], skip_special=False)) for x in tokenizer.eos_ids)
        end_id, end = next(
            (x for x in ends if x[1] and rest.startswith(x[1])), (tokenizer.eos_ids[0], "")
        )
        yield _answer(answer, tokenizer, end_id), True
        if not is_last:
            yield tokenizer.encode(rest.removeprefix(end), add_bos=False), False


def _rest(text: str, before: str) -> str:
    """Return the text of a formatted conversation after its beginning `before`."""
    if not text.startswith(before):
        raise ValueError(
            "the chat template changes earlier turns when the conversation continues (templates "
            "that remove thinking do this). Set a template that keeps answers unchanged, or give "
            "each answer a row of its own"
        )
    return text[len(before) :]
