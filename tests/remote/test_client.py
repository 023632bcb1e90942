# SPDX-License-Identifier: Apache-2.0
"""Clients and owner merge each ticket once in random interleavings of losses."""

import numpy as np
import pytest
from fake_groups import assert_same_trajectory, make_prompt
from fake_tickets import IDENTITY, House, make_result, shard_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_jax.devices.cluster import PeerError
from tba_jax.flow.tickets import DecodeCounts, EvaluationResult, EvaluationTicket, Ticket
from tba_jax.remote.channel import Refused, Rewind, RunEnded, Unreachable
from tba_jax.remote.client import Client
from tba_jax.remote.messages import Mail, decode, encode


class Wire:
    """A channel to the current owner, with the fates of the next messages; the rest arrives."""

    def __init__(self, house, *fates):
        self.house, self.fates = house, [*fates]

    def call(self, method, data):
        fate = self.fates.pop(0) if self.fates else "arrives"
        if fate == "lost" or self.house.owner is None:
            raise Unreachable("no answer in 10 s")
        try:
            answer = self.house.owner.handlers()[method](data)
        except ValueError as error:
            raise Refused(str(error)) from error
        if fate == "answer lost":
            raise Unreachable("no answer in 10 s")
        return answer


class Process:
    """A process of one searcher: it begins what it takes, and ends it in some order."""

    def __init__(self, house, searcher=0, timeout_s=1e9):
        self.house, self.searcher, self.wire = house, searcher, Wire(house)
        self.is_dismissed = False
        self.meanwhile = lambda: None  # what happens between two attempts
        self.client = Client(
            self.wire,
            "a",
            timeout_s=timeout_s,
            clock=lambda: house.now,
            sleep=self.sleep,
        )
        self.join()

    def sleep(self, wait_s):
        self.house.now += wait_s
        self.meanwhile()

    def join(self):
        self.client.join((self.searcher,), IDENTITY)
        self.begun = []

    def work(self, choice=0, *fates):
        """Take and finish tickets; a process whose searcher runs elsewhere now ends."""
        client, searcher, free = self.client, self.searcher, max(0, 3 - len(self.begun))
        for each in [] if self.is_dismissed else client.take(searcher, free, 0):
            if isinstance(each, Ticket):
                self.begun.append(each.number)
                continue
            shard = shard_of(each, f"searcher {searcher}") if choice % 5 else None
            client.put(searcher, [EvaluationResult(each.version, each.first, shard)])
        if self.begun and choice % 3 and not self.is_dismissed:
            number = self.begun.pop(choice // 3 % len(self.begun))
            client.put(searcher, [make_result(number, searcher=searcher)])
        self.wire.fates = [*fates]
        try:
            if not self.is_dismissed:
                client.exchange(lambda: False)
        except Rewind:
            self.join()
        except (RunEnded, PeerError):
            self.is_dismissed = True


def test_messages_come_back_as_they_were_and_damaged_ones_are_refused():
    ticket = EvaluationTicket(4, 8, ())
    shards = [EvaluationResult(4, 8, shard_of(ticket, "a")), EvaluationResult(4, 9, None)]
    result = make_result(3, version=2, searcher=1, rejected={3: {"reward_error": 2}})
    mail = Mail(1, 3, 4, 1.5, results=(result, *shards, make_result(4)))
    data = encode(mail)
    found = decode(data, Mail)
    assert encode(found) == data and list(found.results[1:3]) == shards
    assert found[:4] == (1, 3, 4, 1.5)
    (number, of, group, *report), other = found.results[0], result.group
    assert (number, of, *report) == (3, 2, *result[3:]) and group.rejected == other.rejected
    for y, z in zip(group.trajectories, other.trajectories, strict=True):
        assert_same_trajectory(y, z)
    columns = {"answer": 2**70, "text": "a\ud800", "of": {"b": [None, True, 0.5]}}
    prompt = make_prompt(4)
    given = Ticket(1, prompt, (np.array([5, 6], np.int32), np.array([], np.int32)))
    version, work = decode(encode((1, [[given], [ticket]])), tuple)
    assert version == 1 and work[1] == [ticket] and work[0][0].number == 1
    for y, expected in zip(work[0][0].responses, given.responses, strict=True):
        np.testing.assert_array_equal(y, expected)
        assert y.dtype == expected.dtype
    again = work[0][0].prompt
    assert (again.text, again.columns) == (prompt.text, prompt.columns)
    np.testing.assert_array_equal(again.tokens, prompt.tokens)
    assert decode(encode(columns)) == columns
    for wrong in (data[:-40], encode(ticket), b""):
        with pytest.raises(ValueError, match="damaged in transit or sent by another version"):
            decode(wrong, Mail)


def test_a_request_is_repeated_until_it_is_answered_and_counts_once():
    house = House(1)
    process = Process(house)
    counts, total = DecodeCounts(4, 3, 2, 1), DecodeCounts()
    for fates in (("lost", "answer lost"), ("answer lost", "answer lost"), ()):
        process.client.beat(0, 1.0, counts)
        total = total.plus(counts)
        house.now += 3.0
        process.work(1, *fates)
    assert house.owner.take_decode_counts() == total
    assert process.begun == [2] and house.owner.num_under_way == 4


def test_an_absence_of_the_trainer_loses_no_result_and_ends_no_searcher():
    """20 minutes, by a clock that jumps; the searcher finishes what it has meanwhile."""
    house = House(1)
    process = Process(house)
    process.work()
    process.work()
    owner, house.owner = house.owner, None
    start_s = house.now

    def meanwhile():
        house.now += 60.0
        if house.now - start_s > 120 and process.begun:
            process.client.put(0, [make_result(process.begun.pop(0))])
        if house.now - start_s > 1200:
            house.owner = owner

    process.meanwhile = meanwhile
    house.now += 3.0
    process.work()
    assert not process.is_dismissed and not process.begun
    process.work()
    house.merge()
    assert house.merged == [0, 1, 2]


def test_an_owner_that_is_gone_or_refuses_is_one_clear_line():
    house = House(1)
    process = Process(house, timeout_s=60.0)
    process.wire.fates = ["lost"] * 1000
    with pytest.raises(PeerError, match="has not responded to a for 60 s .no answer in 10 s.*run"):
        process.client.join((0,), IDENTITY)
    process.wire.fates = []
    with pytest.raises(PeerError, match="refuses a: its code and run are 2/r, wanted 1/r. Start"):
        process.client.join((0,), "2/r")
    house.now += 3.0
    failing = LookupError("a searcher failed")

    def check():
        raise failing

    with pytest.raises(LookupError):
        process.client.exchange(check)
    house.owner.has_ended = True
    with pytest.raises(RunEnded):
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


def happen(house, kind, choice):
    """An event in the owner's process."""
    if kind == "merge":
        house.merge()
    elif kind == "save":
        house.save()
        house.evaluations.request(choice)
    elif kind == "restore":
        house.restore()
    elif kind == "silence":
        for _ in range(5):
            house.now += 2.4 * 3
            house.owner.lose_silent()
    elif kind == "jump":
        house.now += 1e5 * (choice - 2)


@settings(max_examples=50, deadline=None)
@given(EVENTS)
def test_each_ticket_is_merged_once_in_random_interleavings(events):
    """Random interleavings of work, lost messages, kills, twins, restores and silences."""
    house = House(3, max_staleness=2, num_prompts=3)
    processes = [Process(house, searcher) for searcher in range(3)]
    for kind, which, choice in events:
        house.now += 0.5
        process = processes[which % len(processes)]
        if kind == "work":
            process.work(choice)
        elif kind in ("lost", "answer lost"):
            between = ("merge", "save", "restore", "silence", "kill", "nothing")[choice]

            def meanwhile(process=process, between=between, choice=choice):
                process.meanwhile = lambda: None
                happen(house, between, choice)
                if between == "kill":
                    processes.append(Process(house, process.searcher))

            process.meanwhile = meanwhile
            process.work(choice, kind)
        elif kind == "kill":
            processes[which % len(processes)] = Process(house, process.searcher)
        elif kind == "twin":  # the old one continues beside the new one
            processes.append(Process(house, process.searcher))
        happen(house, kind, choice)
        house.check()
    # New processes finish all tickets in the order of their numbers: none was skipped.
    wanted = house.evaluations.versions
    processes = [Process(house, searcher) for searcher in range(3)]
    for choice in range(60):
        for process in processes:
            house.now += 1.0
            process.work(choice)
            assert not process.is_dismissed
        house.merge()
        house.check()
    assert sorted(house.merged)[:30] == list(range(30))
    # Every evaluation is made of every shard once.
    assert not house.evaluations.versions
    finished = house.evaluations.poll()
    assert {version for version, _ in finished} >= set(wanted)
    assert all([number for number, _ in found] == list(range(5)) for _, found in finished)
