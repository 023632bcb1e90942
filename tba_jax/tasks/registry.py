# SPDX-License-Identifier: Apache-2.0
"""The tasks by name. To add a task, write its file, and name its class here."""

from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.custom import Custom
from tba_jax.tasks.gsm8k import GSM8K, GSM8KOfficial
from tba_jax.tasks.hendrycks_math import HendrycksMath
from tba_jax.tasks.mixture import Mixture, data_sets
from tba_jax.tasks.reasoning_gym import ReasoningGym
from tba_jax.tasks.redteam import RedTeam
from tba_jax.tasks.rows import RowTask
from tba_jax.tasks.task import Task
from tba_jax.tasks.tldr import TLDR
from tba_jax.tasks.tldr_toy import TLDRToy

REASONING_GYM_PREFIX = "reasoning_gym:"
TASKS: dict[str, type[Task]] = {
    task.name: task
    for task in [Arithmetic, Custom, GSM8K, GSM8KOfficial, HendrycksMath, RedTeam, TLDR, TLDRToy]
}
NAMES = ", ".join((*TASKS, f"{REASONING_GYM_PREFIX}DATASET"))
"""Values of task.name, for messages."""


def task_class(name: str) -> type[Task]:
    """Return the class of a task: one of TASKS, or reasoning_gym:DATASET.

    Raises:
        ValueError: the name is unknown.
    """
    if name.partition(REASONING_GYM_PREFIX)[2]:
        return ReasoningGym
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
    task = task_class(name)
    if task.makes_problems and data_path:
        raise ValueError(
            f"task.data_path={data_path!r}: task {name} generates its own problems. Leave it "
            "empty, or choose another task.name"
        )
    if task is Custom:
        sets, settings = data_sets(data_path), (num_held_out, chat, columns)
        return Mixture(sets, *settings) if len(sets) > 1 else Custom(data_path, *settings)
    if issubclass(task, ReasoningGym):
        return task(name.removeprefix(REASONING_GYM_PREFIX), chat)
    return task(data_path, chat) if issubclass(task, RowTask) else task()
