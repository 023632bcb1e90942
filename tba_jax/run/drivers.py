# SPDX-License-Identifier: Apache-2.0
"""The drivers of a run: each connects searchers and trainer, and calls `loop`.

driver=sync: searchers and trainer alternate on one thread. This driver is bit-reproducible, also
with another number of searchers, and the on-policy baseline. After each publication, the searchers
sample the tickets that the next steps need; before the first step, at least `search.initial_fill`
responses. With `search.exact_lag=D` a merge takes the tickets of the publication D publications
ago. The first D publications train on responses of version 0, which are sampled in advance.

driver=async: searchers sample while the trainer trains. A searcher is two threads of this process
(decoding and grading), or a part of another process. Trainer and searchers wait for each other only
with `replay.max_staleness` and `replay.pace`.

`follow` is the driver of a trainer process that does not own the replay buffer.

Invariant: an asynchronous loop ends with a save or with the first failure, and every wait for a
thread has a time limit (tests/integration/test_async_loop.py).
"""

import math
import time
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.devices.cluster import CONTINUE, PeerError
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.flow.tickets import Report
from tba_jax.remote.owner import Owner
from tba_jax.remote.step_server import StepClient
from tba_jax.run.errors import Watchdog
from tba_jax.run.loop import Search, loop, starved
from tba_jax.run.run import Run
from tba_jax.run.search_process import (
    POLL_S,
    STOP_S,
    NoSearchService,
    SearchProcess,
    SearchService,
    search_in_job,
    search_workers,
    serving,
)
from tba_jax.train.metrics import low_ess_warnings
from tba_jax.weights.memory import DELIVERY_S, Weights

_WARN_AFTER = 50  # steps before diagnostics, because compilation distorts the first measurements
_CHECK_S = 0.05  # seconds between two checks for a failure
# A run counts as starved after it has merged this many batches of groups without a step. The number
# is large because a policy that repeats its responses may add few new ones for some time.
_STARVED_BATCHES = 20


def drive_sync(run: Run, interrupted: Callable[[], bool]) -> None:
    """Alternate search and training until the last step or an interruption."""
    assert run.owner is not None, "this process owns the buffer"
    run.owner.allow(0, -1)
    with serving(run) as service:
        loop(run, SynchronousSearch(run, run.owner, service), interrupted)
        if run.owner.remote_searchers:
            run.save()
            run.evaluate_last()


class SynchronousSearch(Search):
    """`loop.Search` of driver=sync: searchers sample between a publication and its merge."""

    def __init__(self, run: Run, owner: Owner, service: SearchService | NoSearchService) -> None:
        self._run = run
        self._owner = owner
        self._service = service
        # A prompt for every slot of the batches until the next publication.
        self._num_tickets = run.config.batch.num_prompts * run.config.sync_period
        self._newest_evaluation = run.evaluated.last_eval_step

    def published(self, step: int, interrupted: Callable[[], bool]) -> None:
        """Evaluate the new weights if an evaluation is due, then sample with them."""
        run, config = self._run, self._run.config
        run.weights.poll()
        self._service.announce()
        if run.is_evaluation_due(step, self._newest_evaluation):
            self._newest_evaluation = step
            run.logs.progress.phase("evaluating")
            run.evaluate_now(step)
            run.logs.progress.phase("")
        if step:
            self._sample(self._num_tickets)
            return
        self._sample(self._num_tickets * (config.search.exact_lag + 1))
        while self._owner.num_sampled < config.search.initial_fill:
            if run.is_interrupted(interrupted):
                break
            self._sample(self._num_tickets)

    def _sample(self, number: int) -> None:
        """Sample `number` tickets with the newest weights, after all given responses.

        Raises:
            PeerError: no result arrives within `log.watchdog_s`.
        """
        run, owner = self._run, self._owner
        owner.allow(number, run.trainer.version)
        limit_s, before = run.config.log.watchdog_s, -1
        deadline = time.monotonic() + limit_s
        while not owner.is_done:
            if any([f() for each in run.searchers for f in (each.step, each.grade)]):
                continue
            if (now := owner.ledger()["generated"]) != before:
                before, deadline = now, time.monotonic() + limit_s
            elif time.monotonic() > deadline:
                raise PeerError(
                    f"searchers have finished no ticket for {limit_s:.0f} s (config.log.watchdog_s)"
                    f". Look at the output of their processes. {CONTINUE}"
                )
            owner.lose_silent()
            time.sleep(POLL_S)

    def merge(self) -> list[Report]:
        has_lag = self._run.config.search.exact_lag
        step = self._run.trainer.step_index
        return self._owner.merge(step, self._num_tickets if has_lag else None)

    def no_batch(self) -> list[Report]:
        raise starved(
            self._run, "every response of the last tickets was rejected, evicted or aged out"
        )

    def stepped(self) -> dict[str, Any]:
        return failed_requests(self._run)


def drive_async(run: Run, interrupted: Callable[[], bool]) -> None:
    """Train until the last step or an interruption, in the process that owns the buffer.

    Raises:
        WorkerError: a searcher or the weight poller failed; its cause has the traceback.
    """
    assert run.owner is not None, "this process owns the buffer"
    with serving(run) as service:
        AsynchronousSearch(run, run.owner, service).drive(interrupted)
        if run.owner.remote_searchers:  # evaluate before the searchers of other processes end
            run.evaluate_last()


def failed_requests(run: Run) -> dict[str, int]:
    """Return, as metrics, the failed requests of searchers to their server since the last step."""
    return {f"search/{name}": number for name, number in run.search.take_failures().items()}


class AsynchronousSearch(Search):
    """`loop.Search` of driver=async: searchers sample concurrently with the trainer."""

    publishes_first = False

    def __init__(self, run: Run, owner: Owner, service: SearchService | NoSearchService) -> None:
        self._run = run
        self._owner = owner
        self._service = service
        self._stop = StopFlag()  # Shared by all workers.
        self._watchdog = Watchdog(run.config.log.watchdog_s)
        # Pairs of a decoding and a grading thread.
        self._working = [search_workers(each, self._stop) for each in run.searchers]
        self._merged_before = 0  # Number of merged groups at the last step.
        self._warn_at: float = run.trainer.step_index + _WARN_AFTER
        self._newest_eval = self._newest_eval_version = run.evaluated.last_eval_step

    def drive(self, interrupted: Callable[[], bool]) -> None:
        """Train until the last step or an interruption.

        Raises:
            WorkerError: a worker failed; its cause has the traceback.
        """
        run = self._run
        workers = [
            *(worker for pair in self._working for worker in pair),
            Worker("weight-poller", self._deliver, self._stop),
            *self._service.workers(self._stop),
            Worker("watchdog", self._watchdog.step, self._stop, idle_s=1.0),
        ]
        try:
            run.trainer.publish()
            for worker in workers:
                worker.start()
            loop(run, self, interrupted)
        except BaseException:
            # Stop all workers first, so that no later failure hides the first failure.
            self._stop.set()
            # Join the workers: a thread in native code may crash when the interpreter ends.
            run.shared.rewards.close()  # Ends a `score` call that waits for a reward.
            self._join(workers)
            raise
        # Save before joining, because a searcher may need minutes to end its chunk.
        run.save()
        self._join(workers)
        self._count()
        run.record_evaluations()
        self._owner.evaluations.forget_unbegun()  # those begun end with that of the final policy

    def _join(self, workers: Sequence[Worker]) -> None:
        self._stop.set()
        deadline = time.monotonic() + STOP_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    def _deliver(self) -> bool:
        is_delivered = self._run.weights.poll(DELIVERY_S)
        self._service.announce()
        return is_delivered

    def _count(self) -> None:
        """Update the idle seconds of the searchers in this process."""
        for searcher, (decoding, _) in zip(self._run.searchers, self._working, strict=True):
            self._owner.note_idle(searcher.index, decoding.idle_total_s)

    def begin(self, interrupted: Callable[[], bool]) -> list[Report]:
        """Wait for the first responses, and request the evaluation of the start model."""
        reports = self._fill(interrupted)
        # Request the evaluation after the fill, so that it does not delay the first responses.
        self._request_evaluation(self._run.trainer.step_index)
        return reports + self.merge()  # an interrupted fill may leave results

    def check(self) -> None:
        """Raise the failure of a thread."""
        self._stop.check()

    def merge(self) -> list[Report]:
        """Merge the finished responses, and reset the watchdog if responses arrived."""
        reports = self._owner.merge(self._run.trainer.step_index)
        self._warn()
        if reports:
            self._watchdog.kick()
        return reports

    def merged(self, step: int) -> None:
        self._request_evaluation(step)

    def no_batch(self) -> list[Report]:
        """Wait and merge; raise StarvedError if many merged responses did not fill a batch."""
        self._stop.wait(POLL_S)
        reports = self.merge()
        self._record_evaluations()
        self._check_starved()
        return reports

    def stepped(self) -> dict[str, Any]:
        run = self._run
        self._merged_before = self._owner.num_merged
        self._owner.note_step(run.trainer.step_index)
        self._warn()
        self._record_evaluations()
        self._count()
        self._watchdog.kick()
        extra: dict[str, Any] = {
            "search/under_way": self._owner.num_under_way,
            "search/idle_s": sum(self._owner.idle_s),
            **self._service.metrics(),
            **failed_requests(run),
        }
        counts = self._owner.take_decode_counts()
        for each in run.searchers:
            counts = counts.plus(each.decode_counts())
        if counts.slot_steps:
            extra["search/slot_use"] = counts.tokens / counts.slot_steps
        if counts.prompt_tokens and run.config.task.environment:
            extra["search/kept_prefix"] = counts.kept_tokens / counts.prompt_tokens
        if (lock := run.shared.sites.trainer.lock) is not None:
            extra["sync/turn_wait_s"] = lock.wait_s
        return extra

    def _request_evaluation(self, step: int) -> None:
        """Request an evaluation of the version published at `step`, if one is due."""
        run = self._run
        if not run.is_evaluation_due(step, self._newest_eval):
            return
        run.weights.settle()  # In memory, this version becomes the newest at once.
        # On disk, wait until the weight poller has read the first version. Polling here would wait
        # for ever if the poller's thread has already taken that version.
        while (version := run.weights.newest) is None:
            self._stop.check()
            self._stop.wait(POLL_S)
        if version <= self._newest_eval_version:
            return  # The files are not complete; a later publication is evaluated.
        self._newest_eval, self._newest_eval_version = step, version
        run.request_evaluation(version)

    def _fill(self, interrupted: Callable[[], bool]) -> list[Report]:
        """Wait, before the first step, for given responses and `search.initial_fill` sampled ones.

        Returns:
            Reports of the responses that filled the buffer.
        """
        run = self._run
        reports: list[Report] = []
        start = run.clock()
        owner = self._owner
        run.logs.progress.phase("searchers fill the buffer")
        while run.trainer.step_index == 0 and (
            run.buffer.num_trajectories == 0
            or owner.num_sampled < run.config.search.initial_fill
            or owner.num_given_left
        ):
            self.check()
            if run.is_interrupted(interrupted):
                return reports
            reports += self.merge()
            self._check_starved()
            self._stop.wait(POLL_S)
        # The first step of a process compiles; the display ends the phase after the first step.
        run.logs.progress.phase("compiling the training step")
        run.trainer.counters.wait_s += run.clock() - start
        return reports

    def _check_starved(self) -> None:
        """Raise StarvedError if too many groups were merged since the last step."""
        config = self._run.config
        first = -(-config.search.initial_fill // config.search.samples_per_prompt)
        wanted = max(config.batch.num_prompts, first)
        merged = self._owner.num_merged - self._merged_before
        if merged > _STARVED_BATCHES * wanted:
            raise starved(self._run, f"{merged:,} groups were merged since the last step")

    def _warn(self) -> None:
        """Log diagnostics once."""
        trainer = self._run.trainer
        if trainer.step_index >= self._warn_at:
            self._warn_at = math.inf
            has_ratios = self._run.config.objective.built.needs.sampler != "any"
            spent = low_ess_warnings(trainer.values) if has_ratios else []
            for line in [*self._run.buffer.warnings(), *spent]:
                self._run.logs.progress.note(line)

    def _record_evaluations(self) -> None:
        """Record finished evaluations; reset the watchdog if an evaluation has finished."""
        if self._run.record_evaluations():
            self._watchdog.kick()


def follow(run: Run, interrupted: Callable[[], bool]) -> None:
    """Train on the batches that the owner draws, until the last step or an interruption.

    Raises:
        WorkerError: a searcher failed, or the owner does not respond; the error has its cause.
    """
    link = run.link
    assert isinstance(link, StepClient)
    failed, ended = StopFlag(), StopFlag()
    weights, has_searchers = run.weights, bool(run.search.parts)

    def work() -> bool:
        """Search until the owner reports the end of the run."""
        assert isinstance(weights, Weights), "a process that writes versions has no searchers"
        process = SearchProcess(
            run.shared, run.search, weights, lambda: run.is_interrupted(interrupted)
        )
        search_in_job(process, link, run.logs.progress.note, ended)
        ended.set()
        while not failed.wait(_CHECK_S):  # this worker has nothing else to do
            pass
        return True

    def deliver() -> bool:
        return run.weights.poll(DELIVERY_S)

    role = ("search-process", work) if has_searchers else ("weight-poller", deliver)
    worker = Worker(*role, failed)
    link.check = failed.check
    try:
        worker.start()  # first: the owner publishes when all searchers have joined
        if run.config.driver == "async":
            run.trainer.publish()
        loop(run, FollowingSearch(run, failed), interrupted)
        run.save()
        run.evaluate_last()
        if has_searchers:
            weights.keep(run.trainer.step_index)
            while not ended.wait(_CHECK_S):  # searchers work on evaluation shards
                failed.check()
    finally:
        ended.set()
        failed.set()
        worker.join(STOP_S)


class FollowingSearch(Search):
    """`loop.Search` in a process that does not own the buffer."""

    def __init__(self, run: Run, failed: StopFlag) -> None:
        self._run = run
        self._failed = failed
        self.publishes_first = run.config.driver == "sync"
        self._newest_eval = run.evaluated.last_eval_step

    def begin(self, interrupted: Callable[[], bool]) -> list[Report]:
        """Keep the current weights, if the owner will request their evaluation."""
        if not self.publishes_first:
            self._keep(self._run.trainer.step_index)
        return []

    def check(self) -> None:
        self._failed.check()

    def published(self, step: int, interrupted: Callable[[], bool]) -> None:
        """Deliver the weights to the searchers of this process; a worker does it with async."""
        if self.publishes_first:
            self._run.weights.poll()
        self._keep(step)

    def merged(self, step: int) -> None:
        if not self.publishes_first:
            self._keep(step)

    def _keep(self, step: int) -> None:
        """Keep the weights of version `step` on the searchers, if it will be evaluated."""
        if self._run.is_evaluation_due(step, self._newest_eval):
            self._newest_eval = step
            if self._run.search.parts:
                self._run.weights.keep(step)
