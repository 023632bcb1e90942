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

    Attributes:
        name: name in the registry.
        reward: default reward: "package.module:function", or a name of `rewards.kinds`;
            empty if the config must name one.
        metric: headline metric of the run's evaluation: "pass_at_1", "win_rate", "success_rate",
            "reward_mean", ... Evaluation must report it.
        response_kinds: results of `response_kind`; the report shows the share of the first.
    """

    name: str
    reward: str
    metric: str

    @property
    def response_kinds(self) -> tuple[str, ...]: ...

    def train_size(self) -> int: ...

    def eval_size(self) -> int: ...

    def train_problem(self, index: int) -> tuple[PromptContent, dict[str, Any]]:
        """Return the prompt of a training problem, and the columns of its reward."""
        ...

    def eval_problem(self, index: int) -> tuple[PromptContent, dict[str, Any]]:
        """Return prompt and columns of a held-out problem; the report shows the column `answer`."""
        ...

    def response_kind(self, text: str) -> str | None:
        """Return the kind of a response, one of `response_kinds`, or None."""
        ...


class Entry(NamedTuple):
    """A task in the registry, before it is created.

    Attributes:
        task: class of the task; its class attributes are valid for every instance.
        make: (data_path, num_held_out, chat) -> the task; None: it is made without arguments.
        has_chat: whether prompts may be user messages in the model's chat template.
        needs_data: whether task.data_path is required.
        makes_problems: whether the task generates its problems; this package then knows their
            length.
        has_one_prompt: whether the task has a single prompt, which every searcher must draw.
        metrics: names of further metric functions of `evaluation`.
    """

    task: type[Task]
    make: Callable[[str, int, bool], Task] | None = None
    has_chat: bool = False
    needs_data: bool = False
    makes_problems: bool = False
    has_one_prompt: bool = False
    metrics: tuple[str, ...] = ()


def _rows(task: Callable[[str, bool], Task]) -> Callable[[str, int, bool], Task]:
    """Return a constructor of tasks whose data has a test split."""
    return lambda data_path, _, chat: task(data_path, chat)


TASKS: dict[str, Entry] = {
    entry.task.name: entry
    for entry in (
        Entry(Arithmetic, makes_problems=True),
        Entry(Custom, custom_task, has_chat=True, needs_data=True),
        Entry(GSM8K, _rows(GSM8K), has_chat=True),
        Entry(GSM8KOfficial, _rows(GSM8KOfficial), has_chat=True),
        Entry(HendrycksMath, _rows(HendrycksMath), has_chat=True),
        Entry(RedTeam, makes_problems=True, has_one_prompt=True, metrics=("attacks",)),
        Entry(TLDR, _rows(TLDR), has_chat=True),
        Entry(TLDRToy, makes_problems=True),
    )
}

NAMES = ", ".join((*TASKS, f"{REASONING_GYM_PREFIX}DATASET"))
"""Values of task.name, for messages."""


def entry_of(name: str) -> Entry:
    """Return the entry of this name: one of TASKS, or reasoning_gym:DATASET.

    Raises:
        ValueError: the name is unknown.
    """
    if name in TASKS:
        return TASKS[name]
    dataset = name.partition(REASONING_GYM_PREFIX)[2]
    if not dataset:
        raise ValueError(f"task.name={name!r} is unknown. Choose one of {NAMES}")
    make = _rows(functools.partial(ReasoningGym, dataset))
    return Entry(ReasoningGym, make, has_chat=True, makes_problems=True)


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
    entry = entry_of(name)
    if entry.makes_problems and data_path:
        raise ValueError(
            f"task.data_path={data_path!r}: task {name} generates its own problems. Leave it "
            "empty, or choose another task.name"
        )
    return entry.task() if entry.make is None else entry.make(data_path, num_held_out, chat)
