# SPDX-License-Identifier: Apache-2.0
"""The tasks `reasoning_gym:DATASET`: the procedural problems of reasoning-gym.

The package (extra `reasoning-gym`) is imported when a task is created. Invariant: data set, split
and index determine a problem; a data set is refused if its seed does not determine its problems.
"""

import importlib
from typing import Any

from tba_jax.tasks.chats import Problem, asked_by_user

TRAIN_SIZE = 10_000
EVAL_SIZE = 1_000
# The package seeds problem i with seed + i, so the seeds of the splits must be far apart.
TRAIN_SEED = 0
EVAL_SEED = 2**30
# Number of problems that are generated twice at the start, to test that they are equal.
NUM_COMPARED = 16

MESSAGE = (
    "{question}\n\nThink step by step, and write the final answer between <answer> and </answer>."
)


class ReasoningGym:
    """10,000 training and 1,000 held-out problems of one data set, with its default difficulty.

    The splits have different seeds; a data set with few possible problems may still produce the
    same problem in both.

    Args:
        dataset: name in reasoning-gym, such as "chain_sum".
        data_path: not used: the registry refuses one.

    Raises:
        ValueError: the package or the data set is missing, or the data set cannot be used.
    """

    reward = "tba_jax.rewards.reasoning_gym:answer_reward"
    metric = "reward_mean"
    response_kinds = ("answered", "unanswered")

    def __init__(self, dataset: str, data_path: str, chat: bool) -> None:
        self.name = f"reasoning_gym:{dataset}"
        try:
            # An import statement would make type checkers import this module itself.
            package: Any = importlib.import_module("reasoning_gym")
        except ImportError as error:
            raise ValueError(
                f"task.name={self.name} needs the package reasoning-gym ({error}). Install it: "
                "pip install 'tba_jax[reasoning-gym]'"
            ) from None
        names = sorted(package.factory.DATASETS)
        if dataset not in names:
            raise ValueError(
                f"task.name={self.name}: reasoning-gym has no such data set. Choose one of "
                f"{', '.join(names)}"
            )
        self._dataset = dataset
        self._chat = chat
        self._data: dict[int, Any] = {}  # by seed
        self._create = package.create_dataset
        first, again = (
            [data[i]["question"] for i in range(NUM_COMPARED)]
            for data in (self._make(EVAL_SEED, EVAL_SIZE), self._make(EVAL_SEED, EVAL_SIZE))
        )
        if first != again:
            raise ValueError(
                f"task.name={self.name}: the data set generates different problems for the same "
                "seed, so a run could not be resumed or graded. Choose another data set"
            )

    def _make(self, seed: int, size: int) -> Any:
        try:
            return self._create(self._dataset, seed=seed, size=size)
        except (AssertionError, ValueError) as error:
            raise ValueError(
                f"task.name={self.name}: reasoning-gym failed to generate {size:,} problems "
                f"({error}). Choose another data set"
            ) from None

    def train_size(self) -> int:
        return TRAIN_SIZE

    def eval_size(self) -> int:
        return EVAL_SIZE

    def train_problem(self, index: int) -> Problem:
        return self._problem(TRAIN_SEED, TRAIN_SIZE, index)

    def eval_problem(self, index: int) -> Problem:
        return self._problem(EVAL_SEED, EVAL_SIZE, index)

    def _problem(self, seed: int, size: int, index: int) -> Problem:
        if seed not in self._data:
            self._data[seed] = self._make(seed, size)
        entry = self._data[seed][index]
        message = MESSAGE.format(question=entry["question"])
        place = {"dataset": self._dataset, "seed": seed, "size": size, "index": index}
        columns = {"answer": str(entry["answer"]), **place}
        return asked_by_user(message, columns) if self._chat else (f"{message}\n\n", columns)

    def response_kind(self, text: str) -> str:
        """Return "answered" if the response contains </answer>, else "unanswered"."""
        return "answered" if "</answer>" in text else "unanswered"
