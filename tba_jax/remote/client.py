# SPDX-License-Identifier: Apache-2.0
"""Client: the owner of a run as seen by every other process, over one channel.

`take`, `put`, `beat` and `step` have the meaning of the methods of `Owner`. While the owner does
not respond, searchers continue with the tickets that they have. Invariant: a request is repeated
until the owner has answered it, so no result is lost and none counts twice
(tests/remote/test_client.py).
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.devices.cluster import CONTINUE, PeerError
from tba_jax.flow.tickets import DecodeCounts, EvaluationResult, EvaluationTicket, Result, Ticket
from tba_jax.remote.channel import Channel, Unreachable
from tba_jax.remote.messages import (
    Decision,
    Heartbeat,
    Request,
    Response,
    decode,
    encode,
)

HEARTBEAT_PERIOD_S = 2.0
"""Longest time between two requests of a searcher."""
_RETRY_S = 0.2  # seconds between two requests to an owner that does not respond
_SLOW_S = 20.0  # a longer wait for the trainer is logged


@dataclasses.dataclass
class _Mail:
    """What one searcher has to send, its request without a response, and work of a response."""

    results: list[Result | EvaluationResult] = dataclasses.field(default_factory=list)
    heartbeat: Heartbeat = Heartbeat()
    number: int = 0  # of the next request
    unanswered: bytes = b""
    work: Sequence[Any] = ()
    retry_s: float = 0.0
    sent_s: float = -math.inf
    lock: threading.Lock = dataclasses.field(default_factory=threading.Lock)


class Client:
    """The owner in another process; thread-safe.

    Args:
        process: number of this process in its job.

    Attributes:
        host: name of this process and its machine, for log lines.
        timeout_s: seconds without a response after which the owner counts as lost.
        log: receives a line when the owner responds after a long wait.
        on_versions: receives (newest complete policy version, versions under evaluation).
        check: raises an error if this process has failed; called while waiting for a step.
    """

    def __init__(
        self,
        channel: Channel,
        host: str,
        *,
        process: int = 0,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        log: Callable[[str], None] = lambda line: None,
    ) -> None:
        self.host, self.timeout_s, self.log = host, timeout_s, log
        self.on_versions: Callable[[int, Sequence[int]], None] = lambda version, evaluated: None
        self.check: Callable[[], None] = lambda: None
        self._channel, self._process, self._clock = channel, process, clock
        self._place, self._mail = "", dict[int, _Mail]()
        self._last_s = clock()  # time of the last response
        self._next_attempt_s = -math.inf

    def join(self, searchers: Sequence[int], identity: str) -> None:
        """Join the owner, and forget everything of an earlier one.

        Raises:
            Unreachable: no response arrived. RunEnded: the run has ended.
            Refused: the owner refuses this process.
        """
        message = encode((tuple(searchers), self.host, identity))
        self._place = decode(self._channel.call("join", message), str)
        self._mail = {i: _Mail() for i in searchers}
        self._last_s, self._next_attempt_s = self._clock(), -math.inf

    def take(self, searcher: int, free: int, version: int) -> list[Ticket] | list[EvaluationTicket]:
        """Return an evaluation shard or tickets; [] also if the last request was a moment ago.

        While the owner does not respond, other threads repeat the request, and decoding continues.
        """
        mail = self._mail[searcher]
        if not mail.lock.acquire(blocking=False):
            return []
        try:
            wait_s = mail.retry_s if free else HEARTBEAT_PERIOD_S
            is_due = self._clock() >= mail.sent_s + wait_s
            if is_due and not mail.work and not mail.unanswered:
                self._send(searcher, mail, free, version)
            is_shard = bool(mail.work) and isinstance(mail.work[0], EvaluationTicket)
            taken = list(mail.work[: 1 if is_shard else free])
            mail.work = mail.work[len(taken) :]
            return taken
        finally:
            mail.lock.release()

    def put(self, searcher: int, results: Sequence[Result | EvaluationResult]) -> None:
        """Send results, and keep them until the owner has acknowledged them."""
        mail = self._mail[searcher]
        with mail.lock:
            mail.results += results
            self._send(searcher, mail)

    def beat(self, searcher: int, heartbeat: Heartbeat) -> None:
        """Send the metrics of a searcher, and what is not acknowledged, if a request is due."""
        mail = self._mail[searcher]
        with mail.lock:
            counts = mail.heartbeat.decoded.plus(heartbeat.decoded)
            mail.heartbeat = heartbeat._replace(decoded=counts)
            if mail.unanswered or self._clock() >= mail.sent_s + HEARTBEAT_PERIOD_S:
                self._send(searcher, mail)

    def _send(self, searcher: int, mail: _Mail, free: int = -1, version: int = -1) -> None:
        """Send the request that has no response yet, then what is new.

        Args:
            free: as in `take`; -1: the response brings no work.

        Raises:
            Rewind, RunEnded: the searchers must join again, or end.
            Refused: the owner refuses a message.
            TimeoutError: the owner did not respond for `timeout_s`.
        """
        if mail.unanswered and not self._repeat(searcher, mail):
            return
        results, beat = tuple(mail.results), mail.heartbeat
        free = -1 if mail.work else free
        request = Request(self._place, searcher, mail.number, free, version, beat, results)
        mail.unanswered, mail.number = encode(request), mail.number + 1
        mail.results, mail.heartbeat = [], beat._replace(decoded=DecodeCounts())
        self._repeat(searcher, mail)

    def _repeat(self, searcher: int, mail: _Mail) -> bool:
        """Send the request without a response; return whether a response arrived."""
        now = self._clock()
        if now < self._next_attempt_s:
            return False
        try:
            response = decode(self._channel.call("search", mail.unanswered), Response)
        except Unreachable as error:
            silent_s = now - self._last_s
            if silent_s > self.timeout_s:
                raise TimeoutError(
                    f"searcher {searcher} has not reached the trainer for {silent_s:.0f} s "
                    f"({error}) and ends. The same command resumes the run"
                ) from error
            self._next_attempt_s = self._clock() + _RETRY_S
            return False
        now = mail.sent_s = self._clock()
        if now - self._last_s > _SLOW_S:
            self.log(
                f"searcher {searcher} had no response from the trainer for "
                f"{now - self._last_s:.0f} s; its finished responses were kept and are sent now"
            )
        self._last_s, mail.unanswered, mail.retry_s = now, b"", response.retry_s
        mail.work = [*mail.work, *response.work]
        if response.version >= 0:
            self.on_versions(response.version, response.evaluated)
        return True

    def step(
        self, step: int, wants_stop: Callable[[], bool], is_publishing: Callable[[], bool]
    ) -> Decision:
        """Return the owner's decision on a step, as soon as there is one.

        Raises:
            PeerError: the owner does not respond.
        """
        last_s = self._clock()
        while True:
            self.check()
            request = encode((self._process, step, wants_stop(), is_publishing()))
            try:
                data = self._channel.call("step", request)
            except Unreachable as error:
                if self._clock() - last_s > self.timeout_s:
                    raise PeerError(
                        f"the first trainer process has not responded for "
                        f"{self._clock() - last_s:.0f} s ({error}). {CONTINUE}"
                    ) from error
                time.sleep(_RETRY_S)
                continue
            last_s = self._clock()
            if data:  # an empty response: the step is not decided yet
                return decode(data, Decision)
