# SPDX-License-Identifier: Apache-2.0
"""The two drivers: the same parts, stepped in a fixed order or running beside one another.

`drive_sync` uses one thread and is bit-reproducible; it is also the on-policy baseline mode.
`drive_async` runs every searcher on worker threads beside the trainer loop, one that decodes and
one that grades, and neither waits for the other but by `replay.max_staleness` and `replay.pace`.
Drivers publish, merge, evaluate and save; they know no mathematics. With several hosts each of them
runs the same driver: publications, steps and checkpoints are calls of all hosts, which follow the
StepPlan, while merges are each host's own.
"""

import functools
from collections.abc import Callable
from typing import Any

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.flow.rounds import summarise_rounds
from tba_jax.replay.admission import Admission
from tba_jax.replay.exact_lag import ExactLag, quota_of
from tba_jax.run import evaluations
from tba_jax.run.beside import (
    DELIVERY_S,
    POLL_S,
    Beside,
    after_step,
    drive_beside,
    starved,
    stops,
)
from tba_jax.run.run import Run
from tba_jax.run.searching import make_demand, make_searches
from tba_jax.run.whole_hosts.remote_search import RemoteAdmission, RemoteSearch
from tba_jax.search.continuous import ContinuousSearch, TicketOffice


def rounds_per_sync(run: Run) -> int:
    """Rounds each searcher does per publication so that every fresh slot has new data."""
    config = run.config
    prompts = config.batch.num_prompts * config.sync_period
    return -(-prompts // (config.search.prompts_per_round * run.shared.num_searchers))


def drive_sync(run: Run, interrupted: Callable[[], bool]) -> None:
    """Search, merge, train in one thread until the last step or an interruption.

    Every `sync_period` steps the weights are published, each searcher does as many rounds as the
    next steps need (before the first one at least `search.initial_fill` responses), and the
    outboxes are merged. With `search.exact_lag` D the merge takes the rounds of D publications ago
    (the first D ones train on version 0 data drawn ahead).
    """
    trainer, config = run.trainer, run.config
    rounds = rounds_per_sync(run)
    lag = config.search.exact_lag
    extra: dict[str, Any] = {}
    newest_eval = evaluations.newest_evaluated(run)
    sync = trainer.step_index % config.sync_period == 0
    while trainer.step_index < config.num_steps and not stops(run, interrupted):
        step = trainer.step_index
        if sync:
            publish_s = trainer.publish()
            run.search.transport.poll()
            if evaluations.is_due(run, step, newest_eval):
                newest_eval = step
                run.logs.progress.phase("evaluating")
                evaluations.evaluate_now(run, step)
                run.logs.progress.phase("")
            if step == 0:
                run.search.do_given()
            run.search.do_rounds(rounds * (lag + 1 if step == 0 else 1))
            if step == 0 and run.searches:
                while run.search.num_drawn < config.search.initial_fill and not interrupted():
                    run.search.do_rounds(1)
            merge_start = run.clock()
            reports = trainer.merge(rounds if lag else None)
            extra = {
                "sync/publish_s": publish_s,
                "sync/deliver_s": run.search.transport.delivery_s,
                "sync/merge_s": run.clock() - merge_start,
                "sync/version": step,
                **summarise_rounds(reports),
            }
        values = trainer.step(run.is_interrupted(interrupted))
        if values is None:
            raise starved(
                run, "every response of the last rounds was rejected, evicted or aged out"
            )
        sync = trainer.plan.sync
        if after_step(run, values, extra):
            extra = {}


def drive_async(run: Run, interrupted: Callable[[], bool]) -> None:
    """Searcher threads beside the trainer loop until the last step or an interruption.

    With `search.exact_lag` D a step waits for what the weights of D publications ago were to draw,
    and a publication until the weights before it have begun all of theirs.

    Raises:
        WorkerError: a searcher (or the weight poller) failed; its cause has the traceback.
    """
    stop = StopFlag()
    lag = make_exact_lag(run) if run.config.search.exact_lag else None
    admission = lag or make_admission(run)
    searches = searches_of(run, admission)
    searchers = [
        Worker(f"searcher-{s.searcher.index}", _step_of(run, i, s), stop, idle_s=POLL_S)
        for i, s in enumerate(searches)
    ]
    others = [
        *(Worker(f"grader-{s.searcher.index}", s.grade, stop, idle_s=POLL_S) for s in searches),
        Worker("weight-poller", functools.partial(run.search.transport.poll, DELIVERY_S), stop),
    ]
    idle_before = [searcher.idle_s for searcher in run.search.searchers]

    def count() -> None:
        for i, worker in enumerate(searchers):
            run.search.searchers[i].idle_s = idle_before[i] + worker.idle_total_s

    def slot_use() -> tuple[int, int]:
        used = [run.search.slot_use(), *(search.slot_use() for search in searches)]
        return sum(tokens for tokens, _ in used), sum(steps for _, steps in used)

    pacing = RemoteAdmission(run.search.home) if isinstance(run.search, RemoteSearch) else admission
    beside = Beside(pacing, stop, [*searchers, *others], count, slot_use, lag=lag)
    drive_beside(run, interrupted, beside)


def make_admission(run: Run) -> Admission:
    """What says when this process's searchers may begin another prompt."""
    demand = make_demand(run.config, run.shared.share, run.shared.num_shares)
    unmerged = sum(outbox.num_groups for outbox in run.search.outboxes)
    return Admission(demand, [searcher.index for searcher in run.search.searchers], unmerged)


def make_exact_lag(run: Run) -> ExactLag:
    """What keeps the data of all this process's searchers, which are the run's, equally old."""
    config, outboxes = run.config, {s.index: s.outbox for s in run.search.searchers}
    return ExactLag(
        config.search.exact_lag,
        sync_period=config.sync_period,
        quota=quota_of(config.batch.num_prompts, config.sync_period, list(outboxes)),
        outboxes=outboxes,
    )


def searches_of(run: Run, admission: TicketOffice) -> list[ContinuousSearch]:
    """This process's searchers as they run beside a trainer."""
    if isinstance(run.search, RemoteSearch):
        return []
    return make_searches(run.config, run.search.searchers, admission, run.logs.schedule.append)


def _step_of(run: Run, station: int, search: ContinuousSearch) -> Callable[[], bool]:
    """What a searcher's thread does: a part of an evaluation comes before the next chunk."""
    return lambda: run.evaluations.step(station) or search.step()
