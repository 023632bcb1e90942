# SPDX-License-Identifier: Apache-2.0
"""Evaluations of a run: when they are due, and who works on their shards.

The owner of the replay buffer owns the queue. Its own searchers take shards from it; searchers of
other processes lease them from the search server.
"""

import functools
import time

from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.run.errors import FleetError
from tba_jax.run.evaluating import load_start_weights
from tba_jax.run.peers import Owner
from tba_jax.run.run import Run

_POLL_S = 0.01


def is_due(run: Run, step: int, newest: int) -> bool:
    """Whether to evaluate the version published at `step`; `newest` is the last one begun."""
    if newest < 0:
        return True
    period = run.config.eval.period
    return bool(period) and step // period > newest // period and step < run.config.num_steps


def request(run: Run, version: int) -> None:
    """Request the evaluation of a version.

    Searchers of this process that do not have the version any more take no part.
    """
    latest = [run.search.transport.latest(i) for i in run.shared.stations]
    found = [p.params if p is not None and p.version == version else None for p in latest]
    run.evaluations.request(version, found or [None])


def wind_up(run: Run) -> None:
    """Record what is done, and forget what has not begun.

    What has begun is finished with the evaluation of the final policy.
    """
    run.evaluations.merge()
    run.record_evaluations()
    run.evaluations.forget(after=run.evaluations.newest_begun)


def evaluate_start_model(run: Run) -> None:
    """Evaluate the start model of a run that was interrupted before it was evaluated.

    Where this process has no searchers, `request_start_model` does it.
    """
    if run.cluster.is_primary and run.search.local:
        weights = load_start_weights(run.shared, run.shared.sites.evaluation)
        run.evaluate(0, weights)


def request_start_model(run: Run) -> None:
    """Request the evaluation of the start model from searchers of other processes."""
    if run.trainer.step_index and run.evaluated.before is None and not run.search.local:
        run.evaluations.request(0, [None])


def evaluate_now(run: Run, version: int) -> None:
    """Evaluate the newest version while nobody samples, and record it.

    The synchronous driver of one process does it whole on its only thread. Else the devices of all
    searchers work on it.

    Raises:
        FleetError: this process has no searchers, and no other process takes the shards.
    """
    server = run.link.search_server if isinstance(run.link, Owner) else None
    if run.config.driver == "sync" and server is None:
        published = run.search.transport.latest(0)
        assert published is not None
        run.evaluate(version, published.params)
        return
    request(run, version)
    if server is not None:
        server.set_version(version)
    if run.config.driver == "sync":
        while not run.evaluations.is_idle:
            if not (run.search.local and run.evaluations.step()):
                time.sleep(_POLL_S)
                run.evaluations.merge()
    else:
        _step_together(run)
    run.evaluations.merge()
    run.record_evaluations()


def evaluate_last(run: Run) -> None:
    """Publish and evaluate the final policy, unless that is done; a call of all processes."""
    step = run.trainer.step_index
    if step < run.config.num_steps or run.evaluated.last_eval_step >= step:
        return
    run.logs.progress.phase("evaluating the final policy")
    run.trainer.publish()
    run.search.transport.poll()
    if run.shared.is_follower:
        run.evaluated.last_eval_step = step
    else:
        evaluate_now(run, step)


def _step_together(run: Run) -> None:
    """A thread for each searcher's devices until everything that was requested is done."""
    stop = StopFlag()
    stations = run.shared.stations
    workers = [
        Worker(f"evaluator-{i}", functools.partial(run.evaluations.step, i), stop) for i in stations
    ]
    server = run.link.search_server if isinstance(run.link, Owner) else None
    limit_s = run.config.fleet.trainer_silence_s
    deadline = time.monotonic() + limit_s
    try:
        for worker in workers:
            worker.start()
        while not run.evaluations.is_idle:
            stop.check()
            stop.wait(_POLL_S)
            if stations or server is None:
                continue
            run.evaluations.merge()
            server.lose_silent_searchers()
            if server.gives_leases:
                deadline = time.monotonic() + limit_s
            elif time.monotonic() > deadline:
                raise FleetError(
                    f"no searcher has come for {limit_s:.0f} s (config.fleet.trainer_silence_s) to "
                    "evaluate the final policy; it is saved, and the same command goes on from "
                    "there"
                )
    finally:
        stop.set()
        for worker in workers:
            worker.join(_POLL_S)
    stop.check()
