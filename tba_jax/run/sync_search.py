# SPDX-License-Identifier: Apache-2.0
"""driver=sync: searchers and trainer take turns on one thread; bit-reproducible.

This is also the on-policy baseline. Every publication is followed by as many rounds of each
searcher as the next steps need; before the first step, by at least `search.initial_fill` responses.
With `search.exact_lag` D a merge takes the rounds of D publications ago; the first D publications
train on responses of version 0, which are sampled in advance.
"""

from collections.abc import Callable
from typing import Any

from tba_jax.flow.rounds import RoundReport
from tba_jax.run import evaluations
from tba_jax.run.loop import loop, starved
from tba_jax.run.run import Run


def rounds_per_sync(run: Run) -> int:
    """Rounds that each searcher does for a publication, so that every fresh slot has new data."""
    config = run.config
    prompts = config.batch.num_prompts * config.sync_period
    return -(-prompts // (config.search.prompts_per_round * run.shared.num_searchers))


def drive_sync(run: Run, interrupted: Callable[[], bool]) -> None:
    """Search and train in turn until the last step or an interruption."""
    loop(run, SynchronousSearch(run), interrupted)


class SynchronousSearch:
    """Searchers of `loop` that sample between a publication and its merge.

    Args:
        run: the connected parts.
    """

    publishes_first = True

    def __init__(self, run: Run) -> None:
        self._run = run
        self._rounds = rounds_per_sync(run)
        self._newest_evaluation = evaluations.newest_evaluated(run)

    def begin(self, interrupted: Callable[[], bool]) -> list[RoundReport]:
        del interrupted
        return []

    def check(self) -> None:
        """Do nothing: a searcher raises its own failure."""

    def may_publish(self) -> bool:
        return True

    def published(self, step: int, interrupted: Callable[[], bool]) -> None:
        """Evaluate the new weights if that is due, then sample with them."""
        run, config = self._run, self._run.config
        run.search.transport.poll()
        if evaluations.is_due(run, step, self._newest_evaluation):
            self._newest_evaluation = step
            run.logs.progress.phase("evaluating")
            evaluations.evaluate_now(run, step)
            run.logs.progress.phase("")
        if step == 0:
            run.search.do_given()
        run.search.do_rounds(self._rounds * (config.search.exact_lag + 1 if step == 0 else 1))
        if step == 0 and run.searches:
            while run.search.num_drawn < config.search.initial_fill and not interrupted():
                run.search.do_rounds(1)

    def merge(self) -> list[RoundReport]:
        has_lag = self._run.config.search.exact_lag
        return self._run.trainer.merge(self._rounds if has_lag else None)

    def merged(self, step: int) -> None:
        """Do nothing: the weights are evaluated already."""

    def must_wait(self, step: int) -> bool:
        return False

    def wait(self) -> None:
        raise AssertionError("nothing happens while this thread waits")

    def no_batch(self) -> list[RoundReport]:
        raise starved(
            self._run, "every response of the last rounds was rejected, evicted or aged out"
        )

    def stepped(self, values: dict[str, Any]) -> dict[str, Any]:
        del values
        return {}
