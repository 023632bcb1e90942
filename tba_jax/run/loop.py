# SPDX-License-Identifier: Apache-2.0
"""The training loop: publish weights, merge responses, draw a batch, update, log, evaluate, save.

    every `sync_period` steps:  trainer.publish()   new weights, numbered by the step
                                search.published()  synchronous: evaluate, sample new responses
                                search.merge()      finished responses -> replay buffer
                                search.merged()     asynchronous: request an evaluation
    every step:                 trainer.step()      draw groups, loss, gradient, update
                                log and save

Both drivers run this loop. They differ in sampling: `drivers.SynchronousSearch` samples on this
thread between publication and merge; with `drivers.AsynchronousSearch` searchers sample
concurrently, on threads of this process or in other processes. With several trainer processes, each
process runs this loop. All of them take part in each publication, step and checkpoint, as the
StepPlan decides.

Reference: Trajectory Balance with Asynchrony, arXiv 2503.18929, section 3 and algorithm 1.
"""

from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.config.advice import Times
from tba_jax.flow.tickets import Report, summarise
from tba_jax.run.errors import StarvedError
from tba_jax.run.run import Run
from tba_jax.train.trainer import Finished


class Search:
    """Search during the training loop; the base class of the searches of both drivers.

    Attributes:
        publishes_first: whether the loop begins with a publication; if not, `begin` has published.
    """

    publishes_first = True

    def begin(self, interrupted: Callable[[], bool]) -> list[Report]:
        """Prepare the first step; return the reports of responses that were merged."""
        del interrupted
        return []

    def check(self) -> None:
        """Raise the failure of a searcher."""

    def published(self, step: int, interrupted: Callable[[], bool]) -> None:
        """Process a publication, before the merge."""

    def merge(self) -> list[Report]:
        """Move finished responses into the buffer; return their reports."""
        return []

    def merged(self, step: int) -> None:
        """React to the merge of a publication."""

    def no_batch(self) -> list[Report]:
        """Merge more responses for a batch and return their reports, or raise StarvedError."""
        return []

    def stepped(self) -> dict[str, Any]:
        """React to a step; return metrics of the searchers."""
        return {}


def loop(run: Run, search: Search, interrupted: Callable[[], bool]) -> None:
    """Train until the last step or an interruption.

    Args:
        interrupted: returns True if the run must stop; called between steps.

    Raises:
        StarvedError: no batch can be drawn.
        NonFiniteError: loss or gradient is not finite.
        WorkerError: a searcher failed.
    """
    trainer, num_steps = run.trainer, run.config.num_steps
    reports = search.begin(interrupted)
    extra: dict[str, Any] = {}  # metrics between two steps, for the next metrics line
    extras: dict[int, dict[str, Any]] = {}  # metrics of launched steps whose results are not read
    publishes = search.publishes_first
    is_sync_due = publishes and trainer.step_index % run.config.sync_period == 0
    while trainer.step_index < num_steps and not stops(run, interrupted):
        search.check()
        step = trainer.step_index
        if is_sync_due:
            is_sync_due = False
            if publishes:
                extra["sync/publish_s"] = trainer.publish()
                extra["sync/version"] = step
                search.published(step, interrupted)
            extra["sync/deliver_s"] = run.weights.delivery_s
            merge_start = run.clock()
            reports += search.merge()
            extra["sync/merge_s"] = run.clock() - merge_start
            search.merged(step)
        if not trainer.step(lambda: run.is_interrupted(interrupted)):
            reports += search.no_batch()
            continue
        is_sync_due, publishes = trainer.plan.sync, trainer.plan.publish
        extras[trainer.step_index] = extra | search.stepped() | summarise(reports)
        extra, reports = {}, []
        # The results of an asynchronous step are read after the next step was launched.
        is_read_late = run.config.driver == "async" and not trainer.plan.save
        log_finished(run, trainer.finished(pending=int(is_read_late)), extras)
        if trainer.plan.save:
            run.save()
    log_finished(run, trainer.finished(), extras)


def log_finished(run: Run, finished: Sequence[Finished], extras: dict[int, dict[str, Any]]) -> None:
    """Log steps whose results have arrived.

    Args:
        extras: metrics of publications, merges and searchers by step; those of `finished` leave.
    """
    for each in finished:
        after_step(run, each, extras.pop(each.step))


def after_step(run: Run, finished: Finished, extra: dict[str, Any]) -> None:
    """Log a step.

    Args:
        extra: metrics of publications, merges and searchers since the step before.
    """
    step, values, shown = finished
    run.clock.note_step()
    run.samples.add_step(step, shown)
    idle = [] if run.owner is None else run.owner.idle_s
    times = Times(run.clock(), run.trainer.counters.wait_s, sum(idle) / max(1, len(idle)))
    for line in run.advice.lines(run.config, step, {**values, **extra}, times):
        run.logs.progress.note(line)
    values = values | run.callbacks(step, values)
    if run.owner is not None:
        extra["search/skipped_prompts"] = run.owner.num_skipped
    run.logs.metrics.write(step, {"time_s": run.clock(), **values, **extra, **run.buffer.stats()})
    run.shared.checkpoints.check()
    if run.hold is not None:
        run.hold.check()


def stops(run: Run, interrupted: Callable[[], bool]) -> bool:
    """Return whether the run ends after this step.

    With several trainer processes no process may stop alone: its next request reports the
    interruption, and the plan of that step stops all processes.
    """
    if run.cluster.num_processes > 1:
        return run.trainer.plan.stop
    return run.is_interrupted(interrupted)


def starved(run: Run, why: str) -> StarvedError:
    """Return the error of a run whose buffer gives no batch, with the counts of its responses."""
    counts = {name: n for name, n in run.buffer.ledger().items() if n}
    return StarvedError(
        f"no batch of {run.config.batch.num_prompts} prompts can be drawn from the replay buffer: "
        f"{why}. It holds {run.buffer.num_trajectories} rows ({run.buffer.num_bytes:,} of "
        f"{run.config.replay.max_bytes:,} bytes); responses so far: {counts}. Look at "
        "replay.max_bytes, batch.num_prompts and the rejections"
    )
