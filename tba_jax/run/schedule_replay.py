# SPDX-License-Identifier: Apache-2.0
"""Re-execute an asynchronous run in one thread from its schedule log.

`schedule.jsonl` contains the order of publications, merged rounds and steps, the decode chunk at
which each prompt was admitted or a response of an environment was processed, and the used versions.
The config determines everything else, so the same order gives the same losses: bit-equal on CPU
with the same device layout. Environments are not called. Rewards of functions are computed again;
if a reward times out differently, the replay ends with an error. The log is read as a stream,
because the log of a long run does not fit in memory. A first pass checks every line and keeps only
counts.
"""

import collections
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.environments.episodes import TakenAnswer, UnexpectedAnswer
from tba_jax.environments.pool import Answer
from tba_jax.flow.rounds import RoundReport, summarise_rounds
from tba_jax.report.jsonl import parse_line, read_lines, stream_jsonl
from tba_jax.report.lines import wrong_event
from tba_jax.run.drivers import searches_of
from tba_jax.run.loop import after_step
from tba_jax.run.run import Run
from tba_jax.run.search_parts import Search
from tba_jax.search.continuous import ContinuousSearch, Finished, Ticket
from tba_jax.weights.transport import Published


class ReplayError(ValueError):
    """The log is not usable, or the replay differs from the log."""


Event = Mapping[str, Any]


class Admissions:
    """For each ticket of a searcher, the chunk before its last admission.

    If a process was killed before it committed a ticket, the next process admitted the ticket
    again; only the last admission counts. Most tickets are admitted once, in the order of their
    numbers, so only the others are stored.
    """

    def __init__(self) -> None:
        self._newest: int | None = None
        self._others: dict[int, int] = {}

    def add(self, chunk: int, tickets: Sequence[int]) -> None:
        """Add the next event of the log."""
        for ticket in tickets:
            if self._newest is None or ticket > self._newest:
                self._newest = ticket
            else:
                self._others[ticket] = chunk

    def is_last(self, ticket: int, chunk: int) -> bool:
        """Return whether the admission of the ticket before this chunk is the ticket's last one."""
        return self._others.get(ticket, chunk) == chunk


class Admitted:
    """Admission of a replay: admits every ticket, because the log has the order of tickets."""

    def admit(self, searcher: int, version: int) -> bool:
        """Return True."""
        return True

    def commit(self, searcher: int, latency_s: float, version: int) -> None:
        """Do nothing."""


class Schedule:
    """A schedule log, read as often as needed.

    Args:
        path: path of the log; may be compressed (NAME.gz).

    Attributes:
        uses: for each searcher, version -> number of events that need the version.
        admissions: admissions of each searcher that decodes in chunks.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = Path(path)
        self.uses: dict[int, collections.Counter[int]] = {}
        self.admissions: dict[int, Admissions] = {}

    def note(self, event: Event) -> None:
        """Count that an event needs this version; called once for each event, in order."""
        if event["event"] == "chunk":
            admissions = self.admissions.setdefault(event["searcher"], Admissions())
            admissions.add(event["chunk"], event["tickets"])
        if event["event"] in ("chunk", "round"):
            uses = self.uses.setdefault(event["searcher"], collections.Counter())
            uses[event["version"]] += 1

    def events(self, *kinds: str) -> Iterator[Event]:
        """Yield the events of these kinds.

        Raises:
            ValueError: a line is not a JSON object; the message has file and line number.
        """
        wanted = tuple(b'"%s"' % kind.encode() for kind in kinds)
        for number, line in read_lines(self._path):
            if any(kind in line for kind in wanted):
                event = parse_line(f"{self._path}, line {number}", line)
                if event.get("event") in kinds:
                    yield event

    def chunks(self, searcher: int) -> Iterator[Event]:
        """Yield the decode chunks of a searcher."""
        # Compare text first: lines of other searchers need not be parsed.
        others = (
            b'{"event": "chunk", "searcher": ',
            b'{"event": "chunk", "searcher": %d,' % searcher,
        )
        for number, line in read_lines(self._path):
            if b'"chunk"' in line and (
                line.startswith(others[1]) or not line.startswith(others[0])
            ):
                event = parse_line(f"{self._path}, line {number}", line)
                if event.get("event") == "chunk" and event["searcher"] == searcher:
                    yield event


def read_schedule(path: str | os.PathLike[str]) -> Schedule:
    """Read the schedule of a run.

    Raises:
        ReplayError: the file is missing, holds no steps, or records lost lines.
        ValueError: a line is damaged.
    """
    if not Path(path).is_file():
        raise ReplayError(f"no schedule log {str(path)!r}; give the schedule.jsonl of a run")
    has_steps = False
    schedule = Schedule(path)
    # All lines are read, because a line that is not an event is damaged.
    for event in stream_jsonl(path, wrong_event):
        has_steps = has_steps or event["event"] == "step"
        schedule.note(event)
        if event["event"] == "lost" and event["log"] == "schedule.jsonl":
            raise ReplayError(
                f"{path} lacks events: it had {event['found_bytes']:,} of {event['num_bytes']:,} "
                f"bytes when the run was resumed at step {event['step']}, and the missing events "
                "cannot be replayed. Give the log of another run"
            )
    if not has_steps:
        raise ReplayError(f"{path} has no steps to replay. Give the schedule.jsonl of a run")
    return schedule


def drive_schedule(run: Run, schedule: Schedule, interrupted: Callable[[], bool]) -> None:
    """Repeat the events of a schedule in order, and compare each with the log.

    Raises:
        ReplayError: prompts, rejections or drawn responses differ; the message says where.
    """
    if run.config.task.environment and run.config.driver == "sync":
        raise ReplayError(
            "a run with task.environment and driver=sync cannot be replayed: its schedule does not "
            "hold the responses of the environment. Replay a run with driver=async"
        )
    if run.search.server is not None:
        raise ReplayError(
            "a run with search.engine=openai cannot be replayed: a server sampled its responses"
        )
    trainer = run.trainer
    weights = _Weights(run, schedule)
    searches = searches_of(run, Admitted())
    for search in searches:
        search.searcher.parts.sampler.replay_environments()
    again = [
        SearcherReplay(
            s,
            weights.use,
            schedule.chunks(s.searcher.index),
            schedule.admissions.get(s.searcher.index),
        )
        for s in searches
    ]
    reports: list[RoundReport] = []
    for event in schedule.events("sync", "round", "step"):
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
                raise ReplayError(
                    f"step {event['step']}: the buffer has too few responses for a batch; use the "
                    "config of the logged run"
                )
            _compare(trainer.last_event, event, ("step", "trajectory_ids", "weights", "bucket"))
            after_step(run, values, summarise_rounds(reports))
            reports = []


class _Weights:
    """Published weights that later events of each searcher need."""

    def __init__(self, run: Run, schedule: Schedule) -> None:
        self._run = run
        self._left = {searcher: dict(uses) for searcher, uses in schedule.uses.items()}
        self._known: dict[tuple[int, int], Published] = {}

    def publish(self) -> None:
        """Publish at the trainer's step, and evaluate the first version."""
        run = self._run
        run.trainer.publish()
        run.search.transport.poll()
        assert isinstance(run.search, Search), "a schedule is replayed in one process"
        for searcher in run.search.local:
            published = searcher.parts.weights()
            assert published is not None
            if run.evaluated.before is None:
                run.evaluate(published.version, published.params)
            if published.version in self._left.get(searcher.index, {}):
                self._known[published.version, searcher.index] = published

    def use(self, version: int, searcher: int) -> Published:
        """Return the weights of an event; the weights are dropped after the last event.

        Raises:
            ReplayError: the log has no publication of this version.
        """
        key = version, searcher
        if key not in self._known:
            raise ReplayError(
                f"searcher {searcher} uses version {version}, which no sync of the log published"
            )
        left = self._left[searcher]
        left[version] -= 1
        if left[version]:
            return self._known[key]
        del left[version]
        return self._known.pop(key)


class SearcherReplay:
    """Replay of the events of one searcher, each event as late as possible.

    Args:
        search: search of the searcher, in its state at the beginning of the run.
        use: (version, searcher) -> published weights; called once for each event.
        chunks: chunks of the searcher, in order.
        admissions: admissions of the searcher's tickets; None if the searcher works in rounds.
    """

    def __init__(
        self,
        search: ContinuousSearch,
        use: Callable[[int, int], Published],
        chunks: Iterator[Event],
        admissions: Admissions | None,
    ) -> None:
        self._search = search
        self._use = use
        self._admissions = admissions
        self._chunks = chunks
        self._next_chunk = next(self._chunks, None)
        self._admission: dict[int, int] = {}
        self._tickets: dict[int, Ticket] = {}
        self._finished: dict[int, Finished] = {}

    def do(self, event: Event) -> None:
        """Repeat the round or ticket of an event up to its commit to the outbox."""
        searcher, number = self._search.searcher, event["round"]
        published = self._use(event["version"], searcher.index)
        if searcher.num_given_rounds_left or self._admissions is None:
            searcher.do_round(published)
            return
        while number not in self._finished:
            self._advance(number)
        self._search.commit([self._finished.pop(number)])
        del self._tickets[number]

    def _advance(self, wanted: int) -> None:
        """Admit the tickets of the next chunk, then decode that chunk."""
        searcher = self._search.searcher
        assert self._admissions is not None
        published: Published | None = None
        tickets: list[Ticket] = []
        answers: list[TakenAnswer] = []
        event = self._next_chunk
        if event is not None and event["chunk"] == searcher.num_chunks:
            self._next_chunk = next(self._chunks, None)
            if event["begins"]:
                self._search = self._search.renewed()
            published = self._use(event["version"], searcher.index)
            tickets = [self._ticket(number) for number in event["tickets"]]
            logged = event.get("answers", ())
            answers = [TakenAnswer(i, j, Answer(*answer)) for i, j, answer in logged]
            self._admission.update(dict.fromkeys(event["tickets"], event["chunk"]))
        elif self._search.is_idle:
            raise ReplayError(f"round {wanted} of searcher {searcher.index} never ends")
        try:
            self._search.advance(published, tickets, answers)
        except UnexpectedAnswer as error:
            raise ReplayError(
                f"searcher {searcher.index}: {error}; use the config of the logged run"
            ) from error
        for finished in self._search.take_finished(sys.maxsize):
            number = finished.ticket.number
            if self._admissions.is_last(number, self._admission.pop(number)):
                self._finished[number] = finished

    def _ticket(self, number: int) -> Ticket:
        """Return a ticket by its number; unfinished tickets of a killed process are repeated."""
        while number not in self._tickets:
            ticket = self._search.take()
            self._tickets[ticket.number] = ticket
        return self._tickets[number]


def _compare(done: Mapping[str, Any], logged: Mapping[str, Any], fields: Sequence[str]) -> None:
    for field in fields:
        if done[field] != logged[field]:
            raise ReplayError(
                f"{logged['event']} {logged[logged['event']]}: {field} is {done[field]}, the log "
                f"says {logged[field]}; use the config of the logged run"
            )
