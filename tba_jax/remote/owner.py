# SPDX-License-Identifier: Apache-2.0
"""Owner: tickets, evaluations and steps of a run, in the process that has the replay buffer.

Four methods: `take` tickets, `put` results, `beat`, and `step` for a plan with its batch. Searchers
and trainer of this process hold the object; every other process holds a `Client` with the same
methods. Open tickets of a lost process are issued again, with the same prompt and random key. The
first result of a ticket counts. With driver=sync, as many tickets begin as the trainer allows; with
driver=async, those whose responses can still be drawn within `replay.max_staleness`.

Invariants: each ticket is merged once. A restored owner issues the tickets again that were open,
for any number of searchers. Every process receives the same bytes for a step
(tests/remote/test_owner.py, tests/remote/test_steps.py).
"""

import dataclasses
import math
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from tba_jax.flow import tickets as flow
from tba_jax.flow.layout import RowLayout
from tba_jax.flow.state import PartState
from tba_jax.flow.tickets import DecodeCounts, EvaluationResult, Report, Result, Ticket
from tba_jax.flow.trajectory import Prompt
from tba_jax.remote.channel import HEARTBEAT_S, Handler, Rewind, RunEnded
from tba_jax.remote.evaluation_queue import EvaluationQueue
from tba_jax.remote.messages import Mail, Plan, Work, decode, encode
from tba_jax.replay.buffer import ReplayBuffer

_MOST_BYTES = 64 * 2**20  # of results that are not merged yet; above, no ticket begins
_MAX_REQUESTS_PER_S = 400.0  # from all processes without work
_RETRY_S = 0.02  # shortest time between two requests of one of them
_LONG_POLL_S = 1.0  # longest wait of a request for a step; the client then repeats it
# Plans that are kept: the owner decides step n + 1 after it has read the results of step n - 1, to
# which every process has contributed.
_NUM_KEPT = 3
# Attributes of an owner that a checkpoint has.
_COUNTERS = ("_next", "_num_begun", "num_given", "_num_generated", "_num_lost")
_COUNTERS += ("num_skipped", "decoded_tokens")


class OwnerSettings(NamedTuple):
    """Settings of an owner."""

    identity: str  # digest of the code and ID of the run, which other processes must have
    num_searchers: int
    num_local: int  # searchers of this process, the first ones
    share: float  # m, mean share of fresh groups in a batch
    max_staleness: int  # bound in steps; 0: no bound
    initial_fill: int  # responses needed before the first step, besides given ones
    samples_per_prompt: int  # S, responses of a ticket


@dataclasses.dataclass
class _Process:
    """Another process, with the searchers that it runs, its last request, and the response."""

    name: str
    searchers: Sequence[int]
    last_message_s: float
    number: int = -1
    response: bytes = b""


class Owner:
    """Thread-safe owner of the tickets of a run.

    Args:
        prompts: number -> (number, prompt) of the first usable prompt from this number on.
        given: tickets of given responses, numbered from 0; sampled tickets follow.
        is_publishing: whether the last published weights are still being written. If so, the next
            publication is left out; None: every version is needed, and a publication waits.
        log: receives one line for each join and loss of a process.

    Attributes:
        has_ended: whether the run has ended; later messages of searchers are refused.
        wants_stop: whether another process of the run received a stop signal.
        version: newest complete policy version, for searchers of other processes.
        idle_s: seconds without work of each searcher.
        decoded_tokens: sampled tokens of all results.
        num_skipped: number of too long prompts that were left out, with repeats.
        num_merged: number of merged results of this process.
    """

    def __init__(
        self,
        settings: OwnerSettings,
        buffer: ReplayBuffer,
        prompts: Callable[[int], tuple[int, Prompt]],
        evaluations: EvaluationQueue,
        layout: RowLayout,
        *,
        given: Sequence[Ticket] = (),
        is_publishing: Callable[[], bool] | None = None,
        log: Callable[[str], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.settings, self.evaluations = settings, evaluations
        self.has_ended, self.wants_stop, self.version = False, False, -1
        self.decoded_tokens = self.num_skipped = self.num_merged = 0
        self.remote_searchers = range(settings.num_local, settings.num_searchers)
        self._buffer, self._prompts, self._layout = buffer, prompts, layout
        self._is_publishing, self._decided = is_publishing, threading.Condition()
        self._plans: dict[int, Plan] = {}  # of the newest steps, for other trainer processes
        self._given, self.num_given = tuple(given), len(given)
        self._clock, self._log, self._lock = clock, log, threading.RLock()
        self._num_joins = self._num_searchers_lost = 0
        self._processes: dict[str, _Process] = {}  # those that run searchers, by place
        self.idle_s = [0.0] * settings.num_searchers
        self._next = 0  # number of the next new ticket
        self._again = set[int]()  # numbers that were lost
        self._open: dict[int, int] = {}  # number of a ticket -> searcher
        self._results: dict[int, Result] = {}  # not merged yet, by number
        self._num_bytes = self._num_generated = self._num_lost = self._num_duplicates = 0
        self._allowed: tuple[int, int] | None = None  # tickets and version, with driver=sync
        self._most_each = 0  # open tickets of a searcher, with driver=sync
        self._step = self._num_fresh = self._num_begun = 0
        self._decoded = DecodeCounts()

    # The four methods.

    def take(self, searcher: int, free: int, version: int) -> Work:
        """Return an evaluation shard, or at most `free` tickets for weights of this version."""
        if (shard := self.evaluations.take(searcher)) is not None:
            return [shard]
        with self._lock:
            if self._allowed is not None:  # the searchers share the tickets evenly
                free = min(free, self._most_each - len(self._open_of(searcher)))
            tickets: list[Ticket] = []
            while len(tickets) < free and (ticket := self._begin(version)) is not None:
                self._open[ticket.number] = searcher
                tickets.append(ticket)
            return tickets

    def put(self, searcher: int, results: Sequence[Result | EvaluationResult]) -> None:
        """Accept finished tickets and evaluation shards: all of them, or none.

        Raises:
            ValueError: a result is inconsistent, or its ticket was never issued.
        """
        finished = [each for each in results if isinstance(each, Result)]
        for result in finished:
            flow.check_result(result)
            if result.number >= self._next:
                raise ValueError(f"ticket {result.number} was not issued; take tickets first")
        with self._lock:
            for result in finished:
                self._accept(result)
        for each in results:
            if isinstance(each, EvaluationResult):
                self.evaluations.put(searcher, each)

    def beat(self, searcher: int, idle_s: float, decoded: DecodeCounts) -> None:
        """Add seconds without work, and counts of the decode session, since the last call."""
        with self._lock:
            self.idle_s[searcher] += idle_s
            self._decoded = self._decoded.plus(decoded)

    def step(self, step: int, wants_stop: Callable[[], bool]) -> Plan:
        """Return plan and batch after `step` completed steps; `Plan()`: there is no batch yet."""
        plan = Plan(stop=True)
        if not (wants_stop() or self.wants_stop):
            draws = self._buffer.draw(self._layout.num_prompts, self._layout.group_size, step)
            if draws is None:
                return Plan()
            publish = self._is_publishing is None or not self._is_publishing()
            plan = Plan(publish=publish, batch=self._layout.batch(draws, step), draws=draws)
        with self._decided:
            self._plans[step] = plan._replace(draws=())
            self._plans.pop(step - _NUM_KEPT, None)
            self._decided.notify_all()
        return plan

    def answer_step(self, step: int, wants_stop: bool) -> bytes:
        """Wait a second for the plan of a step, for another process; b"": not decided yet.

        Raises:
            ValueError: the step is over.
        """
        self.wants_stop = self.wants_stop or wants_stop
        with self._decided:
            self._decided.wait_for(lambda: max(self._plans, default=-1) >= step, _LONG_POLL_S)
            if step < min(self._plans, default=0):
                raise ValueError(
                    f"it requests step {step}, and step {max(self._plans)} is decided. Stop all "
                    "processes, and start each with the same command"
                )
            plan = self._plans.get(step)
        return b"" if plan is None else encode(plan)

    # Tickets.

    def _open_of(self, searcher: int) -> list[int]:
        return [number for number, owner in self._open.items() if owner == searcher]

    def _begin(self, version: int) -> Ticket | None:
        """Return the next ticket; None if none may begin with weights of this version."""
        is_new = not self._again
        if version < 0 or not self._admits(version, is_new):
            return None
        number = self._next if is_new else min(self._again)
        self._again.discard(number)
        if number < self.num_given:
            ticket = self._given[number]
        else:
            found, prompt = self._prompts(number)
            self.num_skipped += found - number
            ticket = Ticket(found, prompt)
        if is_new:
            self._next, self._num_begun = ticket.number + 1, self._num_begun + 1
        return ticket

    def _admits(self, version: int, is_new: bool) -> bool:
        """Return whether a ticket may begin with weights of this version.

        A step uses m p fresh groups, the oldest versions first: p prompts, a share m of them fresh.
        So a ticket of version v begins at step t only while fewer than (v + bound + 1 - t) m p
        groups are open or unused (the rule of AReaL, arXiv 2505.24298, without replayed groups).
        A batch may consist of fresh groups only, so the limit is at least p groups.
        """
        if self._allowed is not None:
            total, wanted = self._allowed
            return version == wanted and (self._num_begun < total or not is_new)
        settings = self.settings
        if self._num_bytes >= _MOST_BYTES:
            return False
        if not settings.max_staleness:
            return True
        steps = version + settings.max_staleness + 1 - self._step
        if steps < 1:
            return False  # wait for newer weights
        least = p = self._layout.num_prompts
        if not self._step:
            fill = -(-settings.initial_fill // settings.samples_per_prompt)
            least = max(least, self.num_given + fill)
        limit = max(least, math.floor(settings.share * p * steps))
        return self.num_under_way < limit

    def _accept(self, result: Result) -> None:
        if self._open.pop(result.number, None) is None:
            self._num_duplicates += 1
            return
        self._results[result.number] = result
        self._num_bytes += result.num_bytes
        self._num_generated += result.generated
        self.decoded_tokens += result.report.tokens

    def merge(self, step: int, most: int | None = None) -> list[Report]:
        """Move results, at most `most`, into the buffer in the order of their numbers.

        `step` is the number of completed training steps. The ledger is checked.
        """
        with self._lock:
            numbers = sorted(self._results)[:most]
            results = [self._results.pop(number) for number in numbers]
            self._num_bytes -= sum(result.num_bytes for result in results)
            generated, waiting = self._num_generated, self.ledger()["waiting"]
        if results:
            self._buffer.merge([result.group for result in results], step)
            self.num_merged += len(results)
        self._buffer.check_ledger(waiting, generated)
        self.note_step(step)
        return [result.report for result in results]

    def note_step(self, step: int) -> None:
        """Set the number of completed steps, and count the groups that wait in the buffer."""
        num_fresh = self._buffer.num_fresh_groups
        with self._lock:
            self._step, self._num_fresh = step, num_fresh

    def allow(self, total: int, version: int) -> None:
        """Allow the first `total` tickets, with weights of `version` only (driver=sync)."""
        with self._lock:
            self._allowed = total, version
            left = total - self._num_begun + len(self._again)
            self._most_each = max(1, -(-left // self.settings.num_searchers))

    @property
    def is_done(self) -> bool:
        """Whether all allowed tickets have results (driver=sync)."""
        with self._lock:
            has_left = self._allowed is not None and self._num_begun < self._allowed[0]
            return not (has_left or self._again or self._open)

    @property
    def is_filled(self) -> bool:
        """Whether all given responses and those of `search.initial_fill` have results."""
        wanted = self.settings.initial_fill + sum(len(each.responses) for each in self._given)
        with self._lock:
            left = min(self._next, *self._again, *self._open, self.num_given)
            return self._num_generated >= wanted and left == self.num_given

    @property
    def num_under_way(self) -> int:
        """Number of groups that were begun and not drawn yet."""
        with self._lock:
            return len(self._open) + len(self._results) + self._num_fresh

    def ledger(self) -> dict[str, int]:
        """Return the numbers of responses: generated, waiting for a merge, and lost."""
        with self._lock:
            generated = self._num_generated + self._num_lost
            waiting = sum(result.generated for result in self._results.values())
            return {"generated": generated, "waiting": waiting, "lost": self._num_lost}

    # Searchers of other processes.

    def handlers(self) -> Mapping[str, Handler]:
        """Return the handlers of a channel server."""
        return {
            "join": lambda data: encode(self.join(*decode(data, tuple))),
            "search": lambda data: self.answer(*decode(data, tuple)),
            "step": lambda data: self.answer_step(*decode(data, tuple)),
        }

    def join(self, searchers: Sequence[int], host: str, identity: str) -> str:
        """Let a process run searchers, and return its place, a name for its requests.

        Previous processes of the searchers are lost. Without searchers, a process only waits for
        the end of the run. `host` names it; `identity` is as in `OwnerSettings`.

        Raises:
            RunEnded: the run has ended. ValueError: the process has other code.
        """
        with self._lock:
            if self.has_ended:
                raise RunEnded("the run has ended")
            if searchers and identity != self.settings.identity:
                raise ValueError(
                    f"its code and run are {identity}, wanted {self.settings.identity}. Start the "
                    "same command, with the same version of tba_jax, on every machine"
                )
            for place, process in [*self._processes.items()]:
                if {*process.searchers} & {*searchers}:
                    self._lose(place)
            self._num_joins += 1
            name = f"searchers {[*searchers]} on {host}"
            place, process = uuid.uuid4().hex, _Process(name, searchers, self._clock())
            self._processes[place] = process
            self._log(f"{process.name} joined")
            return place

    def answer(self, place: str, number: int, wants_stop: bool, mails: Sequence[Mail]) -> bytes:
        """Respond to the searchers of a process: `put`, `beat` and `take` in one message.

        `number` counts the requests of the process. A repeated request gets the same response:
        newest version (-1: none), versions under evaluation, seconds after which searchers without
        work may ask again, and work for each mail.

        Raises:
            RunEnded: the run has ended. Rewind: the process must join again.
            ValueError: a result is invalid.
        """
        if self.has_ended:
            raise RunEnded("the run has ended")
        if (process := self._processes.get(place)) is None:
            raise Rewind(
                "the trainer was restored from a checkpoint, had no message for too long, or "
                "another process ran the searchers; lost responses are sampled again"
            )
        for mail in mails if number > process.number else ():
            self.put(mail.searcher, mail.results)  # may take seconds; twice is harmless
        with self._lock:
            if number > process.number:  # else the response was lost on the way
                process.last_message_s = self._clock()
                self.wants_stop = self.wants_stop or wants_stop
                for mail in mails:
                    self.beat(mail.searcher, mail.idle_s, mail.decoded)
                work = [
                    self.take(mail.searcher, mail.free, mail.version) if mail.free >= 0 else []
                    for mail in mails
                ]
                retry_s = max(_RETRY_S, len(self._processes) / _MAX_REQUESTS_PER_S)
                response = self.version, self.evaluations.versions, retry_s, work
                process.number, process.response = number, encode(response)
            return process.response

    def lose_silent(self) -> bool:
        """Lose the processes over the heartbeat timeout; return False: a worker waits."""
        with self._lock:
            for place, process in [*self._processes.items()]:
                silent_s = self._clock() - process.last_message_s
                if process.searchers and silent_s > HEARTBEAT_S:
                    why = f"no message for {silent_s:.0f} s; their tickets begin again"
                    self._log(f"{process.name}: {why}")
                    self._lose(place)
        return False

    def _lose(self, place: str) -> None:
        """Issue the open tickets of a process again; if it still runs, it must join again."""
        for searcher in self._processes.pop(place).searchers:
            self._num_searchers_lost += 1
            for number in self._open_of(searcher):
                del self._open[number]
                self._again.add(number)
                self._num_lost += self.settings.samples_per_prompt
            self.evaluations.lose(searcher)

    @property
    def absent(self) -> list[int]:
        """IDs of searchers that no connected process runs, without those of this process."""
        with self._lock:
            running = {searcher for each in self._processes.values() for searcher in each.searchers}
            return [searcher for searcher in self.remote_searchers if searcher not in running]

    def metrics(self) -> dict[str, float]:
        """Return metrics of the searchers of other processes by name."""
        with self._lock:
            counts = {
                "hosts": len(self._processes),
                "searchers": len(self.remote_searchers) - len(self.absent),
                "slots": len(self.remote_searchers),
                "joins": self._num_joins,
                "searchers_lost": self._num_searchers_lost,
                "lost": self._num_lost // self.settings.samples_per_prompt,
                "duplicates": self._num_duplicates,
            }
        return {f"fleet/{name}": float(count) for name, count in counts.items()}

    def take_decode_counts(self) -> DecodeCounts:
        """Return the decode counts of all searchers since the last call."""
        with self._lock:
            counts, self._decoded = self._decoded, DecodeCounts()
            return counts

    # Checkpoints.

    def state(self) -> PartState:
        """Return the position in the data, the results that are not merged, and the counters."""
        with self._lock:
            results = tuple(self._results[number] for number in sorted(self._results))
            meta = {name: getattr(self, name) for name in _COUNTERS}
            meta |= {"open": sorted([*self._open, *self._again]), "idle_s": self.idle_s[:]}
        return PartState({"results": np.frombuffer(encode(results), np.uint8)}, meta)

    def restore(self, state: PartState) -> None:
        """Continue from a saved `state`; tickets that were open are issued again."""
        results = decode(state.arrays["results"].tobytes())
        with self._lock:
            self._results = {result.number: result for result in results}
            self._num_bytes = sum(result.num_bytes for result in results)
            self._again, self._open = set(state.meta["open"]), {}
            for name in _COUNTERS:
                setattr(self, name, state.meta[name])
            saved = state.meta["idle_s"][: len(self.idle_s)]  # the number of searchers may differ
            self.idle_s[: len(saved)] = saved
