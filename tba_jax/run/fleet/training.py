# SPDX-License-Identifier: Apache-2.0
"""The trainer's process of a fleet: a run whose searchers are elsewhere, and the desk they come to.

It is the same run as with threads, conducted by the same code; only who searches differs, and what
it shows is relayed. Responses that are given come from here. It knows nothing of Ray. Invariant:
no searcher is let in before the run is restored, nor after it has ended.
"""

import contextlib
import functools
import threading
import time
import uuid
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import Any

from tba_jax.config.resolved import is_gang
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import peer_errors
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.flow.rounds import RoundCommit
from tba_jax.replay.admission import Admission
from tba_jax.report.relay import Relay
from tba_jax.run.beside import DELIVERY_S, POLL_S, Beside, drive_beside
from tba_jax.run.drivers import make_admission
from tba_jax.run.fleet.desk import Desk
from tba_jax.run.fleet.gang import evaluate_last, follow, join_gang, publish_last
from tba_jax.run.fleet.identity import identity_of
from tba_jax.run.fleet.link import Unreachable
from tba_jax.run.fleet.messages import (
    Answer,
    Caller,
    Hello,
    Vitals,
    Welcome,
    decode,
    decode_part,
)
from tba_jax.run.fleet.seats import Terms
from tba_jax.run.run import Run
from tba_jax.run.searching import Search
from tba_jax.run.workdir import Outcome
from tba_jax.weights.checkpoints import CheckpointTransport
from tba_jax.weights.merging import MergingTransport
from tba_jax.weights.objects import ObjectTransport
from tba_jax.weights.remote import VersionWriter
from tba_jax.weights.stored import Store


class TrainerHost:
    """The trainer's process; `run` goes on until the run ends, the rest are messages meanwhile.

    Args:
        config: validated.
        workdir: claimed by whoever made this process.
        accept_changed: as in `conduct`.
        store: of objects, where weights travel through one.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        accept_changed: Collection[str],
        store: Store | None = None,
    ) -> None:
        self._config = config
        self._workdir = workdir
        self._accept_changed = accept_changed
        self._store = store
        self._relay = Relay()
        self._interrupted = threading.Event()
        self._desk: Desk | None = None
        self._clock: Callable[[], float] = time.perf_counter

    def run(self, number: int = 0, coordinator: str = "") -> Outcome:
        """Begin the run or go on with it.

        Args:
            number: of this process, in a gang.
            coordinator: HOST:PORT, where the members of a gang meet.

        Raises:
            PeerError: another member is gone. Else what `conduct` raises.
        """
        start_s = time.perf_counter()
        from tba_jax.run.conduct import Outside, conduct
        from tba_jax.run.joining import start_cluster

        if is_gang(self._config):
            cluster = join_gang(self._config, coordinator, number)
        else:
            cluster = start_cluster(self._config)
        lead = functools.partial(drive_fleet, open_desk=self._open)
        with peer_errors(cluster):
            outcome = conduct(
                self._config,
                self._workdir,
                cluster,
                self._interrupted.is_set,
                hold=None,
                accept_changed=self._accept_changed,
                start_s=start_s,
                display=self._relay,
                drive=lead if cluster.is_primary else follow,
                outside=Outside(store=self._store),
            )
        cluster.close()
        return outcome

    def _open(self, desk: Desk | None, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._desk = desk

    def join(self, hello: Hello) -> tuple[Welcome, float]:
        """`Desk.join`, and the run's clock."""
        return self._ready().join(hello), self._clock()

    def assign(self, caller: Caller, wanted: int, seen: int, vitals: Vitals) -> Answer:
        """`Desk.assign`."""
        return self._ready().assign(caller, wanted, seen, vitals)

    def put(self, caller: Caller, data: bytes) -> Answer:
        """`Desk.put` of encoded commits."""
        desk = self._ready()
        try:
            commits: list[RoundCommit] = decode(data)
        except ValueError as error:
            return Answer("refused", why=str(error))
        return desk.put(caller, commits, len(data))

    def hand_in(self, caller: Caller, loan: tuple[int, int], data: bytes) -> Answer:
        """`Desk.hand_in` of an encoded part; no bytes: it could not be done."""
        desk = self._ready()
        try:
            part = decode_part(data) if data else None
        except ValueError as error:
            return Answer("refused", why=str(error))
        return desk.hand_in(caller, loan, part)

    def news(self, since: int) -> tuple[int, list[tuple[str, tuple[Any, ...]]]]:
        """What is to be shown, as `Relay.since`."""
        return self._relay.since(since)

    def interrupt(self) -> None:
        """Save after the current step and end."""
        self._interrupted.set()

    def _ready(self) -> Desk:
        if self._desk is None:
            raise Unreachable("the trainer is starting, or has failed")
        return self._desk


def drive_fleet(
    run: Run,
    interrupted: Callable[[], bool],
    *,
    open_desk: Callable[[Desk | None, Callable[[], float]], None],
) -> None:
    """Train beside searchers of other processes until the last step or an interruption.

    Args:
        run: its searchers only keep count.
        interrupted: looked at between steps.
        open_desk: as in `opened`.
    """
    searchers = run.search.searchers
    streams = run.search.streams if isinstance(run.search, Search) else ()
    _do_given_rounds(run, interrupted)
    admission = make_admission(run)
    desk = _make_desk(run, admission)
    stop = StopFlag()
    workers = _workers(run, desk, stop)
    before = [(searcher.idle_s, searcher.decoded_tokens) for searcher in searchers]

    def count() -> None:
        for searcher, (idle_s, tokens) in zip(searchers, before, strict=True):
            more_idle_s, more_tokens = desk.totals(searcher.index)
            searcher.idle_s = idle_s + more_idle_s
            searcher.decoded_tokens = tokens + more_tokens
        for stream, outbox in zip(streams, run.search.outboxes, strict=bool(streams)):
            _, position = outbox.committed
            if position is not None:
                stream.num_skipped = position["num_skipped"]

    def figures() -> dict[str, float]:
        desk.note_step(run.trainer.step_index)
        return desk.figures()

    run.sections["fleet"] = lambda: {
        **{name.removeprefix("fleet/"): value for name, value in desk.figures().items()},
        "by_searcher": desk.searchers(),
    }
    with opened(desk, run.clock, open_desk):
        beside = Beside(admission, stop, workers, count, desk.take_slot_use, figures)
        drive_beside(run, interrupted, beside)
        if is_gang(run.config) and publish_last(run):
            evaluate_last(run, desk)


@contextlib.contextmanager
def opened(
    desk: Desk,
    clock: Callable[[], float],
    open_desk: Callable[[Desk | None, Callable[[], float]], None],
) -> Iterator[None]:
    """Searchers may come; after it they are told that the run has ended.

    Where it fails they are told nothing: the run may go on in another process, or else somebody
    ends them.

    Args:
        desk: for them.
        clock: of the run.
        open_desk: is given the desk when searchers may come, and None when it failed.
    """
    open_desk(desk, clock)
    try:
        yield
        desk.close()
    except BaseException:
        open_desk(None, clock)
        raise
    finally:
        desk.stop_lending()


def _make_desk(run: Run, admission: Admission) -> Desk:
    """The desk of a run, with what its searchers must be made of."""
    config = run.config
    size, way = config.search.samples_per_prompt, _way(run)
    return Desk(
        Terms(
            epoch=uuid.uuid4().hex,
            identity=identity_of(run.shared),
            samples_per_prompt=size,
            silence_s=config.fleet.silence_s,
            num_tickets_ahead=max(1, -(-config.search.num_slots // size))
            if config.search.num_slots
            else config.search.prompts_per_round,
        ),
        dict(enumerate(run.search.outboxes)),
        admission,
        run.evaluations,
        clock=time.monotonic,
        tell=run.logs.progress.note,
        stored=way.stored if isinstance(way, ObjectTransport) else lambda version: None,
    )


def _way(run: Run) -> CheckpointTransport | ObjectTransport | VersionWriter:
    """How weights leave this process."""
    way = run.search.transport
    way = way.source if isinstance(way, MergingTransport) else way
    assert isinstance(way, CheckpointTransport | ObjectTransport | VersionWriter), "validated"
    return way


def _workers(run: Run, desk: Desk, stop: StopFlag) -> list[Worker]:
    """Who writes weights and says so, who sees to evaluations, and who misses silent searchers."""
    way = _way(run)
    if not isinstance(way, VersionWriter):
        way.keep_also(lambda: run.evaluations.wanted)

    def deliver() -> bool:
        """Publications, and word of them."""
        if not run.search.transport.poll(DELIVERY_S):
            return False
        published = way.latest(0)
        assert published is not None, "it was delivered"
        desk.ring(published.version)
        return True

    def evaluate() -> bool:
        """Searchers do the parts, where there are any: training need not wait for them."""
        if desk.lends:
            run.evaluations.merge()
            return False
        return run.evaluations.step(0)

    return [
        Worker("weight-poller", deliver, stop),
        Worker("evaluator", evaluate, stop, idle_s=POLL_S),
        Worker("fleet-sweep", desk.sweep, stop, idle_s=run.config.fleet.silence_s / 8),
    ]


def _do_given_rounds(run: Run, interrupted: Callable[[], bool]) -> None:
    """Responses that are given, which are scored where the trainer is."""
    if not isinstance(run.search, Search):
        return  # validated: a gang is given none
    given = [searcher for searcher in run.search.searchers if searcher.num_given_rounds_left]
    if given:
        run.trainer.publish()
        run.search.transport.poll()
    for searcher in given:
        while searcher.num_given_rounds_left and not interrupted():
            searcher.step()
