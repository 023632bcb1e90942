# SPDX-License-Identifier: Apache-2.0
"""Rewards by functions that exist only in this process, such as functions of a notebook.

A call that hangs is not stopped, and a call that crashes ends the run. Invariant: as in
`RewardPool`, a failure is a named reason and never a reward.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from tba_jax.rewards import functions
from tba_jax.rewards.pool import Call, RewardFailure
from tba_jax.rewards.source import ScoreResult


class InProcessRewards:
    """Reward source that scores responses in the calling thread.

    Args:
        names: names of the functions, separated by commas.
    """

    def __init__(
        self,
        names: str,
        max_failure_rate: float,
        weights: Sequence[float],
        row: tuple[str, Mapping[str, Any]],
        *,
        is_part: bool,
    ) -> None:
        # Running a notebook cell again defines another function of the same name.
        functions.forget_loaded()
        self._functions = functions.split_functions(names)
        self._weights = tuple(weights) or (1.0,) * len(self._functions)
        self._max_failure_rate = max_failure_rate
        self._harmless = (None, "reward_none") if is_part else (None,)
        self._row = row

    def check(self) -> None:
        """Try the functions on `row`.

        Raises:
            ValueError: a function cannot be used; the message has its traceback.
        """
        prompt, columns = self._row
        error = functions.load_error(self._functions, tuple(columns))
        if error is None:
            call = Call.on_row(self._functions, prompt, columns)
            error = functions.trial_error(self._functions, call.arguments(range(1)))
        if error is not None:
            raise ValueError("\n".join(filter(None, error)))

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[np.ndarray] = (),
        has_eos: Sequence[bool] = (),
    ) -> ScoreResult:
        """Score responses as `RewardPool.score` does, without deadlines.

        Raises:
            RewardFailure: more than `max_failure_rate` of the items failed.
            ValueError: a function returned something else than a list of numbers or None.
        """
        del has_eos
        call = Call(self._functions, prompts, completions, columns, completion_ids)
        n = len(completions)
        for number, name in enumerate(self._functions):
            if not self._score(call, number, name, range(n)):
                for item in range(n):
                    self._score(call, number, name, range(item, item + 1))
        reasons = call.failures()
        num_failed = n - sum(map(reasons.count, self._harmless))
        if num_failed > self._max_failure_rate * n:
            raise RewardFailure(
                f"reward function {', '.join(self._functions)} failed on {num_failed} of {n} "
                f"items, above reward.max_failure_rate = {self._max_failure_rate}. First failure:\n"
                f"{call.first_traceback}"
            )
        return call.result(functions.part_names(self._functions), self._weights)

    def _score(self, call: Call, number: int, name: str, items: range) -> bool:
        """Call a function on some items, and record the results; return whether all have one."""
        outcome = functions.score_chunk(name, *call.arguments(items))
        if outcome.unusable:
            raise ValueError(f"reward function {name} {outcome.unusable}")
        if not outcome.traceback:
            call.accept(number, items, outcome.rewards)
        elif len(items) == 1:
            call.fail(number, items[0], "reward_error", outcome.traceback)
        return not outcome.traceback or len(items) == 1

    def on(self, site: Any) -> "InProcessRewards":
        """Return self: functions need no devices."""
        del site
        return self

    def close(self) -> None:
        """Do nothing: there are no processes."""
