# SPDX-License-Identifier: Apache-2.0
"""Client: the source of tickets of one searcher whose owner is in another process.

The searcher's threads take tickets from the client and put results into it, without waiting for the
network. `Client.step`, on a thread of its own, exchanges both with the owner. Invariant: a result
is dropped only after the owner has acknowledged it (tests/remote/test_client.py).
"""

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from tba_jax.flow.tickets import EvaluationShard, EvaluationTicket, Result, Ticket
from tba_jax.remote.channel import Unreachable
from tba_jax.remote.messages import Demand, Heartbeat, Response, Sender
from tba_jax.remote.search_channel import RemoteOwner

# Longest time in seconds between two heartbeats of a searcher that has enough work.
_HEARTBEAT_S = 2.0
_SLOW_S = 20.0  # a longer wait for the trainer is logged


class Rewind(Exception):
    """Another owner continues the run: the searcher must join again and drop its tickets."""


class Dismissed(Exception):
    """This process may no longer run the searcher; the message has the reason."""


class Callbacks(NamedTuple):
    """Functions of a searcher that its client calls.

    Attributes:
        heartbeat: returns the metrics of the searcher.
        versions: called with (newest complete policy version, versions under evaluation).
        log: receives a line when the trainer responds after a long wait.
    """

    heartbeat: Callable[[], Heartbeat]
    versions: Callable[[int, Sequence[int]], None]
    log: Callable[[str], None] = lambda line: None


class Client:
    """Source of tickets of one searcher; a worker calls `step`.

    Args:
        timeout_s: seconds without a response after which the trainer counts as lost.
    """

    def __init__(
        self,
        sender: Sender,
        owner: RemoteOwner,
        callbacks: Callbacks,
        *,
        clock: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self._sender = sender
        self._owner = owner
        self._callbacks = callbacks
        self._clock = clock
        self._timeout_s = timeout_s
        self._lock = threading.Lock()
        self._free, self._version = 0, -1  # of the searcher's last call of `take`
        self._held: set[int] = set()  # tickets without an acknowledged result
        self._tickets: deque[Ticket] = deque()
        self._results: list[Result] = []
        self._shard: EvaluationTicket | None = None  # not taken by the searcher yet
        self._answer: tuple[EvaluationTicket, EvaluationShard | None] | None = None
        self._is_evaluating = False
        self._next_request_s = self._next_heartbeat_s = clock()
        self._waits_since_s: float | None = None  # time of the first request without a response

    def take(self, searcher: int, free: int, version: int) -> list[Ticket]:
        """Return tickets that have arrived, and request as many as the searcher has room for."""
        with self._lock:
            tickets = [self._tickets.popleft() for _ in range(min(free, len(self._tickets)))]
            self._free, self._version = free - len(tickets), version
            return tickets

    def put(self, searcher: int, results: Sequence[Result]) -> None:
        """Keep results until the owner has acknowledged them."""
        with self._lock:
            self._results += results

    def take_evaluation(self, searcher: int) -> EvaluationTicket | None:
        """Return an evaluation shard that has arrived."""
        with self._lock:
            shard, self._shard = self._shard, None
            return shard

    def put_evaluation(
        self, searcher: int, ticket: EvaluationTicket, shard: EvaluationShard | None
    ) -> None:
        """Keep an answered shard until the owner has acknowledged it."""
        with self._lock:
            self._answer = ticket, shard

    def step(self) -> bool:
        """Send results and request tickets; return False if there was nothing to send.

        Raises:
            Rewind, Dismissed: the owner responded with rewind, or refused the searcher.
            TimeoutError: the trainer did not respond for `timeout_s`.
        """
        did_put = self._put_results()
        did_answer = self._put_answer()
        return self._request() or did_put or did_answer

    def _put_results(self) -> bool:
        with self._lock:
            results = list(self._results)
        if not results or self._send(lambda: self._owner.put(self._sender, results)) is None:
            return False
        with self._lock:
            self._results = self._results[len(results) :]
            self._held -= {result.number for result in results}
        return True

    def _put_answer(self) -> bool:
        answer = self._answer
        if answer is None:
            return False
        if self._send(lambda: self._owner.put_evaluation(self._sender, *answer)) is None:
            return False
        with self._lock:
            self._answer, self._is_evaluating = None, False
        self._next_heartbeat_s = self._clock()  # the owner may have another shard
        return True

    def _request(self) -> bool:
        now = self._clock()
        with self._lock:
            free = max(0, self._free - len(self._tickets))
            demand = Demand(free, self._version, sorted(self._held), not self._is_evaluating)
        if now < (self._next_request_s if free else self._next_heartbeat_s):
            return False
        heartbeat = self._callbacks.heartbeat()
        response = self._send(lambda: self._owner.take(self._sender, demand, heartbeat))
        if response is None:
            return False
        with self._lock:
            for each in response.tickets:
                if isinstance(each, Ticket):
                    self._tickets.append(each)
                    self._held.add(each.number)
                else:
                    self._shard, self._is_evaluating = each, True
        self._next_request_s = self._clock() + response.retry_s
        self._next_heartbeat_s = self._clock() + _HEARTBEAT_S
        return bool(response.tickets)

    def _send(self, request: Callable[[], Response]) -> Response | None:
        """Return the response to a request; None if no response arrived."""
        searcher = self._sender.searcher
        if self._waits_since_s is None:
            self._waits_since_s = self._clock()
        try:
            response = request()
        except Unreachable as error:
            silent_s = self._clock() - self._waits_since_s
            if silent_s > self._timeout_s:
                raise TimeoutError(
                    f"searcher {searcher} has not reached the trainer for {silent_s:.0f} s "
                    f"({error}) and ends. The same command resumes the run"
                ) from error
            return None
        waited_s = self._clock() - self._waits_since_s
        self._waits_since_s = None
        if waited_s > _SLOW_S:
            self._callbacks.log(
                f"searcher {searcher} had no response from the trainer for {waited_s:.0f} s; its "
                "finished responses were kept and are sent now"
            )
        if response.status == "rewind":
            raise Rewind(response.reason)
        if response.status != "ok":
            raise Dismissed(f"searcher {searcher} ends: {response.reason}")
        if response.version >= 0:
            self._callbacks.versions(response.version, response.evaluated)
        return response
