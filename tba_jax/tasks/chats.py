# SPDX-License-Identifier: Apache-2.0
"""Chat prompts: lists of messages that the model's chat template converts to text.

Invariant: reward functions receive the messages of a chat as the column `prompt`.
"""

from typing import Any

Messages = list[dict[str, str]]
PromptContent = str | Messages
Problem = tuple[PromptContent, dict[str, Any]]


def chat(messages: Messages, columns: dict[str, Any]) -> Problem:
    """Return the problem with these messages as its prompt."""
    return messages, {**columns, "prompt": messages}


def asked_by_user(text: str, columns: dict[str, Any]) -> Problem:
    """Return the problem with one user message as its prompt."""
    return chat([{"role": "user", "content": text}], columns)
