# SPDX-License-Identifier: Apache-2.0
"""The tasks `reasoning_gym:DATASET`: the procedural problems of reasoning-gym.

The package (extra `reasoning-gym`) is imported when a task is created. Invariant: data set, split
and index determine a problem; a data set is refused if its seed does not determine its problems.
"""

import functools
from typing import Any

from tba_jax.rewards.graders import optional
from tba_jax.tasks.task import Problem, Split, Task, chat

# The package seeds problem i with seed + i, so the seeds of the splits must be far apart.
_SEEDS: dict[Split, int] = {"train": 0, "eval": 2**30}

MESSAGE = (
    "{question}\n\nThink step by step, and write the final answer between <answer> and </answer>."
)


class ReasoningGym(Task):
    """10,000 training and 1,000 held-out problems of one data set, with its default difficulty.

    The splits have different seeds; a data set with few possible problems may still produce the
    same problem in both.

    Raises:
        ValueError: the package or the data set is missing, or the data set cannot be used.
    """

    reward = "tba_jax.rewards.graders:answer_reward"
    response_kinds = ("answered", "unanswered")
    has_chat = makes_problems = True
    sizes = {"train": 10_000, "eval": 1_000}

    def __init__(self, settings: Any) -> None:
        super().__init__(settings)
        self.name, dataset = settings.name, settings.name.partition(":")[2]
        try:
            self._package = optional("reasoning_gym", f"task.name={self.name}", "reasoning-gym")
        except ImportError as error:
            raise ValueError(str(error)) from None
        self._dataset, self._chat = dataset, settings.chat
        self._made = functools.cache(self._make)
        first, again = (
            [data[i]["question"] for i in range(16)]
            for data in (self._make("eval"), self._make("eval"))
        )
        if first != again:
            raise ValueError(
                f"task.name={self.name}: the data set generates different problems for the same "
                "seed, so a run could not be resumed or graded. Choose another data set"
            )

    def _make(self, split: Split) -> Any:
        size = self.sizes[split]
        try:
            return self._package.create_dataset(self._dataset, seed=_SEEDS[split], size=size)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"task.name={self.name}: cannot generate {size:,} problems ({error}). Choose one "
                f"of {', '.join(sorted(self._package.factory.DATASETS))}"
            ) from None

    def problem(self, split: Split, index: int) -> Problem:
        entry = self._made(split)[index]
        message = MESSAGE.format(question=entry["question"])
        place = {"seed": _SEEDS[split], "size": self.sizes[split], "index": index}
        columns = {"answer": str(entry["answer"]), "dataset": self._dataset, **place}
        return chat(message, columns) if self._chat else (f"{message}\n\n", columns)

    def response_kind(self, text: str) -> str:
        return "answered" if "</answer>" in text else "unanswered"
