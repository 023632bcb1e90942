# SPDX-License-Identifier: Apache-2.0
"""The searchers of a run as the host sees them that keeps the buffer, and they are elsewhere.

Each has an outbox here, as it would in one process: `Home` fills it from the messages of the hosts
that search, and tells them in notices how far the run is. So the buffer, the drivers, the ledger
and a checkpoint are those of a run of one process. What it owns: a ticket or round is put into its
outbox once, whatever is sent again; nothing is received while an outbox is full; and a host that
falls silent ends the run with a line that names it.
"""

import dataclasses
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from etils import epath

from tba_jax.evaluation.service import EvaluationService
from tba_jax.flow.rounds import unpack_commits
from tba_jax.flow.state import PartState
from tba_jax.replay.outbox import Outbox
from tba_jax.run.whole_hosts.mail import Receiver, read_json, write_json
from tba_jax.run.whole_hosts.notice import BEAT_S, Notice, Silence

POLL_S = 0.02


@dataclasses.dataclass
class RemoteSearcher:
    """A searcher on another host.

    Attributes:
        index: of it, in the run.
        outbox: where what it has done waits to be merged.
        decoded_tokens, idle_s, num_chunks, num_given: as it said last, as those of `Searcher`.
        num_given_rounds: of its rounds so many are of given responses.
    """

    index: int
    outbox: Outbox
    decoded_tokens: int = 0
    idle_s: float = 0.0
    num_chunks: int = 0
    num_given: int = 0
    num_given_rounds: int = 0

    @property
    def num_given_rounds_left(self) -> int:
        """Rounds of given responses that did not arrive yet."""
        return max(0, self.num_given_rounds - self.outbox.committed[0])

    def state(self) -> PartState:
        """Its counters, as `Searcher.state`."""
        names = ("decoded_tokens", "idle_s", "num_chunks")
        return PartState({}, {name: getattr(self, name) for name in names})

    def restore(self, state: PartState) -> None:
        """Count on from there."""
        vars(self).update(state.meta)


class Home:
    """Receives, and writes notices; `step` is what its worker does.

    Args:
        folder: of the mail of this start of the run.
        hosts: searchers of each host that searches, by process number, in order.
        outbox_bytes: as in `Outbox`, of each searcher.
        log_event: schedule log.
        limit_s: a host that is silent for longer ends the run.
        clock: seconds that only go on.
    """

    def __init__(
        self,
        folder: epath.Path,
        hosts: Mapping[int, Sequence[int]],
        *,
        outbox_bytes: int,
        log_event: Callable[[Mapping[str, Any]], None],
        limit_s: float,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.searchers = tuple(
            RemoteSearcher(i, Outbox(outbox_bytes)) for mine in hosts.values() for i in mine
        )
        self.num_duplicates = 0
        self._folder = folder
        self._hosts = {process: tuple(mine) for process, mine in hosts.items()}
        self._log_event = log_event
        self._clock = clock
        self._receivers = {p: Receiver(folder / f"from_{p}") for p in hosts}
        self._silence = {p: Silence(f"process {p}, which searches,", limit_s, clock) for p in hosts}
        self._said: dict[int, Mapping[str, Any]] = {}
        self._put = dict.fromkeys(hosts, 0)  # groups, in all
        self._shares: dict[int, dict[int, dict[str, Any]]] = {}  # by version and process
        self._asked: list[tuple[int, bool]] = []
        self._notice = Notice()
        self._told = 0.0
        self._is_new = True
        self._lock = threading.Lock()

    def open(self) -> None:
        """Say where every searcher goes on: what the outboxes were restored to."""
        self._put = {p: 0 for p in self._hosts}
        for process, mine in self._hosts.items():
            self._put[process] = sum(self._of(i).outbox.num_groups for i in mine)
        start = {
            "searchers": {
                str(s.index): {
                    "position": s.outbox.state().meta["position"],
                    "counters": s.state().meta,
                }
                for s in self.searchers
            },
            "unmerged": {str(p): n for p, n in self._put.items()},
        }
        write_json(self._folder / "start.json", start)

    def _of(self, index: int) -> RemoteSearcher:
        return next(s for s in self.searchers if s.index == index)

    def say(self, **fields: Any) -> None:
        """Change what the notice says."""
        with self._lock:
            changed = self._notice._replace(**fields)
            self._is_new = self._is_new or changed != self._notice
            self._notice = changed

    @property
    def notice(self) -> Notice:
        """What is said now."""
        return self._notice

    def step(self) -> bool:
        """Receive what came and tell what changed; False where there was nothing.

        Raises:
            PeerError: a host is silent.
        """
        received = [self._receive(process) for process in self._hosts]
        merged = {
            str(p): self._put[p] - sum(self._of(i).outbox.num_groups for i in mine)
            for p, mine in self._hosts.items()
        }
        counts = {str(p): receiver.received for p, receiver in self._receivers.items()}
        self.say(merged=merged, received=counts)
        now = self._clock()
        with self._lock:
            is_due = self._is_new or now - self._told > BEAT_S
            if is_due:
                self._notice = self._notice._replace(beat=self._notice.beat + 1)
                self._is_new, self._told = False, now
            notice = self._notice
        if is_due:
            write_json(self._folder / "notice.json", notice.record())
        if notice.phase != "end":
            for silence in self._silence.values():
                silence.check()
        return any(received)

    def _receive(self, process: int) -> bool:
        """The next message of a host, unless its searchers' outboxes are full."""
        mine = self._hosts[process]
        if not all(self._of(i).outbox.has_room() for i in mine):
            self._silence[process].heard()  # it has to wait
            return False
        message = self._receivers[process].take()
        if message is None:
            return False
        self._silence[process].heard()
        report = message["report"].meta
        for event in report["events"]:
            self._log_event(event)
        for commit in unpack_commits(*message["commits"]):
            outbox = self._of(commit.searcher).outbox
            if commit.searcher not in mine or outbox.is_committed(commit.round):
                self.num_duplicates += 1
                continue
            outbox.put(commit)
            self._put[process] += len(commit.groups)
        # After its commits: a checkpoint in between has fewer chunks than they took, not more.
        for index, counters in report["searchers"].items():
            vars(self._of(int(index))).update(counters)
        for share in report["shares"]:
            self._shares.setdefault(share["version"], {})[process] = share
        self._said[process] = report
        return True

    @property
    def has_heard_all(self) -> bool:
        """Whether every host has said something."""
        return len(self._said) == len(self._hosts)

    def total(self, name: str) -> int:
        """Sum over the hosts of what they said last under a name."""
        return sum(said[name] for said in self._said.values())

    @property
    def num_under_way(self) -> int:
        """Groups admitted and not used yet."""
        return self.total("under_way")

    @property
    def wants_stop(self) -> bool:
        """Whether a host that searches was interrupted."""
        return any(said["wants_stop"] for said in self._said.values())

    def ask(self, version: int, *, is_start: bool = False) -> None:
        """Have all hosts do their share of evaluating a version."""
        self._asked.append((version, is_start))
        self.say(evaluations=tuple(self._asked))

    @property
    def pending_evaluations(self) -> tuple[int, ...]:
        """Versions asked for of which shares are missing."""
        return tuple(version for version, _ in self._asked)

    def take_evaluations(self, service: EvaluationService) -> bool:
        """Give the service the versions of which all shares are there; whether there are any.

        Versions are complete in the order in which they were asked for.
        """
        found = False
        while self._asked and len(self._shares.get(self._asked[0][0], ())) == len(self._hosts):
            version, _ = self._asked.pop(0)
            shares = self._shares.pop(version)
            service.combine([[shares[p]] for p in self._hosts])
            found = True
        if found:
            self.say(evaluations=tuple(self._asked))
        return found


def read_start(folder: epath.Path) -> Any:
    """Where searchers go on, None before `Home.open`."""
    return read_json(folder / "start.json")
