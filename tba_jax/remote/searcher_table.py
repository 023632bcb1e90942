# SPDX-License-Identifier: Apache-2.0
"""Records of the search server about each searcher, and its clock."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple, Protocol

from tba_jax.flow.evaluation_shard import EvaluationShard, Lease
from tba_jax.flow.state import PartState
from tba_jax.replay.outbox import Outbox


class EvaluationQueue(Protocol):
    """Evaluations whose shards searchers work on; implemented by `EvaluationService`."""

    def lease(self) -> Lease | None:
        """Return the lease of a shard to work on; None if no shard is left."""
        ...

    def complete(self, lease: Lease, shard: EvaluationShard) -> bool:
        """Accept a leased shard; return False if the lease was withdrawn before."""
        ...

    def withdraw(self, lease: Lease) -> None:
        """End a lease, so that another searcher gets the shard."""
        ...

    @property
    def wanted(self) -> tuple[int, ...]:
        """Policy versions under evaluation."""
        ...


class TicketAdmission(Protocol):
    """Rule for the tickets that may be open: `Admission`; with driver=sync, `RoundAdmission`."""

    def admit(self, searcher: int, version: int) -> bool:
        """Return whether this searcher may start a ticket with weights of this version."""
        ...

    def commit(self, searcher: int, version: int) -> None:
        """Count a ticket as finished."""
        ...

    def set_open(self, searcher: int, versions: Sequence[int]) -> None:
        """Set the open tickets of a searcher to tickets admitted with these versions."""
        ...


class ServerSettings(NamedTuple):
    """Settings of a search server.

    Attributes:
        epoch: name of this server, different from the names of all earlier servers.
        identity: digest of the code, and the run ID, that searchers must have.
        responses_per_ticket: number of responses of a ticket.
        heartbeat_timeout_s: seconds without a message after which a searcher counts as lost.
        max_tickets: maximum number of tickets in one response.
    """

    epoch: str
    identity: Mapping[str, str]
    responses_per_ticket: int
    heartbeat_timeout_s: float
    max_tickets: int


class OpenTicket(NamedTuple):
    """A ticket that a searcher may have started.

    Attributes:
        version: policy version that the searcher had at that time.
        is_given: whether the ticket has given responses, which need no admission.
    """

    version: int
    is_given: bool = False


@dataclasses.dataclass
class RemoteSearcher:
    """Counters of a searcher in another process, kept by the owner of the buffer.

    Attributes:
        index: searcher ID.
        outbox: responses that are not merged yet.
        decoded_tokens: tokens of the responses that arrived.
        idle_s: seconds without work.
        num_given: number of given responses.
        num_given_rounds: number of rounds of given responses, the searcher's first rounds.
    """

    index: int
    outbox: Outbox
    decoded_tokens: int = 0
    idle_s: float = 0.0
    num_given: int = 0
    num_given_rounds: int = 0

    @property
    def num_given_rounds_left(self) -> int:
        """Return the number of rounds of given responses that have not arrived."""
        return max(0, self.num_given_rounds - self.outbox.committed[0])

    def state(self) -> PartState:
        """Return the counters, in the format of `Searcher.state`."""
        return PartState({}, {"decoded_tokens": self.decoded_tokens, "idle_s": self.idle_s})

    def restore(self, state: PartState) -> None:
        """Restore the counters."""
        vars(self).update(state.meta)


@dataclasses.dataclass
class SearcherRecord:
    """One searcher: the process that runs it, and its open tickets."""

    searcher: RemoteSearcher
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
    idle_s: float = 0.0  # idle time of this incarnation
    wants_stop: bool = False

    @property
    def outbox(self) -> Outbox:
        return self.searcher.outbox

    @property
    def is_connected(self) -> bool:
        return self.incarnation > 0 and not self.is_lost


class BoundedClock:
    """Clock in seconds that advances by at most `max_jump_s` between two readings.

    With an ordinary clock, a suspended machine or a changed system time would make every searcher
    exceed the heartbeat timeout at once.
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
