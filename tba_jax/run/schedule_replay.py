# SPDX-License-Identifier: Apache-2.0
"""Re-execute an asynchronous run in one thread from its schedule log.

`schedule.jsonl` says in which order weights were published, rounds merged and steps made, before
which decode chunk each prompt was admitted, and which versions were used. Everything else of a run
follows from its config, so the same order gives the same losses: bit-equal on CPU with the same
device layout. What an asynchronous run did once can be looked at again as often as it takes.
Rewards are computed anew; where one times out differently the replay says so instead of going on.
"""

import collections
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.flow.rounds import RoundReport, summarise_rounds
from tba_jax.report.lines import wrong_event
from tba_jax.report.writers import read_jsonl
from tba_jax.run.beside import after_step
from tba_jax.run.drivers import make_admission, make_searches
from tba_jax.run.run import Run
from tba_jax.search.continuous import ContinuousSearch, Finished, Ticket
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
    kinds = ("sync", "chunk", "round", "step")
    events = [e for e in read_jsonl(path, wrong_event) if e["event"] in kinds]
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
    weights = _Weights(run, events)
    admission = make_admission(run)
    again = [SearcherReplay(s, weights.use, events) for s in make_searches(run, admission)]
    reports: list[RoundReport] = []
    for event in events:
        if interrupted() or trainer.step_index >= run.config.num_steps:
            return
        if event["event"] == "sync":
            weights.publish()
        elif event["event"] == "round":
            again[event["searcher"]].do(event)
            reports += trainer.merge()
            _compare(trainer.last_event, event, ("round", "version", "prompt_ids", "rejected"))
        elif event["event"] == "step":
            values = trainer.step()
            if values is None:
                raise ReplayError(f"step {event['step']}: the buffer holds too little to draw from")
            _compare(trainer.last_event, event, ("step", "trajectory_ids", "weights", "bucket"))
            if after_step(run, values, summarise_rounds(reports)):
                reports = []


class _Weights:
    """Published versions that are still needed, for each searcher."""

    def __init__(self, run: Run, events: Sequence[Mapping[str, Any]]) -> None:
        self._run = run
        uses = [e for e in events if e["event"] in ("chunk", "round")]
        self._left = collections.Counter((e["version"], e["searcher"]) for e in uses)
        self._known: dict[tuple[int, int], Published] = {}

    def publish(self) -> None:
        """Publish at the trainer's step, and evaluate the first version."""
        run = self._run
        run.trainer.publish()
        run.search.transport.poll()
        for searcher in run.search.searchers:
            published = searcher.parts.weights()
            assert published is not None
            if run.evaluated.before is None:
                run.evaluate(published.version, published.params)
            if self._left[published.version, searcher.index]:
                self._known[published.version, searcher.index] = published

    def use(self, version: int, searcher: int) -> Published:
        """The weights of an event; dropped with the last event that needs them.

        Raises:
            ReplayError: the log did not publish them.
        """
        key = version, searcher
        if key not in self._known:
            raise ReplayError(
                f"searcher {searcher} uses version {version}, which no sync of the log published"
            )
        self._left[key] -= 1
        return self._known[key] if self._left[key] else self._known.pop(key)


class SearcherReplay:
    """One searcher, doing again what the log says, as late as possible.

    Args:
        search: of the searcher, at the beginning of the run.
        use: (version, searcher) -> the weights of one of its events.
        events: of all searchers, in order.
    """

    def __init__(
        self,
        search: ContinuousSearch,
        use: Callable[[int, int], Published],
        events: Sequence[Mapping[str, Any]],
    ) -> None:
        self._search = search
        self._use = use
        index = search.searcher.index
        self._chunks = collections.deque(
            e for e in events if e["event"] == "chunk" and e["searcher"] == index
        )
        # A ticket that a process left uncommitted was admitted again by the next one; only what
        # came of its last admission was committed.
        self._last_admission = {n: e["chunk"] for e in self._chunks for n in e["tickets"]}
        self._admission: dict[int, int] = {}
        self._tickets: dict[int, Ticket] = {}
        self._finished: dict[int, Finished] = {}

    def do(self, event: Mapping[str, Any]) -> None:
        """The round or ticket of this event, committed to the outbox."""
        searcher, number = self._search.searcher, event["round"]
        published = self._use(event["version"], searcher.index)
        if searcher.num_given_rounds_left or not self._last_admission:
            searcher.do_round(published)
            return
        while number not in self._finished:
            self._advance(number)
        self._search.commit([self._finished.pop(number)])
        del self._tickets[number]

    def _advance(self, wanted: int) -> None:
        """One chunk more, with what the log says before it."""
        searcher = self._search.searcher
        published: Published | None = None
        tickets: list[Ticket] = []
        if self._chunks and self._chunks[0]["chunk"] == searcher.num_chunks:
            event = self._chunks.popleft()
            if event["begins"]:
                self._search = self._search.renewed()
            published = self._use(event["version"], searcher.index)
            tickets = [self._ticket(number) for number in event["tickets"]]
            self._admission.update(dict.fromkeys(event["tickets"], event["chunk"]))
        elif self._search.is_idle:
            raise ReplayError(f"round {wanted} of searcher {searcher.index} never ends")
        self._search.advance(published, tickets)
        for finished in self._search.take_finished(sys.maxsize):
            number = finished.ticket.number
            if self._admission[number] == self._last_admission[number]:
                self._finished[number] = finished

    def _ticket(self, number: int) -> Ticket:
        """The prompt of this number; one that was cut off by the end of a process comes again."""
        while number not in self._tickets:
            ticket = self._search.take()
            self._tickets[ticket.number] = ticket
        return self._tickets[number]


def _compare(done: Mapping[str, Any], logged: Mapping[str, Any], fields: Sequence[str]) -> None:
    for field in fields:
        if done[field] != logged[field]:
            raise ReplayError(
                f"{logged['event']} {logged[logged['event']]}: {field} is {done[field]}, the log "
                f"says {logged[field]}; is the config that of the logged run?"
            )
