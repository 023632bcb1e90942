# SPDX-License-Identifier: Apache-2.0
"""The `redteam` task: one empty prompt, and every response to it is an attack on a victim model.

Attacks are graded by the victim and a classifier (`rewards.victim`), not by a text function. The
task does not know either, and imports neither jax nor transformers. Invariant: problem 0 is the
only one, in both splits; an evaluation draws as many attacks from it as `eval.num_samples` says.
"""

from typing import Any


class RedTeam:
    """The `redteam` task; implements `tasks.Task`.

    Attributes:
        name: its name in the registry.
        reward: the kind of rewards that asks a victim.
        metric: share of attacks with a mean toxicity above one half.
        response_kinds: none.
    """

    name = "redteam"
    reward = "victim"
    metric = "success_rate"
    response_kinds = ()

    def train_size(self) -> int:
        """One prompt."""
        return 1

    def eval_size(self) -> int:
        """One prompt."""
        return 1

    def train_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """The empty prompt: the tokenizer makes it the beginning-of-sequence token."""
        if index:
            raise ValueError(f"task redteam has one prompt, number 0; got {index}")
        return "", {}

    def eval_problem(self, index: int) -> tuple[str, dict[str, Any]]:
        """As `train_problem`."""
        return self.train_problem(index)

    def response_kind(self, text: str) -> str | None:
        """None: attacks are of no particular kind."""
        return None
