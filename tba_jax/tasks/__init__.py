# SPDX-License-Identifier: Apache-2.0
"""The Task protocol and the registry of tasks.

A task is prompts, the columns that grading needs, and the name of the reward. It does not know
tokenizers, models or searchers, and imports neither jax nor transformers. Invariant: a problem's
index means the same problem in every process and every run.
"""

from collections.abc import Callable
from typing import Any, Protocol

from tba_jax.tasks.arithmetic import Arithmetic
from tba_jax.tasks.gsm8k import GSM8K
from tba_jax.tasks.hendrycks_math import HendrycksMath


class Task(Protocol):
    """What a task offers. Problems are numbered from 0 in each split.

    Attributes:
        name: its name in the registry.
        reward: "package.module:function", the reward used unless the config names another.
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

    def train_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """Prompt text of a training problem, and the columns its reward needs."""
        ...

    def eval_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """Prompt text of a held-out problem, and the columns its reward needs.

        A column `answer`, where there is one, is shown beside the responses in the report.
        """
        ...

    def response_kind(self, text: str) -> str | None:
        """Which of `response_kinds` a response is; None for none of them."""
        ...


def _arithmetic(data_path: str) -> Task:
    if data_path:
        raise ValueError(
            f"task.data_path = {data_path!r}, but task arithmetic makes its own problems; "
            "leave it empty, or choose another task.name"
        )
    return Arithmetic()


_TASKS: dict[str, Callable[[str], Task]] = {
    "arithmetic": _arithmetic,
    "gsm8k": GSM8K,
    "math": HendrycksMath,
}


def get_task(name: str, data_path: str) -> Task:
    """The task of this name.

    Args:
        name: one of the registry's.
        data_path: folder with train.jsonl and test.jsonl; empty: the task's own source.

    Raises:
        ValueError: unknown name, or data that cannot be used.
    """
    if name not in _TASKS:
        raise ValueError(f"task.name = {name!r}; want one of {', '.join(_TASKS)}")
    return _TASKS[name](data_path)
