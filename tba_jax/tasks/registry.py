# SPDX-License-Identifier: Apache-2.0
"""The tasks by name. To add a task, write its file, and name its class here."""

from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.custom import Custom
from tba_jax.tasks.published import GSM8K, TLDR, GSM8KOfficial, HendrycksMath
from tba_jax.tasks.reasoning_gym import ReasoningGym
from tba_jax.tasks.redteam import RedTeam
from tba_jax.tasks.task import Task
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
