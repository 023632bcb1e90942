# SPDX-License-Identifier: Apache-2.0
"""Re-execute an asynchronous run in one thread from its schedule log.

`schedule.jsonl` says in which order weights were published, rounds merged and steps made, and which
versions each round used. Everything else of a run follows from its config, so the same order gives
the same losses: bit-equal on CPU with the same device layout. What an asynchronous run did once can
be looked at again as often as it takes. Rewards are computed anew; where one times out differently
the replay says so instead of going on.
"""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.flow.rounds import RoundReport, summarise_rounds
from tba_jax.report.writers import read_jsonl
from tba_jax.run.drivers import after_step
from tba_jax.run.run import Run
from tba_jax.weights.transport import Published


class ReplayError(ValueError):
    """The log is not usable, or the replay no longer does what the log says."""


def read_schedule(path: str) -> list[dict[str, Any]]:
    """The events that decide what is computed, in order.

    Raises:
        ReplayError: no such file, or it holds no steps.
    """
    if not Path(path).is_file():
        raise ReplayError(f"no schedule log {path!r}; give the schedule.jsonl of a run")
    events = [e for e in read_jsonl(path) if e.get("event") in ("sync", "round", "step")]
    if not any(e["event"] == "step" for e in events):
        raise ReplayError(f"{path} holds no step; there is nothing to replay")
    return events


def drive_schedule(
    run: Run, events: Sequence[Mapping[str, Any]], interrupted: Callable[[], bool]
) -> None:
    """Do what the events say, in their order, and check that it is what happened.

    Raises:
        ReplayError: prompts, rejections or drawn responses differ from the log; says where.
    """
    trainer = run.trainer
    last_use = {
        version: i
        for i, e in enumerate(events)
        if e["event"] == "round"
        for version in (e["version"], *(version for _, version in e["swaps"]))
    }
    weights: dict[tuple[int, int], Published] = {}
    reports: list[RoundReport] = []
    for i, event in enumerate(events):
        if interrupted() or trainer.step_index >= run.config.num_steps:
            return
        if event["event"] == "sync":
            trainer.publish()
            run.search.transport.poll()
            for searcher in run.search.searchers:
                published = searcher.weights()
                assert published is not None
                weights[published.version, searcher.index] = published
            if run.evaluated.before is None:
                run.evaluate(trainer.step_index, weights[trainer.step_index, 0].params)
            weights = {k: w for k, w in weights.items() if last_use.get(k[0], -1) >= i}
        elif event["event"] == "round":
            searcher = run.search.searchers[event["searcher"]]
            swaps = {chunk: weights[version, searcher.index] for chunk, version in event["swaps"]}
            searcher.do_round(weights[event["version"], searcher.index], swaps.get)
            reports += trainer.merge()
            _compare(trainer.last_event, event, ("round", "swaps", "prompt_ids", "rejected"))
        else:
            values = trainer.step()
            if values is None:
                raise ReplayError(f"step {event['step']}: the buffer holds too little to draw from")
            _compare(trainer.last_event, event, ("step", "trajectory_ids", "bucket"))
            if after_step(run, values, summarise_rounds(reports)):
                reports = []


def _compare(done: Mapping[str, Any], logged: Mapping[str, Any], fields: Sequence[str]) -> None:
    for field in fields:
        if done[field] != logged[field]:
            raise ReplayError(
                f"{logged['event']} {logged[logged['event']]}: {field} is {done[field]}, the log "
                f"says {logged[field]}; is the config that of the logged run?"
            )
