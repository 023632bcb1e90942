# SPDX-License-Identifier: Apache-2.0
"""Client: the owner of a run as seen by every other process, over one channel.

`take`, `put`, `beat` and `step` have the meaning of the methods of `Owner`. The first three only
touch memory: `exchange`, on a thread of its own, sends what they leave and brings work, so decoding
continues while the owner does not respond. Invariant: a request is repeated until the owner has
answered it, so no result is lost and none counts twice (tests/remote/test_client.py).
"""

import dataclasses
import math
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.devices.cluster import CONTINUE, PeerError
from tba_jax.flow.tickets import DecodeCounts, EvaluationResult, EvaluationTicket, Result
from tba_jax.remote.channel import Channel, Refused, Unreachable
from tba_jax.remote.messages import Mail, Plan, Work, decode, encode

HEARTBEAT_PERIOD_S = 2.0
"""Longest time between two requests of a process that searches."""
_RETRY_S = 0.2  # seconds between two requests to an owner that does not respond


@dataclasses.dataclass
class _Box:
    """Mail of one searcher for the next request, and work of the responses."""

    mail: Mail
    work: Sequence[Any] = ()
    is_waiting: bool = False  # for the response to its demand


class Client:
    """The owner in another process; thread-safe.

    Args:
        host: name of this process and its machine, for log lines.
        timeout_s: seconds without a response after which the owner counts as lost.

    Attributes:
        on_versions: receives (newest complete policy version, versions under evaluation).
    """

    def __init__(
        self,
        channel: Channel,
        host: str,
        *,
        timeout_s: float,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.host = host
        self.on_versions: Callable[[int, Sequence[int]], None] = lambda version, evaluated: None
        self._channel, self._timeout_s, self._clock, self._sleep = channel, timeout_s, clock, sleep
        self._lock = threading.Lock()
        self._place, self._number, self._boxes = "", 0, dict[int, _Box]()
        self._sent_s, self._retry_s = -math.inf, 0.0

    def join(self, searchers: Sequence[int], identity: str) -> None:
        """Join the owner, and discard tickets and results of an earlier join; see `exchange`."""
        request = encode((tuple(searchers), self.host, identity))
        place = decode(self._call("join", lambda: request), str)
        with self._lock:
            self._place, self._number, self._sent_s = place, 0, -math.inf
            self._boxes = {searcher: _Box(Mail(searcher)) for searcher in searchers}

    def take(self, searcher: int, free: int, version: int) -> Work:
        """Return an evaluation shard or tickets that have arrived; else ask for them."""
        with self._lock:
            box = self._boxes[searcher]
            if not box.work and not box.is_waiting:
                box.mail = box.mail._replace(free=free, version=version)
            is_shard = bool(box.work) and isinstance(box.work[0], EvaluationTicket)
            num = 1 if is_shard else free
            taken, box.work = box.work[:num], box.work[num:]
            return taken

    def put(self, searcher: int, results: Sequence[Result | EvaluationResult]) -> None:
        """Keep results until the owner has acknowledged them."""
        with self._lock:
            box = self._boxes[searcher]
            box.mail = box.mail._replace(results=(*box.mail.results, *results))

    def beat(self, searcher: int, idle_s: float, decoded: DecodeCounts) -> None:
        """Add metrics to the next request."""
        with self._lock:
            box = self._boxes[searcher]
            idle_s, decoded = box.mail.idle_s + idle_s, box.mail.decoded.plus(decoded)
            box.mail = box.mail._replace(idle_s=idle_s, decoded=decoded)

    def exchange(self, wants_stop: Callable[[], bool]) -> bool:
        """Send what the searchers have left, if a request is due; return whether it was.

        `wants_stop` returns whether this process received a stop signal; it may raise.

        Raises:
            Rewind, RunEnded: the searchers must join again, or end.
            PeerError: the owner refuses a message, or does not respond.
        """
        with self._lock:
            boxes, place, number = [*self._boxes.values()], self._place, self._number
            age_s, mails = self._clock() - self._sent_s, tuple(box.mail for box in boxes)
            has_demand = age_s >= self._retry_s and any(mail.free > 0 for mail in mails)
            is_due = has_demand or any(mail.results for mail in mails)
            if not is_due and age_s < max(HEARTBEAT_PERIOD_S, self._retry_s):
                return False
            for box in boxes:
                box.is_waiting = box.mail.free >= 0
                box.mail = Mail(box.mail.searcher)
        data = self._call("search", lambda: encode((place, number, wants_stop(), mails)))
        version, evaluated, retry_s, works = decode(data, tuple)
        with self._lock:
            self._number, self._sent_s, self._retry_s = number + 1, self._clock(), retry_s
            for box, work in zip(boxes, works, strict=True):
                box.work, box.is_waiting = [*box.work, *work], False
        if version >= 0:
            self.on_versions(version, evaluated)
        return True

    def step(self, step: int, wants_stop: Callable[[], bool]) -> Plan:
        """Return the owner's plan of a step, as soon as there is one; raises as `exchange`."""
        data = b""
        while not data:  # an empty response: the step is not decided yet
            data = self._call("step", lambda: encode((step, wants_stop())))
        return decode(data, Plan)

    def _call(self, method: str, body: Callable[[], bytes]) -> bytes:
        """Repeat a request until it is answered."""
        start_s = self._clock()
        while True:
            try:
                return self._channel.call(method, body())
            except Refused as error:
                raise PeerError(f"the trainer refuses {self.host}: {error}") from error
            except Unreachable as error:
                silent_s = self._clock() - start_s
                if silent_s > self._timeout_s:
                    raise PeerError(
                        f"the trainer has not responded to {self.host} for {silent_s:.0f} s "
                        f"({error}). {CONTINUE}"
                    ) from error
                self._sleep(_RETRY_S)
