# SPDX-License-Identifier: Apache-2.0
"""A client and the search server count each response once in random interleavings."""

from fake_search_server import IDENTITY, House, part_of, ticket
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_jax.remote.channel import Unreachable
from tba_jax.remote.client import (
    Callbacks,
    Dismissed,
    LeasedShard,
    Rewind,
    SearcherClient,
    TicketQuota,
)
from tba_jax.remote.messages import (
    Heartbeat,
    JoinRequest,
)
from tba_jax.replay.outbox import Outbox


class Wire:
    """Requests to the current search server; some are lost before they arrive, some after."""

    def __init__(self, house):
        self.house, self.fate = house, "arrives"

    def _said(self, say):
        if self.fate == "lost":
            raise Unreachable("no answer in 10 s")
        answer = say()
        if self.fate == "answer lost":
            raise Unreachable("no answer in 10 s")
        return answer

    def request_tickets(self, *message):
        return self._said(lambda: self.house.server.request_tickets(*message))

    def put(self, *message):
        return self._said(lambda: self.house.server.put(*message))

    def return_lease(self, *message):
        return self._said(lambda: self.house.server.return_lease(*message))


class Process:
    """A process that is a searcher: it begins what it is granted, ends it in some order."""

    def __init__(self, house, slot):
        self.house, self.slot = house, slot
        self.wire = Wire(house)
        self.is_dismissed = False
        self.join()

    def join(self):
        (start,) = self.house.server.join(JoinRequest((self.slot,), "a", IDENTITY)).starts
        self.outbox, self.quota, self.begun = Outbox(2**20), TicketQuota(), []
        self.leased = LeasedShard()
        self.outbox.start_from(start.position)
        self.next = start.position["next_round"]
        self.client = SearcherClient(
            start,
            self.wire,
            self.outbox,
            self.quota,
            self.leased,
            Callbacks(
                room=lambda: 3 - len(self.begun),
                heartbeat=lambda put_s: Heartbeat(version=0),
                versions=lambda version, evaluated: None,
                log=self.house.lines.append,
            ),
            clock=lambda: self.house.now,
            timeout_s=1e6,
        )

    def work(self, fate, choice):
        self.wire.fate = fate
        while self.quota.admit(self.slot, 0):
            while self.outbox.is_committed(self.next) or self.next in self.begun:
                self.next += 1
            self.begun.append(self.next)
        if self.begun and choice % 3:
            number = self.begun.pop(choice // 3 % len(self.begun))
            self.outbox.put(ticket(self.slot, number))
        if choice % 2 and (asked := self.leased.start()) is not None:
            could = choice % 5 > 0
            self.leased.finish(asked, part_of(asked[1], f"searcher {self.slot}") if could else None)
        try:
            self.client.step()
        except Rewind:
            self.join()
        except Dismissed:
            self.is_dismissed = True


def test_an_owner_that_is_slow_for_30_s_is_one_clear_line():
    house = House(1)
    process = Process(house, 0)
    process.work("arrives", 0)
    lines = len(house.lines)
    for _ in range(4):
        house.now += 10.0
        process.work("lost", 0)
    process.work("arrives", 0)
    process.work("arrives", 1)
    (line,) = house.lines[lines:]
    assert line.startswith("searcher 0 had no response from the trainer for 30 s; its finished")
    house.check()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["work"] * 6 + ["lost", "answer lost", "kill", "zombie", "merge", "save", "restore",
                            "silence", "jump"]
        ),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(EVENTS)
def test_each_response_counts_once_in_random_interleavings(events):
    """Random interleavings of work, lost messages, kills, zombies, restores and silences."""
    house = House(3, max_staleness=2, prompts=3)
    processes = [Process(house, slot) for slot in range(3)]
    for kind, which, choice in events:
        house.now += 0.5
        process = processes[which % len(processes)]
        if kind in ("work", "lost", "answer lost") and not process.is_dismissed:
            process.work("arrives" if kind == "work" else kind, choice)
        elif kind == "kill":
            processes[which % len(processes)] = Process(house, process.slot)
        elif kind == "zombie":  # the old one goes on beside the new one
            processes.append(Process(house, process.slot))
        elif kind == "merge":
            house.merge()
        elif kind == "save":
            house.save()
            house.service.request(choice, ["trainer"])
        elif kind == "restore":
            house.restore()
        elif kind == "silence":
            for _ in range(5):
                house.now += 2.4
                house.server.lose_silent_searchers()
        elif kind == "jump":
            house.now += 1e5 * (choice - 2)
        house.check()
    # The last process of a slot finishes all tickets up to its own: none was skipped.
    for slot in range(3):
        last = Process(house, slot)
        for choice in range(30):
            house.now += 1.0
            last.work("arrives", choice)
            house.merge()
            house.check()
        assert not last.is_dismissed
        committed = sorted(number for owner, number in house.taken if owner == slot)
        assert committed[:10] == list(range(10))
    # Every evaluation that this trainer asked for is made of every part once.
    wanted = house.service.wanted
    house.server.stop_leases()
    while house.service.step(0):
        pass
    assert house.service.is_idle
    finished = house.service.poll()
    assert {f.version for f in finished} >= set(wanted)
    assert all([number for number, _ in f.evaluation] == list(range(5)) for f in finished)
