# SPDX-License-Identifier: Apache-2.0
"""Clients and owner merge each ticket once in random interleavings of losses."""

import pytest
from fake_tickets import IDENTITY, House, make_result, shard_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_jax.remote.channel import NotReady, Unreachable
from tba_jax.remote.client import Callbacks, Client, Dismissed, Rewind
from tba_jax.remote.messages import Heartbeat, JoinRequest, Sender
from tba_jax.remote.search_channel import RemoteOwner, search_handlers


class Wire:
    """A channel to the current owner; some requests are lost before they arrive, some after."""

    def __init__(self, house):
        self.fate = "arrives"
        self._handlers = search_handlers(lambda: house.owner)

    def call(self, method, data):
        if self.fate == "lost":
            raise Unreachable("no answer in 10 s")
        answer = self._handlers[method](data)
        if self.fate == "answer lost":
            raise Unreachable("no answer in 10 s")
        return answer


class Process:
    """A process of one searcher: it begins what it takes, and ends it in some order."""

    def __init__(self, house, searcher):
        self.house, self.searcher = house, searcher
        self.wire = Wire(house)
        self.is_dismissed = False
        self.join()

    def join(self):
        self.wire.fate = "arrives"
        owner = RemoteOwner(self.wire)
        response = owner.join(JoinRequest((self.searcher,), "a", IDENTITY))
        self.begun = []
        self.client = Client(
            Sender(response.epoch, self.searcher),
            owner,
            Callbacks(Heartbeat, lambda version, evaluated: None, self.house.lines.append),
            clock=lambda: self.house.now,
            timeout_s=1e6,
        )

    def work(self, fate, choice):
        free = max(0, 3 - len(self.begun))
        self.begun += [t.number for t in self.client.take(self.searcher, free, 0)]
        if self.begun and choice % 3:
            number = self.begun.pop(choice // 3 % len(self.begun))
            self.client.put(self.searcher, [make_result(number, searcher=self.searcher)])
        if choice % 2 and (ticket := self.client.take_evaluation(self.searcher)) is not None:
            shard = shard_of(ticket, f"searcher {self.searcher}") if choice % 5 else None
            self.client.put_evaluation(self.searcher, ticket, shard)
        self.wire.fate = fate
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


def test_searchers_of_an_owner_that_failed_wait_and_of_one_that_ended_end():
    house = House(1)
    process = Process(house, 0)
    house.owner.has_ended = True
    process.work("arrives", 0)
    assert process.is_dismissed
    house.owner = None
    with pytest.raises(NotReady, match="starting, or has failed"):
        process.join()


EVENTS = st.lists(
    st.tuples(
        st.sampled_from(
            ["work"] * 6 + ["lost", "answer lost", "kill", "twin", "merge", "save", "restore",
                            "silence", "jump"]
        ),
        st.integers(0, 5),
        st.integers(0, 5),
    ),
    max_size=60,
)  # fmt: skip


@settings(max_examples=50, deadline=None)
@given(EVENTS)
def test_each_ticket_is_merged_once_in_random_interleavings(events):
    """Random interleavings of work, lost messages, kills, twins, restores and silences."""
    house = House(3, max_staleness=2, num_prompts=3)
    processes = [Process(house, searcher) for searcher in range(3)]
    for kind, which, choice in events:
        house.now += 0.5
        process = processes[which % len(processes)]
        if kind in ("work", "lost", "answer lost"):
            process.work("arrives" if kind == "work" else kind, choice)
        elif kind == "kill":
            processes[which % len(processes)] = Process(house, process.searcher)
        elif kind == "twin":  # the old one continues beside the new one
            processes.append(Process(house, process.searcher))
        elif kind == "merge":
            house.merge()
        elif kind == "save":
            house.save()
            house.evaluations.request(choice)
        elif kind == "restore":
            house.restore()
        elif kind == "silence":
            for _ in range(5):
                house.now += 2.4
                house.owner.lose_silent()
        elif kind == "jump":
            house.now += 1e5 * (choice - 2)
        house.check()
    # New processes finish all tickets in the order of their numbers: none was skipped.
    wanted = house.evaluations.versions
    processes = [Process(house, searcher) for searcher in range(3)]
    for choice in range(40):
        for process in processes:
            house.now += 1.0
            process.work("arrives", choice)
            assert not process.is_dismissed
        house.merge()
        house.check()
    assert sorted(house.merged)[:30] == list(range(30))
    # Every evaluation is made of every shard once.
    assert not house.evaluations.versions
    finished = house.evaluations.poll()
    assert {each.version for each in finished} >= set(wanted)
    assert all([number for number, _ in x.evaluation] == list(range(5)) for x in finished)
