# SPDX-License-Identifier: Apache-2.0
"""Prompts that are chats: lists of messages, which the model's chat template turns into text.

It does not know templates (`tokenizer` does) or where messages come from. Invariant: the messages
of a chat are the column `prompt` of its problem, where reward functions find them.
"""

from typing import Any

Messages = list[dict[str, str]]
PromptContent = str | Messages
Problem = tuple[PromptContent, dict[str, Any]]


def chat(messages: Messages, columns: dict[str, Any]) -> Problem:
    """The problem whose prompt these messages are."""
    return messages, {**columns, "prompt": messages}


def asked_by_user(text: str, columns: dict[str, Any]) -> Problem:
    """The problem whose prompt is one message of the user's."""
    return chat([{"role": "user", "content": text}], columns)
