# SPDX-License-Identifier: Apache-2.0
"""Courier: what a searching host has done goes away in messages, and notices come in.

It waits for nobody and knows no device. Invariant: work leaves an outbox only into a message; while
messages wait to be received, outboxes fill and searchers stop.
"""

import collections
import time
from collections.abc import Callable, Mapping
from typing import Any

import jax

from tba_jax.evaluation.service import EvaluationService
from tba_jax.flow.rounds import pack_commits
from tba_jax.flow.state import PartState
from tba_jax.replay.admission import Admission
from tba_jax.run.searching import Search, part_of
from tba_jax.run.whole_hosts.mail import Sender, read_json
from tba_jax.run.whole_hosts.notice import BEAT_S, KEEPER, Notice, Silence
from tba_jax.run.whole_hosts.team import Team


class Courier:
    """Brings what searchers have done away, and the notices in; `step` is what its worker does.

    Args:
        team: the start of the run.
        process: number of this one.
        search: the searchers.
        service: evaluates.
        admission: says when a prompt may begin.
        limit_s: longest silence of the other side.
        wants_stop: whether this process was interrupted.
        clock: seconds that only go on.

    Attributes:
        notice: the newest; None before the first.
        events: of the schedule log, to be sent.
        slot_use: asks for tokens drawn and slot-steps made since it was asked last.
    """

    def __init__(
        self,
        team: Team,
        process: int,
        search: Search,
        service: EvaluationService,
        admission: Admission,
        *,
        limit_s: float,
        wants_stop: Callable[[], bool],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.notice: Notice | None = None
        self.events: collections.deque[Mapping[str, Any]] = collections.deque()
        self.slot_use: Callable[[], tuple[int, int]] = lambda: (0, 0)
        self._folder, self._process = team.folder, process
        self._share = sorted(team.hosts).index(process), len(team.hosts)
        self._search, self._service = search, service
        self._admission = admission
        self._merged = self._step = 0
        self._slots = [0, 0]
        self._wants_stop = wants_stop
        self._sender = Sender(team.folder / f"from_{process}")
        self._silence = Silence(KEEPER, limit_s, clock)
        self._clock = clock
        self._sent = -BEAT_S
        self._given = {s.index: s.num_given for s in search.searchers}
        self._given_rounds = {s.index: s.num_given_rounds_left for s in search.searchers}

    @property
    def is_over(self) -> bool:
        """Whether the run is."""
        return self.notice is not None and self.notice.phase == "end"

    def step(self) -> bool:
        """Take in the notice, send what there is; False where there was nothing to send.

        Raises:
            PeerError: no notice comes any more.
        """
        self._read()
        if not self._sender.has_room:
            return False
        commits = [c for outbox in self._search.outboxes for c in outbox.take()]
        shares = self._service.take_shares(self._service.newest_share)
        # After the commits: whatever led to them has been logged by now.
        events = [self.events.popleft() for _ in range(len(self.events))]
        now = self._clock()
        if not (commits or shares or events) and now - self._sent < BEAT_S:
            return False
        arrays, meta = pack_commits(commits)
        report = self._report() | {"events": events, "shares": shares}
        self._sender.send({"commits": PartState(arrays, meta), "report": PartState({}, report)})
        self._sent = now
        return True

    def _report(self) -> dict[str, Any]:
        tokens, slots = self.slot_use()
        self._slots = [self._slots[0] + tokens, self._slots[1] + slots]
        return {
            "searchers": {
                str(s.index): {
                    **s.state().meta,
                    "num_given": self._given[s.index],
                    "num_given_rounds": self._given_rounds[s.index],
                }
                for s in self._search.searchers
            },
            "under_way": self._admission.num_under_way,
            "tokens": self._slots[0],
            "slots": self._slots[1],
            "num_skipped": self._search.num_skipped,
            "num_compiled": self._search.num_compiled if self._search.searchers else 0,
            "num_devices": len(jax.local_devices()),
            "wants_stop": self._wants_stop(),
        }

    def _read(self) -> None:
        record = read_json(self._folder / "notice.json")
        if record is None or (self.notice is not None and record["beat"] <= self.notice.beat):
            self._silence.check()
            return
        self._silence.heard()
        notice = Notice.from_record(record)
        key = str(self._process)
        self._sender.acknowledge(notice.received.get(key, 0))
        merged, self._merged = self._merged, notice.merged.get(key, 0)
        if notice.step > self._step and notice.step_s:
            self._admission.note_step(notice.step_s)
        self._step = notice.step
        self._admission.update(
            step=notice.step,
            version=notice.version,
            num_merged=self._merged - merged,
            num_fresh=part_of(notice.num_fresh, *self._share),
        )
        self.notice = notice
