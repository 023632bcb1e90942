# SPDX-License-Identifier: Apache-2.0
"""SearcherClient: requests tickets for one searcher and sends the responses of finished tickets.

Finished tickets wait in the searcher's own outbox. `SearcherClient.step` sends them until the
search server acknowledges them, and requests as many tickets as the searcher has room for.
Invariant: a finished ticket is dropped only after its acknowledgement
(tests/remote/test_client.py).
"""

import threading
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from tba_jax.flow.evaluation_shard import EvaluationShard, Lease
from tba_jax.flow.rounds import RoundCommit
from tba_jax.remote.channel import Unreachable
from tba_jax.remote.messages import Heartbeat, Response, SearcherStart
from tba_jax.remote.search_channel import SearchRequests
from tba_jax.replay.outbox import Outbox

# Longest time in seconds between two heartbeats of a searcher that has enough work.
_HEARTBEAT_S = 2.0
_SLOW_S = 20.0  # a longer wait for the trainer is logged


class Rewind(Exception):
    """The trainer was restored: the searcher must join again and repeat unsaved tickets."""


class Dismissed(Exception):
    """This process may no longer run the searcher; the message has the reason."""


class TicketQuota:
    """Admitted tickets of a remote searcher that the searcher has not started."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._tickets: deque[int] = deque()

    def add(self, tickets: tuple[int, ...]) -> None:
        """Add admitted tickets, in ascending order."""
        with self._lock:
            self._tickets.extend(tickets)

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether the searcher may start its next ticket, and count it as started."""
        del searcher, version
        with self._lock:
            if self._tickets:
                self._tickets.popleft()
                return True
            return False

    def commit(self, searcher: int, version: int) -> None:
        """Do nothing: the search server counts open tickets."""

    def __len__(self) -> int:
        with self._lock:
            return len(self._tickets)


class LeasedShard:
    """Holder of a searcher's evaluation lease and its result; at most one lease at a time."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lease: Lease | None = None
        self._is_started = False
        self._result: tuple[Lease, EvaluationShard | None] | None = None

    @property
    def is_free(self) -> bool:
        """Whether the searcher has no lease."""
        with self._lock:
            return self._lease is None

    def offer(self, lease: Lease) -> None:
        """Set the lease of the shard to work on next."""
        with self._lock:
            self._lease, self._is_started = lease, False

    def start(self) -> Lease | None:
        """Return the lease if work on its shard has not started; else None."""
        with self._lock:
            if self._lease is None or self._is_started:
                return None
            self._is_started = True
            return self._lease

    def finish(self, lease: Lease, shard: EvaluationShard | None) -> None:
        """Store the result of a lease; shard None: the searcher could not work on it."""
        with self._lock:
            self._result = lease, shard

    @property
    def result(self) -> tuple[Lease, EvaluationShard | None] | None:
        """Result of the lease; None if there is no result to send."""
        with self._lock:
            return self._result

    def clear(self) -> None:
        """Forget the lease after its result was sent."""
        with self._lock:
            self._lease = self._result = None


class Callbacks(NamedTuple):
    """Functions of a searcher that its client calls.

    Attributes:
        room: returns the number of tickets that the searcher could start now.
        heartbeat: (put latencies) -> metrics of the searcher; `can_evaluate` is set by the client.
        versions: called with (newest complete policy version, versions under evaluation).
        log: receives a line when the trainer responds after a long wait.
    """

    room: Callable[[], int]
    heartbeat: Callable[[tuple[float, ...]], Heartbeat]
    versions: Callable[[int, tuple[int, ...]], None]
    log: Callable[[str], None] = lambda line: None


class SearcherClient:
    """Client of the search server for one searcher; a worker calls `step`.

    Args:
        timeout_s: seconds without a response after which the trainer counts as lost.
    """

    def __init__(
        self,
        start: SearcherStart,
        server: SearchRequests,
        outbox: Outbox,
        quota: TicketQuota,
        leased: LeasedShard,
        callbacks: Callbacks,
        *,
        clock: Callable[[], float],
        timeout_s: float,
    ) -> None:
        self._key = start.key
        self._server = server
        self._outbox = outbox
        self._quota = quota
        self._leased = leased
        self._callbacks = callbacks
        self._clock = clock
        self._timeout_s = timeout_s
        self._unsent: list[RoundCommit] = []
        self._put_s: list[float] = []
        self._first_unseen = int(start.position["next_round"])
        self._next_request_s = self._next_heartbeat_s = clock()
        self._waits_since_s: float | None = None  # time of the first request without a response

    def step(self) -> bool:
        """Send finished tickets and request new ones; return False if there was nothing to send.

        Raises:
            Rewind, Dismissed: the search server responded with rewind, or refused the searcher.
            TimeoutError: the trainer did not respond for `timeout_s`.
        """
        did_put = self._put()
        did_return = self._return_lease()
        return self._request_tickets() or did_put or did_return

    def _put(self) -> bool:
        if not self._unsent:
            self._unsent = self._outbox.take()
            if not self._unsent:
                return False
        start = self._clock()
        message = self._key, self._unsent
        if self._send(lambda: self._server.put(*message)) is None:
            return False
        self._unsent = []
        self._put_s.append(self._clock() - start)
        return True

    def _return_lease(self) -> bool:
        result = self._leased.result
        if result is None:
            return False
        if self._send(lambda: self._server.return_lease(self._key, *result)) is None:
            return False
        self._leased.clear()
        self._next_heartbeat_s = self._clock()  # the server may have another shard
        return True

    def _request_tickets(self) -> bool:
        now = self._clock()
        wanted = max(0, self._callbacks.room() - len(self._quota))
        if now < (self._next_request_s if wanted else self._next_heartbeat_s):
            return False
        can_evaluate = self._leased.is_free
        heartbeat = self._callbacks.heartbeat(tuple(self._put_s))._replace(
            can_evaluate=can_evaluate
        )
        response = self._send(
            lambda: self._server.request_tickets(self._key, wanted, self._first_unseen, heartbeat)
        )
        if response is None:
            return False
        self._put_s.clear()
        self._quota.add(response.tickets)
        if response.lease is not None and can_evaluate:
            self._leased.offer(response.lease)
        self._first_unseen = max([self._first_unseen, *(t + 1 for t in response.tickets)])
        self._next_request_s = self._clock() + response.retry_s
        self._next_heartbeat_s = self._clock() + _HEARTBEAT_S
        return bool(response.tickets)

    def _send(self, request: Callable[[], Response]) -> Response | None:
        """Return the response to a request; None if no response arrived."""
        if self._waits_since_s is None:
            self._waits_since_s = self._clock()
        try:
            response = request()
        except Unreachable as error:
            silent_s = self._clock() - self._waits_since_s
            if silent_s > self._timeout_s:
                raise TimeoutError(
                    f"searcher {self._key.searcher} has not reached the trainer for "
                    f"{silent_s:.0f} s ({error}) and ends. The same command resumes the run"
                ) from error
            return None
        waited_s = self._clock() - self._waits_since_s
        self._waits_since_s = None
        if waited_s > _SLOW_S:
            self._callbacks.log(
                f"searcher {self._key.searcher} had no response from the trainer for "
                f"{waited_s:.0f} s; its finished responses were kept and are sent now"
            )
        if response.status == "rewind":
            raise Rewind(response.reason)
        if response.status in ("fenced", "refused", "ended"):
            raise Dismissed(f"searcher {self._key.searcher} ends: {response.reason}")
        if response.version >= 0:
            self._callbacks.versions(response.version, response.evaluated)
        return response
