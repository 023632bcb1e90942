# SPDX-License-Identifier: Apache-2.0
"""SearchServer: accepts the responses of all searchers of a run, each response exactly once.

A process joins with the IDs of its searchers. It receives an incarnation, and the committed tickets
of each searcher. A searcher then requests tickets, and puts the responses of finished tickets. The
key of a ticket is (searcher, incarnation, ticket): a repeated put is acknowledged as a duplicate,
an older incarnation is fenced, and a ticket that was not admitted is refused. A restored trainer
starts a server with a new epoch. Searchers of the old epoch receive "rewind", join again, and
repeat the tickets that the checkpoint lacks. A searcher that exceeds the heartbeat timeout is lost:
its open tickets count as lost until the searcher sends another message.

Invariant: after every message the outbox of a searcher counts each response once, as committed or
as lost, and admission counts the open tickets (tests/remote/test_client.py).
"""

import collections
import threading
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from tba_jax.flow.evaluation_shard import EvaluationShard, Lease
from tba_jax.flow.rounds import NO_COUNTS, DecodeCounts, RoundCommit, check_commit
from tba_jax.remote.messages import (
    RUN_ENDED,
    Heartbeat,
    JoinRequest,
    JoinResponse,
    Response,
    SearcherKey,
    SearcherStart,
)
from tba_jax.remote.searcher_table import (
    BoundedClock,
    EvaluationQueue,
    OpenTicket,
    RemoteSearcher,
    SearcherRecord,
    ServerSettings,
    TicketAdmission,
)

# Maximum rate of ticket requests from all searchers without work, in requests per second; a single
# searcher waits at least _RETRY_S seconds between two requests.
_MAX_REQUESTS_PER_S = 400.0
_RETRY_S = 0.02
_NO_HEARTBEAT = Heartbeat()
_KEPT_LATENCIES = 2048


class SearchServer:
    """Thread-safe search server: handles join, ticket, put and lease requests from searchers.

    Args:
        searchers: counters and outboxes of the searchers; the trainer merges the outboxes.
        clock: monotonic clock in seconds; a jump counts as at most a quarter of the heartbeat
            timeout.
        log: receives one line for each join, loss and return of a searcher.
    """

    def __init__(
        self,
        settings: ServerSettings,
        searchers: Iterable[RemoteSearcher],
        admission: TicketAdmission,
        evaluations: EvaluationQueue,
        *,
        clock: Callable[[], float],
        log: Callable[[str], None],
        run_clock: Callable[[], float] = lambda: 0.0,
    ) -> None:
        self._settings = settings
        self._searchers = {each.index: SearcherRecord(each) for each in searchers}
        self._admission = admission
        self._evaluations = evaluations
        self._gives_leases = True
        self._log = log
        self._run_clock = run_clock
        self._lock = threading.Lock()
        self._clock = BoundedClock(clock, max_jump_s=settings.heartbeat_timeout_s / 4)
        self._version = -1
        self._step = 0
        self._has_ended = False
        self._num_searchers_lost = 0
        self._num_lost = self._num_duplicates = self._num_fenced = 0
        self._num_bytes = 0
        self._put_s: collections.deque[float] = collections.deque(maxlen=_KEPT_LATENCIES)
        self._decoded = NO_COUNTS

    def join(self, request: JoinRequest) -> JoinResponse:
        """Let a process run searchers; the open tickets of their previous processes are lost.

        A process without searchers receives only whether the run has ended.
        """
        with self._lock:
            now = self._clock()
            if not request.searchers and not self._has_ended:
                return JoinResponse((), self._version, run_s=self._run_clock())
            refusal = self._refusal(request)
            if refusal:
                if refusal != RUN_ENDED:
                    self._log(f"{request.host} may not search: {refusal}")
                return JoinResponse((), refusal=refusal)
            starts = []
            for searcher in request.searchers:
                record = self._searchers[searcher]
                self._lose_open_tickets(searcher, record)
                record.incarnation += 1
                record.num_joins += 1
                record.host, record.last_message_s, record.is_lost = request.host, now, False
                record.open_tickets = {}
                record.idle_s = 0.0
                position = record.outbox.position()
                record.next_ticket = position["next_round"]
                if request.given:
                    given = request.given[request.searchers.index(searcher)]
                    record.searcher.num_given, record.searcher.num_given_rounds = given
                key = SearcherKey(self._settings.epoch, searcher, record.incarnation)
                starts.append(SearcherStart(key, position))
            again = max(self._searchers[i].num_joins for i in request.searchers) > 1
            verb = "joined again" if again else "joined"
            self._log(f"{_name(request.searchers)} on {request.host} {verb}")
            return JoinResponse(tuple(starts), self._version, run_s=self._run_clock())

    def request_tickets(
        self,
        key: SearcherKey,
        max_tickets: int,
        first_unseen: int,
        heartbeat: Heartbeat = _NO_HEARTBEAT,
    ) -> Response:
        """Return tickets that the searcher may start, in ascending order.

        Args:
            max_tickets: maximum number of tickets to return; 0: only the heartbeat is processed.
            first_unseen: first ticket that the searcher has not received; this and later tickets
                are sent again.
        """
        with self._lock:
            if (refused := self._check_sender(key)) is not None:
                return refused
            record = self._searchers[key.searcher]
            record.searcher.idle_s += heartbeat.idle_s - record.idle_s
            record.idle_s = heartbeat.idle_s
            self._put_s.extend(heartbeat.put_s)
            self._decoded = self._decoded.plus(heartbeat.decoded)
            tickets = [ticket for ticket in record.open_tickets if ticket >= first_unseen]
            record.wants_stop = heartbeat.wants_stop
            limit = min(max_tickets, self._settings.max_tickets)
            while len(tickets) < limit and record.outbox.has_room():
                while record.outbox.is_committed(record.next_ticket):
                    record.next_ticket += 1
                is_given = record.next_ticket < record.searcher.num_given_rounds
                if not is_given and not self._admission.admit(key.searcher, heartbeat.version):
                    break
                opened = OpenTicket(heartbeat.version, is_given)
                record.open_tickets[record.next_ticket] = opened
                tickets.append(record.next_ticket)
                record.next_ticket += 1
            if record.lease is None and heartbeat.can_evaluate and self._gives_leases:
                record.lease = self._evaluations.lease()
            lease = record.lease if heartbeat.can_evaluate else None
            return self._response(record, tuple(tickets))._replace(lease=lease)

    def put(
        self, key: SearcherKey, commits: Sequence[RoundCommit], *, num_bytes: int = 0
    ) -> Response:
        """Accept the responses of finished tickets: those of all tickets, or none."""
        with self._lock:
            if (refused := self._check_sender(key)) is not None:
                return refused
            record = self._searchers[key.searcher]
            try:
                new = self._new_commits(key, record, commits)
                for commit in new:
                    check_commit(commit)
            except ValueError as error:
                return Response("refused", reason=str(error))
            for commit in new:
                record.outbox.put(commit)
                ticket = record.open_tickets.pop(commit.round)
                if not ticket.is_given:
                    self._admission.commit(key.searcher, ticket.version)
                record.num_groups += 1
                record.searcher.decoded_tokens += commit.report.metrics.tokens
                record.staleness += self._step - commit.version
            self._num_bytes += num_bytes
            self._num_duplicates += len(commits) - len(new)
            response = self._response(record)
            return response if new else response._replace(status="duplicate")

    def return_lease(
        self, key: SearcherKey, lease: Lease, shard: EvaluationShard | None
    ) -> Response:
        """Accept the result of a lease; None: the searcher could not work on the shard."""
        with self._lock:
            if (refused := self._check_sender(key)) is not None:
                return refused
            record = self._searchers[key.searcher]
            if record.lease != lease:
                return self._response(record)._replace(status="duplicate")
            record.lease = None
            if shard is None:
                self._evaluations.withdraw(lease)
            else:
                self._evaluations.complete(lease, shard)
            return self._response(record)

    @property
    def wants_stop(self) -> bool:
        """Return whether the process of any connected searcher received a stop signal."""
        with self._lock:
            return any(s.wants_stop and s.is_connected for s in self._searchers.values())

    @property
    def absent(self) -> list[int]:
        """IDs of the searchers that no process runs."""
        with self._lock:
            return [i for i, s in self._searchers.items() if not s.is_connected]

    @property
    def gives_leases(self) -> bool:
        """Whether at least one connected searcher can work on evaluation shards."""
        with self._lock:
            return self._gives_leases and any(s.is_connected for s in self._searchers.values())

    def stop_leases(self) -> None:
        """End all leases and grant no more; the trainer evaluates the remaining shards."""
        with self._lock:
            self._gives_leases = False
            for record in self._searchers.values():
                self._withdraw_lease(record)

    def set_version(self, version: int) -> None:
        """Announce the newest complete policy version in every response."""
        with self._lock:
            self._version = version

    def set_step(self, step: int) -> None:
        """Set the trainer's step, from which the staleness of new responses is counted."""
        with self._lock:
            self._step = step

    def lose_silent_searchers(self) -> bool:
        """Count searchers over the heartbeat timeout as lost; return whether any was lost."""
        with self._lock:
            now, found = self._clock(), False
            for searcher, record in self._searchers.items():
                silent_s = now - record.last_message_s
                if record.is_connected and silent_s > self._settings.heartbeat_timeout_s:
                    found = True
                    count = len(record.open_tickets)
                    self._lose_open_tickets(searcher, record)
                    record.is_lost = True
                    self._log(
                        f"searcher {searcher} on {record.host} is lost: no message for "
                        f"{silent_s:.0f} s. Its {count} open tickets are sampled again when the "
                        "searcher is back"
                    )
            return found

    def lose_host(self, searchers: Sequence[int]) -> None:
        """Count these searchers as lost at once, because their process has ended."""
        with self._lock:
            for searcher in searchers:
                record = self._searchers[searcher]
                if record.is_connected:
                    self._lose_open_tickets(searcher, record)
                    record.is_lost = True

    def close(self) -> None:
        """Answer every request with "ended"."""
        with self._lock:
            self._has_ended = True

    def metrics(self) -> dict[str, float]:
        """Return the metrics of the fleet by name."""
        with self._lock:
            connected = [s for s in self._searchers.values() if s.is_connected]
            figures: dict[str, float] = {
                "fleet/hosts": len({s.host for s in connected}),
                "fleet/searchers": len(connected),
                "fleet/slots": len(self._searchers),
                "fleet/joins": sum(s.num_joins for s in self._searchers.values()),
                "fleet/searchers_lost": self._num_searchers_lost,
                "fleet/lost": self._num_lost,
                "fleet/rejoined": sum(max(0, s.num_joins - 1) for s in self._searchers.values()),
                "fleet/duplicates": self._num_duplicates,
                "fleet/fenced": self._num_fenced,
                "fleet/put_bytes": self._num_bytes,
            }
            latencies = sorted(self._put_s)
            if latencies:
                figures["fleet/put_p50_s"] = latencies[len(latencies) // 2]
                figures["fleet/put_p99_s"] = latencies[int(0.99 * (len(latencies) - 1))]
            return {name: float(value) for name, value in figures.items()}

    def searchers(self) -> list[dict[str, Any]]:
        """Return one row for each searcher, for the report."""
        with self._lock:
            return [
                {
                    "searcher": searcher,
                    "host": record.host,
                    "state": "connected"
                    if record.is_connected
                    else "lost"
                    if record.is_lost
                    else "absent",
                    "joins": record.num_joins,
                    "groups": record.num_groups,
                    "staleness_mean": record.staleness / record.num_groups
                    if record.num_groups
                    else None,
                    "idle_s": record.searcher.idle_s,
                }
                for searcher, record in self._searchers.items()
            ]

    def take_decode_counts(self) -> DecodeCounts:
        """Return the counts of all searchers since the last call."""
        with self._lock:
            counts, self._decoded = self._decoded, NO_COUNTS
            return counts

    def _refusal(self, request: JoinRequest) -> str:
        if self._has_ended:
            return RUN_ENDED
        if unknown := [i for i in request.searchers if i not in self._searchers]:
            return (
                f"there is no searcher {unknown[0]}: the run has {len(self._searchers)} "
                "searchers. Start the same command on every machine"
            )
        for name, wanted in self._settings.identity.items():
            found = request.identity.get(name, "(absent)")
            if found != wanted:
                return (
                    f"its {name} is {found}, and the {name} of the trainer is {wanted}. Install "
                    "the same version on every machine, or point both to the same files"
                )
        return ""

    def _check_sender(self, key: SearcherKey) -> Response | None:
        """Record a message of a sender; return a refusal if the sender may not continue."""
        now = self._clock()
        if self._has_ended:
            return Response("ended", reason=RUN_ENDED)
        if key.epoch != self._settings.epoch:
            return Response(
                "rewind",
                reason="the trainer was restored from a checkpoint; responses that the checkpoint "
                "does not hold are sampled again",
            )
        record = self._searchers.get(key.searcher)
        if record is None or key.incarnation > record.incarnation:
            return Response("refused", reason=f"no process has joined as {key}; join first")
        if key.incarnation < record.incarnation:
            self._num_fenced += 1
            return Response("fenced", reason=f"searcher {key.searcher} now runs on {record.host}")
        if record.is_lost:
            self._recover(key.searcher, record, now - record.last_message_s)
        record.last_message_s = now
        return None

    def _new_commits(
        self, key: SearcherKey, record: SearcherRecord, commits: Sequence[RoundCommit]
    ) -> list[RoundCommit]:
        """Return the commits that did not arrive before.

        Raises:
            ValueError: a commit does not belong to an open ticket of this searcher.
        """
        new: list[RoundCommit] = []
        for commit in commits:
            if commit.searcher != key.searcher:
                raise ValueError(
                    f"searcher {key.searcher} sends responses of searcher {commit.searcher}"
                )
            if record.outbox.is_committed(commit.round):
                continue
            if commit.round not in record.open_tickets or any(c.round == commit.round for c in new):
                raise ValueError(
                    f"ticket {commit.round} was not admitted for searcher {key.searcher}, whose "
                    f"open tickets are {sorted(record.open_tickets)}; request tickets first"
                )
            is_given = record.open_tickets[commit.round].is_given
            if not is_given and commit.generated != self._settings.responses_per_ticket:
                raise ValueError(
                    f"ticket {commit.round} of searcher {key.searcher} has {commit.generated} "
                    f"responses, wanted {self._settings.responses_per_ticket}"
                )
            new.append(commit)
        return new

    def _lose_open_tickets(self, searcher: int, record: SearcherRecord) -> None:
        if record.is_connected:
            num_open = len(_drawn(record))
            record.outbox.lose(num_open * self._settings.responses_per_ticket)
            self._num_lost += num_open
            self._num_searchers_lost += 1
            self._admission.set_open(searcher, [])
            self._withdraw_lease(record)

    def _withdraw_lease(self, record: SearcherRecord) -> None:
        if record.lease is not None:
            self._evaluations.withdraw(record.lease)
            record.lease = None

    def _recover(self, searcher: int, record: SearcherRecord, silent_s: float) -> None:
        """Restore the open tickets of a searcher that was counted as lost and has reconnected."""
        versions = [ticket.version for ticket in _drawn(record)]
        record.outbox.lose(-len(versions) * self._settings.responses_per_ticket)
        self._num_lost -= len(versions)
        self._admission.set_open(searcher, versions)
        record.is_lost = False
        self._log(f"searcher {searcher} on {record.host} is back after {silent_s:.0f} s")

    def _response(self, record: SearcherRecord, tickets: tuple[int, ...] = ()) -> Response:
        num_connected = sum(s.is_connected for s in self._searchers.values())
        retry_s = max(_RETRY_S, num_connected / _MAX_REQUESTS_PER_S)
        return Response(
            "ok",
            tickets,
            self._version,
            retry_s,
            evaluated=self._evaluations.wanted,
        )


def _drawn(record: SearcherRecord) -> list[OpenTicket]:
    """Return the open tickets of sampled responses; tickets of given responses cannot be lost."""
    return [ticket for ticket in record.open_tickets.values() if not ticket.is_given]


def _name(searchers: Sequence[int]) -> str:
    if len(searchers) == 1:
        return f"searcher {searchers[0]}"
    return f"searchers {searchers[0]} to {searchers[-1]}"
