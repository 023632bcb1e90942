# SPDX-License-Identifier: Apache-2.0
"""Client: the owner of a run as seen by every other process, over one channel.

`take`, `put`, `beat` and `step` have the meaning of the methods of `Owner`. The searchers' threads
call the first three without waiting for the network; `exchange`, on a thread of its own, sends
and receives. Invariant: a result is dropped only after the owner has acknowledged it
(tests/remote/test_client.py).
"""

import dataclasses
import json
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any

from tba_jax.devices.cluster import CONTINUE, PeerError
from tba_jax.flow.tickets import DecodeCounts, EvaluationResult, EvaluationTicket, Result, Ticket
from tba_jax.remote.channel import Channel, Unreachable
from tba_jax.remote.messages import (
    Decision,
    Heartbeat,
    Joined,
    pack_request,
    unpack_decision,
    unpack_work,
)

# Longest time in seconds between two heartbeats of a searcher that has enough work.
_HEARTBEAT_S = 2.0
_RETRY_S = 0.2  # seconds between two requests to an owner that does not respond
_SLOW_S = 20.0  # a longer wait for the trainer is logged


@dataclasses.dataclass
class _Box:
    """Mail of one searcher: demand and results to send, and tickets that have arrived."""

    free: int = 0
    version: int = -1
    heartbeat: Heartbeat = Heartbeat()
    held: set[int] = dataclasses.field(default_factory=set)  # tickets without acknowledged result
    is_evaluating: bool = False
    tickets: deque[Ticket] = dataclasses.field(default_factory=deque)
    shard: EvaluationTicket | None = None  # not taken by the searcher yet
    results: list[Result | EvaluationResult] = dataclasses.field(default_factory=list)
    next_request_s: float = -math.inf
    next_heartbeat_s: float = -math.inf


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
        self.host = host
        self.on_versions: Callable[[int, Sequence[int]], None] = lambda version, evaluated: None
        self.check: Callable[[], None] = lambda: None
        self._channel, self._process = channel, process
        self.timeout_s, self.log, self._clock = timeout_s, log, clock
        self._lock = threading.Lock()
        self._epoch = ""
        self._boxes: dict[int, _Box] = {}
        self._waits_since_s: float | None = None  # time of the first request without a response
        self._next_attempt_s = -math.inf

    def join(self, searchers: Sequence[int], identity: str) -> Joined:
        """Join the owner, and forget everything of an earlier one.

        Raises:
            Unreachable: no response arrived. RunEnded: the run has ended.
            Refused: the owner refuses this process.
        """
        data = json.dumps([searchers, self.host, identity]).encode()
        joined = Joined(*json.loads(self._channel.call("join", data)))
        with self._lock:
            self._epoch, self._boxes = joined.epoch, {i: _Box() for i in searchers}
            self._waits_since_s, self._next_attempt_s = None, -math.inf
        return joined

    def take(self, searcher: int, free: int, version: int) -> list[Ticket] | list[EvaluationTicket]:
        """Return work that has arrived, and request as many tickets as there is room for."""
        with self._lock:
            box = self._boxes[searcher]
            box.free, box.version = free, version
            if box.shard is not None:
                shard, box.shard = box.shard, None
                return [shard]
            tickets = [box.tickets.popleft() for _ in range(min(free, len(box.tickets)))]
            box.free -= len(tickets)
            return tickets

    def put(self, searcher: int, results: Sequence[Result | EvaluationResult]) -> None:
        """Keep results until the owner has acknowledged them."""
        with self._lock:
            self._boxes[searcher].results += results

    def beat(self, searcher: int, heartbeat: Heartbeat) -> None:
        """Send these metrics with the next request."""
        with self._lock:
            box = self._boxes[searcher]
            counts = box.heartbeat.decoded.plus(heartbeat.decoded)
            box.heartbeat = heartbeat._replace(decoded=counts)

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
            request = [self._process, step, wants_stop(), is_publishing()]
            try:
                data = self._channel.call("step", json.dumps(request).encode())
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
                return unpack_decision(data)

    def exchange(self) -> bool:
        """Send what is due, and receive tickets; return False if nothing was due or arrived.

        Raises:
            Rewind, RunEnded: the searchers must join again, or end.
            Refused: the owner refuses a message.
            TimeoutError: the owner did not respond for `timeout_s`.
        """
        now = self._clock()
        if now < self._next_attempt_s:
            return False
        with self._lock:
            due = [each for each in self._boxes.items() if _is_due(each[1], now)]
        return any([self._exchange(searcher, box) for searcher, box in due])

    def _exchange(self, searcher: int, box: _Box) -> bool:
        with self._lock:
            results, heartbeat = list(box.results), box.heartbeat
            request = {
                "epoch": self._epoch,
                "searcher": searcher,
                "free": max(0, box.free - len(box.tickets)),
                "version": box.version,
                "held": sorted(box.held),
                "is_evaluating": box.is_evaluating,
                "heartbeat": heartbeat,
            }
        answer = self._call(searcher, pack_request(request, results))
        if answer is None:
            return False
        response, work = answer
        with self._lock:
            box.results = box.results[len(results) :]
            for each in results:
                if isinstance(each, Result):
                    box.held.discard(each.number)
                else:
                    box.is_evaluating = False
            rest = zip(box.heartbeat.decoded, heartbeat.decoded, strict=True)
            counts = DecodeCounts(*(now - sent for now, sent in rest))
            box.heartbeat = box.heartbeat._replace(decoded=counts)
            for each in work:
                if isinstance(each, Ticket):
                    box.tickets.append(each)
                    box.held.add(each.number)
                else:
                    box.shard, box.is_evaluating = each, True
            now = self._clock()
            box.next_request_s = now + response["retry_s"]
            box.next_heartbeat_s = now + _HEARTBEAT_S
        if response["version"] >= 0:
            self.on_versions(response["version"], response["evaluated"])
        return bool(work or results)

    def _call(self, searcher: int, data: bytes) -> tuple[dict[str, Any], list[Any]] | None:
        """Return the response to a request of a searcher; None if no response arrived."""
        now = self._clock()
        since_s = self._waits_since_s = now if self._waits_since_s is None else self._waits_since_s
        try:
            answer = unpack_work(self._channel.call("search", data))
        except Unreachable as error:
            if now - since_s > self.timeout_s:
                raise TimeoutError(
                    f"searcher {searcher} has not reached the trainer for {now - since_s:.0f} s "
                    f"({error}) and ends. The same command resumes the run"
                ) from error
            self._next_attempt_s = self._clock() + _RETRY_S
            return None
        self._waits_since_s = None
        if (waited_s := self._clock() - since_s) > _SLOW_S:
            self.log(
                f"searcher {searcher} had no response from the trainer for {waited_s:.0f} s; its "
                "finished responses were kept and are sent now"
            )
        return answer


def _is_due(box: _Box, now: float) -> bool:
    wanted = box.free > len(box.tickets)
    return bool(box.results) or now >= (box.next_request_s if wanted else box.next_heartbeat_s)
