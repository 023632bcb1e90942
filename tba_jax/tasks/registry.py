# SPDX-License-Identifier: Apache-2.0
"""The Task protocol and the registry of tasks.

A task consists of prompts, the columns of its reward, the name of the reward, and the metrics of
its evaluation. To add a task, write its file, and its entry here. Invariant: an index names the
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
    """Interface of a task. Problems are numbered from 0 in each split.

    A prompt is a text, or a list of chat messages that the model's chat template converts to text;
    the messages are then also the column `prompt`, for the reward.

    A task has no given responses; `task.start_path` names a file of them (`start_data`).

    Attributes:
        name: name in the registry.
        reward: default reward: "package.module:function", or a name of `rewards.kinds`;
            empty if the config must name one.
        metric: headline metric of the run's evaluation: "pass_at_1", "win_rate", "success_rate",
            "reward_mean", ... Evaluation must report it.
    """

    name: str
    reward: str
    metric: str

    @property
    def response_kinds(self) -> tuple[str, ...]:
        """Results of `response_kind`; the report shows the share of responses of the first kind."""
        ...

    def train_size(self) -> int:
        """Return the number of training problems."""
        ...

    def eval_size(self) -> int:
        """Return the number of held-out problems."""
        ...

    def train_problem(self, index: int) -> tuple[PromptContent, dict[str, Any]]:
        """Return the prompt of a training problem, and the columns of its reward."""
        ...

    def eval_problem(self, index: int) -> tuple[PromptContent, dict[str, Any]]:
        """Return the prompt of a held-out problem, and the columns of its reward.

        The report shows a column `answer` next to the responses.
        """
        ...

    def response_kind(self, text: str) -> str | None:
        """Return the kind of a response, one of `response_kinds`, or None."""
        ...


class Entry(NamedTuple):
    """A task in the registry, before it is created.

    Attributes:
        task: class of the task; its class attributes are valid for every instance.
        make: (data_path, num_held_out, chat) -> the task.
        has_chat: whether prompts may be user messages in the model's chat template.
        needs_data: whether task.data_path is required.
        makes_problems: whether the task generates its problems; this package then knows their
            length.
        has_one_prompt: whether the task has a single prompt, which every searcher must draw.
        metrics: names of further metric functions of `evaluation`.
    """

    task: type[Task]
    make: Callable[[str, int, bool], Task]
    has_chat: bool = True
    needs_data: bool = False
    makes_problems: bool = False
    has_one_prompt: bool = False
    metrics: tuple[str, ...] = ()


def _rows(task: Callable[[str, bool], Task]) -> Callable[[str, int, bool], Task]:
    """Return a constructor of tasks whose data has a test split."""
    return lambda data_path, _, chat: task(data_path, chat)


def _embedded(task: type[Task]) -> Callable[[str, int, bool], Task]:
    """Return a constructor of a task that generates its own problems."""

    def make(data_path: str, num_held_out: int, chat: bool) -> Task:
        del num_held_out  # the task has its own split
        assert not chat  # validation refuses it
        if data_path:
            raise ValueError(
                f"task.data_path={data_path!r}: task {task.name} generates its own problems. Leave "
                "it empty, or choose another task.name"
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
    """Return the entry of this name: one of TASKS, or reasoning_gym:DATASET.

    Raises:
        ValueError: the name is unknown.
    """
    dataset = name.partition(REASONING_GYM_PREFIX)[2] if name not in TASKS else ""
    if dataset:
        return Entry(
            ReasoningGym, _rows(functools.partial(ReasoningGym, dataset)), makes_problems=True
        )
    if name not in TASKS:
        raise ValueError(f"task.name={name!r} is unknown. Choose one of {NAMES}")
    return TASKS[name]


def get_task(
    name: str, data_path: str, num_held_out: int = 0, chat: bool = False, columns: str = ""
) -> Task:
    """Return the task of this name.

    Args:
        name: a name in the registry, or reasoning_gym:DATASET.
        data_path: source of the rows (see `rows`); empty: the task's own source.
        num_held_out: number of rows to hold out if the data has no test split; 0: such data is
            refused.
        chat: whether to format text prompts as user messages, for models with a chat template.
        columns: new names of columns, as in `task.columns`; only for task custom.

    Raises:
        ValueError: the name is unknown, or the data cannot be used.
    """
    if columns:
        return custom_task(data_path, num_held_out, chat, columns)
    return entry_of(name).make(data_path, num_held_out, chat)


NAMES = ", ".join((*TASKS, f"{REASONING_GYM_PREFIX}DATASET"))
"""Values of task.name, for messages."""
