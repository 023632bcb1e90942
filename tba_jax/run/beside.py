# SPDX-License-Identifier: Apache-2.0
"""The trainer's side of an asynchronous run: sync, train, log, while others search beside it.

It knows that responses come, not from where: from threads of this process (`drivers`) or from
other machines (`fleet`). Invariant: whatever ends the loop, the state is saved or the first failure
is raised, and no thread is waited for without a limit.
"""

import math
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.flow.rounds import RoundReport, summarise_rounds
from tba_jax.replay.admission import Latency
from tba_jax.replay.exact_lag import ExactLag
from tba_jax.run import evaluations
from tba_jax.run.errors import StarvedError
from tba_jax.run.run import Run
from tba_jax.run.watchdog import Watchdog
from tba_jax.train.objectives.registry import make_objective
from tba_jax.train.off_policy import spent_strata

# Sleep between two looks at the outboxes while the trainer has nothing to train on.
POLL_S = 0.002
# Longest wait of the weight poller for a publication, after which it looks whether to stop.
DELIVERY_S = 0.1
# After as many steps, when what compiled is past and forgotten, a run says what it wastes; that
# responses come too late is worth a word where more than this share of them does.
WARN_AFTER = 50
LATE_SHARE = 0.05
# Batches' worth of groups that are merged without a step: then no more of them make one possible.
# Generous: a policy that repeats itself may bring little that is new for a while.
STARVED_BATCHES = 20
# Time that the threads of a failed run get to end their current step.
STOP_S = 10.0


def after_step(run: Run, values: dict[str, Any], extra: dict[str, Any]) -> bool:
    """Log, checkpoint and note the first step; common to all drivers.

    Returns:
        Whether a metrics line was written; what belongs to no single step waits for one.
    """
    step = run.trainer.step_index
    run.clock.note_step()
    config = run.config
    is_logged = step % config.log.period == 0 or step == config.num_steps
    if is_logged:
        extra["search/skipped_prompts"] = run.search.num_skipped
        run.logs.metrics.write(
            step, {"time_s": run.clock(), **values, **extra, **run.buffer.stats()}
        )
    run.shared.checkpoints.check()
    if run.hold is not None:
        run.hold.check()
    if run.trainer.plan.save:
        run.save()
    return is_logged


def starved(run: Run, why: str) -> StarvedError:
    """The error of a run whose buffer gives no batch, with where its responses went."""
    counts = {name: n for name, n in run.buffer.ledger().items() if n}
    return StarvedError(
        f"no batch of {run.config.batch.num_prompts} prompts can be drawn from the replay buffer: "
        f"{why}. It holds {run.buffer.num_trajectories} rows ({run.buffer.num_bytes:,} of "
        f"{run.config.replay.max_bytes:,} bytes); responses so far: {counts}. Look at "
        "replay.max_bytes, replay.max_age, batch.num_prompts and the rejections"
    )


def stops(run: Run, interrupted: Callable[[], bool]) -> bool:
    """Whether the run ends here.

    With several hosts none may stop by itself: an interruption goes into the next step's offer, and
    the plan of that step stops them all.
    """
    if run.cluster.num_processes > 1:
        return run.trainer.plan.stop
    return run.is_interrupted(interrupted)  # a host that searches for it may be told to end


class Pacing(Protocol):
    """What is told how far the trainer is, and says how searchers keep up; as `Admission`."""

    def note_step(self, seconds: float) -> None:
        """A step of the trainer took as long, waiting for data not counted."""
        ...

    def update(self, *, step: int, version: int, num_merged: int, num_fresh: int) -> None:
        """Where the trainer is."""
        ...

    def holds(self, step: int) -> bool:
        """Whether this step waits for a group that would be late after it."""
        ...

    def latency(self) -> Latency | None:
        """What was measured; None before there is enough of it."""
        ...

    @property
    def num_under_way(self) -> int:
        """Groups admitted and not used yet."""
        ...


def early_warnings(run: Run, admission: Pacing) -> list[str]:
    """What is wasted, biased or late so far, and what to change; a sentence each."""
    lines = run.buffer.warnings()
    bound, latency = run.config.replay.max_staleness, admission.latency()
    if bound and latency is not None and latency.late_share > LATE_SHARE:
        fate = {
            "train": "trained on, and counted late",
            "drop": "dropped",
            "wait": "waited for",
        }[run.config.replay.late]
        way = f", weights are {latency.behind_steps} on their way" if latency.behind_steps else ""
        lines.append(
            f"replay.max_staleness={bound} cannot be met by {latency.late_share:.0%} of the "
            f"responses, which are {fate}: they take {latency.mean_steps:.1f} steps of "
            f"{latency.step_s:.2f} s (95 % of them {latency.p95_steps:.1f} or less){way}; "
            f"{latency.feasible} is the least bound that 95 % can meet"
        )
    return lines


class Beside(NamedTuple):
    """Who searches beside the trainer.

    Attributes:
        admission: is told how far the trainer is.
        stop: shared by all workers.
        workers: not started yet.
        count: brings the counters of the run's searchers up to date.
        slot_use: tokens drawn and slot-steps made since it was asked last.
        figures: more metrics of a step.
        lag: keeps data equally old; None: they are as old as it happens, within the bound.
    """

    admission: Pacing
    stop: StopFlag
    workers: Sequence[Worker]
    count: Callable[[], None]
    slot_use: Callable[[], tuple[int, int]]
    figures: Callable[[], Mapping[str, float]] = dict
    lag: ExactLag | None = None


def drive_beside(run: Run, interrupted: Callable[[], bool], beside: Beside) -> None:
    """Train beside searchers until the last step or an interruption.

    Raises:
        WorkerError: a worker failed; its cause has the traceback.
    """
    stop = beside.stop
    watchdog = Watchdog(run.config.log.watchdog_s)
    workers = [*beside.workers, Worker("watchdog", watchdog.step, stop, idle_s=1.0)]

    def join() -> None:
        stop.set()
        deadline = time.monotonic() + STOP_S
        for worker in workers:
            worker.join(max(0.0, deadline - time.monotonic()))

    try:
        run.trainer.publish()
        for worker in workers:
            worker.start()
        _Loop(run, beside, watchdog).run(interrupted)
    except BaseException:
        # The first failure is the news: stop everyone, but let it, not a late thread, be raised.
        stop.set()
        # A thread inside native code must not meet the end of the interpreter.
        run.shared.rewards.close()  # ends a `score` that waits for a reward
        join()
        raise
    # First what must not be lost, then what may take long: a searcher may be in the middle of a
    # round of minutes, and nobody needs that round any more.
    run.save()
    join()
    beside.count()
    evaluations.wind_up(run)


class _Loop:
    """The trainer's side of the asynchronous driver."""

    def __init__(self, run: Run, beside: Beside, watchdog: Watchdog) -> None:
        self._run = run
        self._beside = beside
        self._admission = beside.admission
        self._lag = beside.lag
        self._merged_below = 0  # of an exact lag: tickets with lower numbers
        self._committed = 0
        self._num_merged = 0
        self._merged_before = 0  # groups, at the last step
        self._warn_at: float = run.trainer.step_index + WARN_AFTER
        self._stop = beside.stop
        self._watchdog = watchdog
        self._newest_eval = self._newest_eval_version = evaluations.newest_evaluated(run)

    def run(self, interrupted: Callable[[], bool]) -> None:
        """Sync, train, log until the last step."""
        run, trainer = self._run, self._run.trainer
        num_steps = run.config.num_steps
        # First data, then the evaluation of the start model: the trainer waits for the former only.
        reports = self._fill(interrupted)
        self._request_evaluation(trainer.step_index)
        reports += self._merge()  # what the outboxes held when the run was interrupted
        extra: dict[str, Any] = {}
        sync, publishes = False, False  # published when the driver began
        while trainer.step_index < num_steps and not stops(run, interrupted):
            self._check()
            step = trainer.step_index
            if sync:
                if publishes and not self._has_begun():
                    self._wait()
                    continue
                sync = False
                if publishes:
                    extra["sync/publish_s"] = trainer.publish()
                    extra["sync/version"] = step
                extra["sync/deliver_s"] = run.search.transport.delivery_s
                merge_start = run.clock()
                reports += self._merge()
                extra["sync/merge_s"] = run.clock() - merge_start
                self._request_evaluation(step)
            is_late = self._lag is not None and self._merged_below < self._lag.due(step)
            if is_late or self._admission.holds(step):
                self._wait()
                reports += self._merge()
                continue
            if run.config.replay.late == "wait":
                reports += self._merge()  # what was waited for, and may be late after this step
            values = trainer.step(run.is_interrupted(interrupted), run.evaluations.newest_share)
            if trainer.plan.collect >= 0:
                evaluations.collect(run, trainer.plan.collect)
            if run.shared.is_follower:
                self._watchdog.kick()  # the host that draws says that it waits
            if values is None:
                # Not a sync: no weights move, the trainer only looks for the data it waits for.
                self._stop.wait(POLL_S)
                reports += self._merge()
                self._drain()
                self._check_starved()
                continue
            self._merged_before = trainer.num_merged_groups
            sync, publishes = trainer.plan.sync, trainer.plan.publish
            self._admission.note_step(values["train/step_s"])
            self._report_progress()
            self._drain()
            self._beside.count()
            extra.update(summarise_rounds(reports))
            extra.update(self._slot_use())
            extra["search/under_way"] = self._admission.num_under_way
            extra["search/idle_s"] = sum(searcher.idle_s for searcher in run.search.searchers)
            extra.update(self._beside.figures())
            if (turns := run.shared.sites.trainer.turns) is not None:
                extra["sync/turn_wait_s"] = turns.wait_s
            if after_step(run, values, extra):
                extra, reports = {}, []
            self._watchdog.kick()

    def _has_begun(self) -> bool:
        """Whether the newest weights may be followed by newer ones."""
        return self._lag is None or self._lag.has_begun(self._run.trainer.version)

    def _wait(self) -> None:
        """A moment, for searchers that have fallen behind an exact lag or a bound; what they commit
        is a sign of life, and without one for long the watchdog speaks."""
        run, start = self._run, self._run.clock()
        self._stop.wait(POLL_S)
        run.trainer.counters.wait_s += run.clock() - start
        self._drain()
        if self._lag is not None and (committed := self._lag.num_committed) > self._committed:
            self._committed = committed
            self._watchdog.kick()

    def _request_evaluation(self, step: int) -> None:
        """Ask for an evaluation of the version published at `step`, if one is due."""
        run = self._run
        if run.shared.is_follower or not evaluations.is_due(run, step, self._newest_eval):
            return
        run.search.transport.settle()  # in memory: this very version, on every host
        # Checkpoint transport, at the very start: the weight poller brings the first version. (To
        # poll here as well would wait for ever once the poller's thread had taken that version.)
        while (published := run.search.transport.latest(0)) is None:
            self._stop.check()
            self._stop.wait(POLL_S)
        version = published.version
        if version <= self._newest_eval_version:
            return  # that transport is behind: at a later sync
        self._newest_eval, self._newest_eval_version = step, version
        evaluations.request(run, version)

    def _fill(self, interrupted: Callable[[], bool]) -> list[RoundReport]:
        """Wait, before the first step, for start data and `search.initial_fill` more responses.

        Returns:
            Of the rounds that filled the buffer.
        """
        run = self._run
        reports: list[RoundReport] = []
        start = run.clock()
        given = sum(searcher.num_given for searcher in run.search.searchers)
        target = given + run.config.search.initial_fill
        run.logs.progress.phase("searchers fill the buffer")
        searchers = run.search.searchers
        while bool(searchers and run.trainer.step_index == 0) and (
            run.buffer.num_trajectories == 0
            or run.buffer.ledger()["generated"] < target
            or any(searcher.num_given_rounds_left for searcher in searchers)
        ):
            self._check()
            if interrupted():
                return reports
            if run.cluster.num_processes > run.shared.num_shares:
                run.trainer.hold()
            reports += self._merge()
            self._check_starved()
            self._stop.wait(POLL_S)
        # The first step of a process compiles; the display drops the phase when a step is made.
        run.logs.progress.phase("compiling the training step")
        run.trainer.counters.wait_s += run.clock() - start
        return reports

    def _check(self) -> None:
        """Raise what a thread, or a host that searches, has failed with."""
        self._stop.check()
        self._run.search.check()

    def _check_starved(self) -> None:
        """End a run that searches for ever without a step, which no watchdog sees."""
        config, num_hosts = self._run.config, self._run.shared.num_shares
        first = -(-config.search.initial_fill // config.search.samples_per_prompt)
        wanted = max(config.batch.num_prompts, first) / num_hosts
        merged = self._run.trainer.num_merged_groups - self._merged_before
        if merged > STARVED_BATCHES * wanted:
            raise starved(self._run, f"{merged:,} groups were merged since the last step")

    def _merge(self) -> list[RoundReport]:
        """Merge; finished rounds are a sign of life."""
        lag, step = self._lag, self._run.trainer.step_index
        if lag is None:
            reports = self._run.trainer.merge()
        elif lag.is_due(step):
            self._merged_below = lag.due(step)
            reports = self._run.trainer.merge(below=self._merged_below)
        else:
            reports = []
        self._report_progress()
        if reports:
            self._watchdog.kick()
        return reports

    def _report_progress(self) -> None:
        """Tell the searchers how far the trainer is; note once what is wasted, biased or late."""
        trainer = self._run.trainer
        merged, self._num_merged = self._num_merged, trainer.num_merged_groups
        self._admission.update(
            step=trainer.step_index,
            version=trainer.version,
            num_merged=self._num_merged - merged,
            num_fresh=self._run.buffer.num_fresh_groups,
        )
        if trainer.step_index >= self._warn_at:
            self._warn_at = math.inf
            needs_behavior = make_objective(self._run.config.objective).needs_behavior
            spent = spent_strata(trainer.strata) if needs_behavior else []
            for line in [*early_warnings(self._run, self._admission), *spent]:
                self._run.logs.progress.note(line)

    def _slot_use(self) -> dict[str, float]:
        """Share of the decode slots in use since this was asked last."""
        tokens, steps = self._beside.slot_use()
        return {"search/slot_use": tokens / steps} if steps else {}

    def _drain(self) -> None:
        """Record the evaluations that are done, another sign of life."""
        if evaluations.record_done(self._run):
            self._watchdog.kick()
