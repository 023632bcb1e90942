# SPDX-License-Identifier: Apache-2.0
"""Tasks: prompts by number, and the columns that their rewards need."""

from collections.abc import Mapping
from typing import Any, ClassVar, Literal

Messages = list[dict[str, str]]
PromptContent = str | Messages
Problem = tuple[PromptContent, dict[str, Any]]
"""Prompt, and the columns of its reward. The report shows the column `answer`."""
Split = Literal["train", "eval"]


class Task:
    """Base of tasks. Problems are numbered from 0 in each split.

    A prompt is a text, or a list of chat messages that the model's chat template converts to text;
    the messages are then also the column `prompt`, for the reward. Invariant: an index names the
    same problem in every process and every run.

    Attributes:
        name: name in the registry.
        reward: default reward: "package.module:function", or `rewards.functions.VICTIM`;
            empty if the config must name one.
        metric: headline metric of the run's evaluation: "pass_at_1", "win_rate", "success_rate",
            "reward_mean", ... Evaluation must report it.
        response_kinds: results of `response_kind`; the report shows the share of the first.
        has_chat: whether prompts may be user messages in the model's chat template.
        sizes: number of problems of each split, unless the data decides it.
        makes_problems: whether the task generates its problems; this package then knows their
            length.
        data_sets: names of several data sets, which have metrics of their own.
        chat_options: options of the chat template, as in `task.chat`.
    """

    name = ""
    reward = ""
    metric = "reward_mean"
    response_kinds: tuple[str, ...] = ()
    has_chat: ClassVar[bool] = False
    sizes: ClassVar[Mapping[Split, int]] = {}
    makes_problems: ClassVar[bool] = False
    data_sets: tuple[str, ...] = ()
    chat_options: Mapping[str, Any] = {}

    def __init__(self, settings: Any = None) -> None:
        """Take `TaskSettings`; tasks without data need none."""
        if settings is not None:
            self.chat_options = settings.chat_options

    def size(self, split: Split) -> int:
        """Return the number of problems of a split."""
        return self.sizes[split]

    def problem(self, split: Split, index: int) -> Problem:
        """Return a problem of a split."""
        raise NotImplementedError

    def place(self, split: Split, index: int) -> str:
        """Return the place of a problem, such as file and line, for messages."""
        return f"{split} problem {index} of task {self.name}"

    def first_row(self) -> tuple[str, Mapping[str, Any]]:
        """Return text and columns of the first held-out problem; a chat is the column `prompt`."""
        prompt, columns = self.problem("eval", 0)
        return prompt if isinstance(prompt, str) else prompt[-1]["content"], columns

    def response_kind(self, text: str) -> str | None:
        """Return the kind of a response, one of `response_kinds`, or None."""
        return None


def chat(prompt: PromptContent, columns: dict[str, Any]) -> Problem:
    """Return the problem whose prompt is these messages, or one user message with this text."""
    messages = [{"role": "user", "content": prompt}] if isinstance(prompt, str) else prompt
    return messages, {**columns, "prompt": messages}
