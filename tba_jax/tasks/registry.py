# SPDX-License-Identifier: Apache-2.0
"""The Task protocol and the registry of tasks: one entry each.

A task is prompts, the columns that grading needs, the name of its reward, and what its evaluation
measures beside it. To add one, write its file and its entry here. Tasks do not know tokenizers,
models or searchers, and import neither jax nor transformers. Invariant: a problem's index means the
same problem in every process and every run.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.chats import PromptContent
from tba_jax.tasks.custom import Custom
from tba_jax.tasks.gsm8k import GSM8K, GSM8KOfficial
from tba_jax.tasks.hendrycks_math import HendrycksMath
from tba_jax.tasks.mixture import custom_task
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
        reward: the reward used unless the config names another: "package.module:function", or the
            name of one of `rewards.kinds`; empty where the config must name one.
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


class Entry(NamedTuple):
    """A task as a config names it, before it is made.

    Attributes:
        task: its class; what that declares holds for every task made of it.
        make: (data_path, num_held_out, chat) -> the task.
        has_chat: prompts may be a user's messages in the model's chat template.
        needs_data: task.data_path must be given.
        makes_problems: there is no data, so that how long its prompts are is this package's affair.
        has_one_prompt: there is a single prompt, which every searcher must draw.
        metrics: metric functions of its evaluation beside those of every task, by the names that
            `evaluation` has for them.
    """

    task: type[Task]
    make: Callable[[str, int, bool], Task]
    has_chat: bool = True
    needs_data: bool = False
    makes_problems: bool = False
    has_one_prompt: bool = False
    metrics: tuple[str, ...] = ()


def _rows(task: Callable[[str, bool], Task]) -> Callable[[str, int, bool], Task]:
    """Tasks whose data has its own split."""
    return lambda data_path, _, chat: task(data_path, chat)


def _embedded(task: type[Task]) -> Callable[[str, int, bool], Task]:
    """A task that makes its own problems."""

    def make(data_path: str, num_held_out: int, chat: bool) -> Task:
        del num_held_out  # it has a split of its own
        assert not chat  # validation refuses it
        if data_path:
            raise ValueError(
                f"task.data_path = {data_path!r}, but task {task.name} makes its own problems; "
                "leave it empty, or choose another task.name"
            )
        return task()

    return make


TASKS: dict[str, Entry] = {
    entry.task.name: entry
    for entry in (
        Entry(Arithmetic, _embedded(Arithmetic), has_chat=False, makes_problems=True),
        Entry(Custom, custom_task, needs_data=True),
        Entry(GSM8K, _rows(GSM8K)),
        Entry(GSM8KOfficial, _rows(GSM8KOfficial)),
        Entry(HendrycksMath, _rows(HendrycksMath)),
        Entry(
            RedTeam,
            _embedded(RedTeam),
            has_chat=False,
            makes_problems=True,
            has_one_prompt=True,
            metrics=("attacks",),
        ),
        Entry(TLDR, _rows(TLDR)),
        Entry(TLDRToy, _embedded(TLDRToy), has_chat=False, makes_problems=True),
    )
}


def entry_of(name: str) -> Entry:
    """The entry of this name: one of TASKS, or reasoning_gym:DATASET.

    Raises:
        ValueError: unknown name.
    """
    dataset = name.partition(REASONING_GYM_PREFIX)[2] if name not in TASKS else ""
    if dataset:
        return Entry(
            ReasoningGym, _rows(functools.partial(ReasoningGym, dataset)), makes_problems=True
        )
    if name not in TASKS:
        raise ValueError(f"task.name = {name!r}; want one of {NAMES}")
    return TASKS[name]


def get_task(
    name: str, data_path: str, num_held_out: int = 0, chat: bool = False, columns: str = ""
) -> Task:
    """The task of this name.

    Args:
        name: one of the registry's, or reasoning_gym:DATASET.
        data_path: where its rows are (see `rows`); empty: the task's own source.
        num_held_out: rows to hold out where the data has no test split; 0: such data is refused.
        chat: prompts that are texts become a user's messages, for models with a chat template.
        columns: new names of columns, as `task.columns`; of task custom alone.

    Raises:
        ValueError: unknown name, or data that cannot be used.
    """
    if columns:
        return custom_task(data_path, num_held_out, chat, columns)
    return entry_of(name).make(data_path, num_held_out, chat)


NAMES = ", ".join((*TASKS, f"{REASONING_GYM_PREFIX}DATASET"))
"""What task.name may be, for messages."""
