# SPDX-License-Identifier: Apache-2.0
"""What the search server records of each searcher, and its clock."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from tba_jax.flow.evaluation_shard import EvaluationShard, Lease
from tba_jax.replay.outbox import Outbox


class EvaluationQueue(Protocol):
    """Evaluations whose shards searchers work on; implemented by `EvaluationService`."""

    def lease(self) -> Lease | None:
        """Return a shard to work on, None where none is left."""
        ...

    def complete(self, lease: Lease, shard: EvaluationShard) -> bool:
        """Accept a leased shard; False where the lease was withdrawn before."""
        ...

    def withdraw(self, lease: Lease) -> None:
        """End a lease, so that another searcher gets the shard."""
        ...

    @property
    def wanted(self) -> tuple[int, ...]:
        """Policy versions under evaluation."""
        ...


class TicketAdmission(Protocol):
    """Decides how many tickets may be open; `Admission`, or `RoundAdmission` of driver=sync."""

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether this searcher may start a ticket with weights of this version."""
        ...

    def commit(self, searcher: int, latency_s: float, version: int) -> None:
        """Count a ticket as finished."""
        ...

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Set the open tickets of a searcher, by the versions that they were admitted with."""
        ...


class ServerSettings(NamedTuple):
    """Settings of a search server.

    Attributes:
        epoch: name of this server, different from that of every earlier one.
        identity: names of the code, model, data and run that searchers must have.
        responses_per_ticket: responses that one ticket yields.
        heartbeat_timeout_s: a searcher without a message for this long counts as lost.
        max_tickets: largest number of tickets in one response.
    """

    epoch: str
    identity: Mapping[str, str]
    responses_per_ticket: int
    heartbeat_timeout_s: float
    max_tickets: int


class Listeners(NamedTuple):
    """Functions that receive reports about searchers, besides log lines.

    Attributes:
        given: receives (searcher, given responses, their rounds) when a searcher joins.
        event: receives each chunk event of the schedule log.
        chunks: receives (searcher, decode chunks in all) after a put.
    """

    given: Callable[[int, int, int], None] = lambda searcher, responses, rounds: None
    event: Callable[[Mapping[str, Any]], None] = lambda event: None
    chunks: Callable[[int, int], None] = lambda searcher, chunks: None


class OpenTicket(NamedTuple):
    """A ticket that a searcher may have started.

    Attributes:
        admitted_s: time of admission.
        version: policy version that the searcher had at that time.
        is_given: its responses are given, so nothing had to be admitted.
    """

    admitted_s: float
    version: int
    is_given: bool = False


@dataclasses.dataclass
class SearcherRecord:
    """One searcher: the process that runs it, and its open tickets."""

    outbox: Outbox
    incarnation: int = 0  # 0: no process has joined yet
    host: str = ""
    last_message_s: float = 0.0
    is_lost: bool = False
    next_ticket: int = 0  # lowest ticket that this incarnation has not received
    open_tickets: dict[int, OpenTicket] = dataclasses.field(default_factory=dict)
    lease: Lease | None = None
    num_joins: int = 0
    num_groups: int = 0
    staleness: int = 0  # summed over the groups
    idle_s: float = 0.0  # of this incarnation
    earlier_idle_s: float = 0.0
    tokens: int = 0
    num_given_rounds: int = 0
    num_chunks: int = 0
    wants_stop: bool = False

    @property
    def is_connected(self) -> bool:
        return self.incarnation > 0 and not self.is_lost


class BoundedClock:
    """Seconds that advance by at most `max_jump_s` between two readings, and never go back.

    Without it a suspended machine or a changed system clock would make every searcher exceed the
    heartbeat timeout at once.
    """

    def __init__(self, clock: Callable[[], float], max_jump_s: float) -> None:
        self._clock = clock
        self._max_jump_s = max_jump_s
        self._last = clock()
        self._elapsed = 0.0

    def __call__(self) -> float:
        now = self._clock()
        self._elapsed += min(max(0.0, now - self._last), self._max_jump_s)
        self._last = now
        return self._elapsed
