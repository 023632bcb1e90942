# SPDX-License-Identifier: Apache-2.0
"""driver=sync: searchers and trainer take turns on one thread; bit-reproducible.

This is also the on-policy baseline. Every publication is followed by as many rounds of each
searcher as the next steps need; before the first step, by at least `search.initial_fill` responses.
With `search.exact_lag` D a merge takes the rounds of D publications ago; the first D publications
train on responses of version 0, which are sampled in advance.
"""

import time
from collections.abc import Callable, Mapping
from typing import Any

from tba_jax.devices.cluster import CONTINUE, PeerError
from tba_jax.flow.rounds import RoundReport
from tba_jax.replay.round_admission import RoundAdmission
from tba_jax.run import evaluations
from tba_jax.run.loop import loop, starved
from tba_jax.run.processes import NoSearchService, SearchService, serving
from tba_jax.run.run import Run

_POLL_S = 0.002  # between two checks whether the rounds of other processes have arrived


def rounds_per_sync(run: Run) -> int:
    """Return the rounds of each searcher for a publication, enough for every fresh slot."""
    config = run.config
    prompts = config.batch.num_prompts * config.sync_period
    return -(-prompts // (config.search.prompts_per_round * run.shared.num_searchers))


def drive_sync(run: Run, interrupted: Callable[[], bool]) -> None:
    """Search and train in turn until the last step or an interruption."""
    admission = RoundAdmission([searcher.index for searcher in run.search.remote])
    with serving(run, admission) as service:
        loop(run, SynchronousSearch(run, admission, service), interrupted)
        if run.search.remote:
            run.save()
            service.finish()
            service.count()


class SynchronousSearch:
    """Searchers of `loop` that sample between a publication and its merge.

    Args:
        run: the connected parts.
        admission: admits the rounds of searchers in other processes.
        service: the search server that they have joined.
    """

    publishes_first = True

    def __init__(
        self, run: Run, admission: RoundAdmission, service: SearchService | NoSearchService
    ) -> None:
        self._run = run
        self._admission = admission
        self._service = service
        self._rounds = rounds_per_sync(run)
        self._newest_evaluation = run.evaluated.last_eval_step

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
        self._service.announce()
        if evaluations.is_due(run, step, self._newest_evaluation):
            self._newest_evaluation = step
            run.logs.progress.phase("evaluating")
            evaluations.evaluate_now(run, step)
            run.logs.progress.phase("")
        if step == 0:
            self._do_given_rounds()
        self._do_rounds(self._rounds * (config.search.exact_lag + 1 if step == 0 else 1))
        while step == 0 and run.search.num_drawn < config.search.initial_fill:
            if run.is_interrupted(interrupted):
                break
            self._do_rounds(1)

    def _do_given_rounds(self) -> None:
        """Score the given responses, which are the first rounds of searcher 0."""
        for searcher in self._run.search.local:
            while searcher.num_given_rounds_left:
                searcher.step()
        self._wait({s.index: s.num_given_rounds for s in self._run.search.remote})

    def _do_rounds(self, number: int) -> None:
        """Do as many rounds of every searcher with the newest weights."""
        search = self._run.search
        targets = {s.index: s.outbox.committed[0] + number for s in search.remote}
        self._admission.allow(dict.fromkeys(targets, number), self._run.trainer.version)
        for _ in range(number):
            for searcher in search.local:
                did_round = searcher.step()
                assert did_round  # weights are published, and the outbox has no bound here
        self._wait(targets)

    def _wait(self, targets: Mapping[int, int]) -> None:
        """Wait until searchers of other processes have finished this many rounds in all.

        Raises:
            PeerError: nothing arrives for `log.watchdog_s`.
        """
        outboxes = {s.index: s.outbox for s in self._run.search.remote}
        limit_s = self._run.config.log.watchdog_s
        missing, deadline = dict(targets), time.monotonic() + limit_s
        while missing:
            done = [i for i, target in missing.items() if outboxes[i].committed[0] >= target]
            if done:
                deadline = time.monotonic() + limit_s
            for i in done:
                del missing[i]
            if missing and time.monotonic() > deadline:
                raise PeerError(
                    f"searchers {sorted(missing)} have finished no round for {limit_s:.0f} s "
                    f"(config.log.watchdog_s). Look at the output of their processes. {CONTINUE}"
                )
            if missing:
                time.sleep(_POLL_S)

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
