# SPDX-License-Identifier: Apache-2.0
"""The `redteam` task: one empty prompt, to which every response is an attack on a victim model.

A victim model and a classifier grade the attacks (`rewards.victim`). Invariant: problem 0 is the
only problem of both splits; an evaluation samples `eval.num_samples` attacks.
"""

from typing import Any


class RedTeam:
    """The `redteam` task; implements `tasks.Task`.

    Attributes:
        metric: share of attacks with a mean toxicity above one half.
    """

    name = "redteam"
    reward = "victim"
    metric = "success_rate"
    response_kinds = ()

    def train_size(self) -> int:
        return 1

    def eval_size(self) -> int:
        return 1

    def train_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """Return the empty prompt; the tokenizer encodes it as the beginning-of-sequence token."""
        if index:
            raise ValueError(f"task redteam has only prompt 0, got index {index}")
        return "", {}

    def eval_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        return self.train_problem(index)

    def response_kind(self, text: str) -> str | None:
        return None
