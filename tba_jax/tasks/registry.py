# SPDX-License-Identifier: Apache-2.0
"""The Task protocol and the registry of tasks.

A task is prompts, the columns that grading needs, and the name of the reward. It does not know
tokenizers, models or searchers, and imports neither jax nor transformers. Invariant: a problem's
index means the same problem in every process and every run.
"""

from collections.abc import Callable
from typing import Any, Protocol

from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.chats import PromptContent
from tba_jax.tasks.custom import Custom
from tba_jax.tasks.gsm8k import GSM8K
from tba_jax.tasks.hendrycks_math import HendrycksMath
from tba_jax.tasks.reasoning_gym import ReasoningGym
from tba_jax.tasks.redteam import RedTeam
from tba_jax.tasks.tldr import TLDR
from tba_jax.tasks.tldr_toy import TLDRToy

REASONING_GYM_PREFIX = "reasoning_gym:"


class Task(Protocol):
    """What a task offers. Problems are numbered from 0 in each split.

    A prompt is a text, or a list of chat messages that become one by the model's chat template; the
    messages are then the column `prompt` too, for the reward.

    Responses that exist before the run are not part of a task: `task.start_path` names a file of
    them (`start_data`).

    Attributes:
        name: its name in the registry.
        reward: "package.module:function", the reward used unless the config names another; empty
            where the config must, or where rewards come from models (`rewarding.make_rewards`).
        metric: name of the evaluation metric that stands for the run (its headline): "pass_at_1",
            "win_rate", "success_rate", "reward_mean", ... Evaluation must report it.
    """

    name: str
    reward: str
    metric: str

    @property
    def response_kinds(self) -> tuple[str, ...]:
        """What `response_kind` returns; the one whose share is of interest comes first."""
        ...

    def train_size(self) -> int:
        """Number of training problems."""
        ...

    def eval_size(self) -> int:
        """Number of held-out problems."""
        ...

    def train_problem(self, index: int) -> tuple[PromptContent, dict[str, Any]]:
        """Prompt of a training problem, and the columns its reward needs."""
        ...

    def eval_problem(self, index: int) -> tuple[PromptContent, dict[str, Any]]:
        """Prompt of a held-out problem, and the columns its reward needs.

        A column `answer`, where there is one, is shown beside the responses in the report.
        """
        ...

    def response_kind(self, text: str) -> str | None:
        """Which of `response_kinds` a response is; None for none of them."""
        ...


def _embedded(name: str, task: Callable[[], Task]) -> Callable[[str, int, bool], Task]:
    """A task that makes its own problems."""

    def make(data_path: str, num_held_out: int, chat: bool) -> Task:
        del num_held_out  # it has a split of its own
        assert not chat  # validation refuses it
        if data_path:
            raise ValueError(
                f"task.data_path = {data_path!r}, but task {name} makes its own problems; "
                "leave it empty, or choose another task.name"
            )
        return task()

    return make


_TASKS: dict[str, Callable[[str, int, bool], Task]] = {
    "arithmetic": _embedded("arithmetic", Arithmetic),
    "custom": Custom,
    "gsm8k": lambda data_path, _, chat: GSM8K(data_path, chat),
    "math": lambda data_path, _, chat: HendrycksMath(data_path, chat),
    "tldr": lambda data_path, _, chat: TLDR(data_path, chat),
    "tldr_toy": _embedded("tldr_toy", TLDRToy),
    "redteam": _embedded("redteam", RedTeam),
}


def get_task(name: str, data_path: str, num_held_out: int = 0, chat: bool = False) -> Task:
    """The task of this name.

    Args:
        name: one of the registry's, or reasoning_gym:DATASET.
        data_path: where its rows are (see `rows`); empty: the task's own source.
        num_held_out: rows to hold out where the data has no test split; 0: such data is refused.
        chat: prompts that are texts become a user's messages, for models with a chat template.

    Raises:
        ValueError: unknown name, or data that cannot be used.
    """
    if name.startswith(REASONING_GYM_PREFIX):
        return ReasoningGym(name.removeprefix(REASONING_GYM_PREFIX), data_path, chat)
    if name not in _TASKS:
        raise ValueError(
            f"task.name = {name!r}; want one of {', '.join(_TASKS)}, or "
            f"{REASONING_GYM_PREFIX}DATASET"
        )
    return _TASKS[name](data_path, num_held_out, chat)
