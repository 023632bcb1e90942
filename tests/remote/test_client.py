# SPDX-License-Identifier: Apache-2.0
"""Clients and owner merge each ticket once in random interleavings of losses."""

import threading

import numpy as np
import pytest
from fake_groups import make_prompt
from fake_tickets import IDENTITY, House, make_result, shard_of
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_jax.flow.tickets import DecodeCounts, EvaluationResult, EvaluationTicket, Ticket
from tba_jax.remote.channel import NotReady, Refused, Rewind, RunEnded, Unreachable
from tba_jax.remote.client import Client
from tba_jax.remote.messages import Heartbeat, Request, Response, decode, encode
from tba_jax.remote.owner import owner_handlers


class Wire:
    """A channel to the current owner; some requests are lost before they arrive, some after."""

    def __init__(self, house):
        self.fate = "arrives"
        self._handlers = owner_handlers(lambda: house.owner)

    def call(self, method, data):
        if self.fate == "lost":
            raise Unreachable("no answer in 10 s")
        try:
            answer = self._handlers[method](data)
        except ValueError as error:
            raise Refused(str(error)) from error
        if self.fate == "answer lost":
            raise Unreachable("no answer in 10 s")
        return answer


class Process:
    """A process of one searcher: it begins what it takes, and ends it in some order."""

    def __init__(self, house, searcher):
        self.house, self.searcher = house, searcher
        self.wire = Wire(house)
        self.is_dismissed = False
        self.client = Client(
            self.wire, "a", timeout_s=1e6, clock=lambda: house.now, log=house.lines.append
        )
        self.join()

    def join(self):
        self.wire.fate = "arrives"
        self.client.join((self.searcher,), IDENTITY)
        self.begun = []

    def work(self, fate, choice):
        """Take and finish tickets; a process whose place was taken ends."""
        client, searcher, free = self.client, self.searcher, max(0, 3 - len(self.begun))
        self.wire.fate = fate
        try:
            for each in [] if self.is_dismissed else client.take(searcher, free, 0):
                if isinstance(each, Ticket):
                    self.begun.append(each.number)
                    continue
                shard = shard_of(each, f"searcher {searcher}") if choice % 5 else None
                client.put(searcher, [EvaluationResult(each.version, each.first, shard)])
            if self.begun and choice % 3 and not self.is_dismissed:
                number = self.begun.pop(choice // 3 % len(self.begun))
                client.put(searcher, [make_result(number, searcher=searcher)])
            if not self.is_dismissed:
                client.beat(searcher, Heartbeat())
        except Rewind:
            self.join()
        except (RunEnded, Refused):
            self.is_dismissed = True


def test_messages_come_back_as_they_were_and_damaged_ones_are_refused():
    ticket = EvaluationTicket(4, 8, ())
    shards = [EvaluationResult(4, 8, shard_of(ticket, "a")), EvaluationResult(4, 9, None)]
    results = (make_result(3), *shards, make_result(4))
    data = encode(Request("p", 1, 2, 3, 4, Heartbeat(1.5, wants_stop=True), results))
    found = decode(data, Request)
    assert encode(found) == data and list(found.results[1:3]) == shards
    assert found.heartbeat == Heartbeat(1.5, wants_stop=True)
    given = Ticket(1, make_prompt(5), (np.array([5, 6], np.int32), np.array([7], np.int32)))
    work = (Ticket(9, make_prompt(4)), given)
    first, second = decode(encode(Response(1, (2,), 0.5, work)), Response).work
    assert (first.number, first.responses) == (9, ()) and second.number == 1
    assert [y.tolist() for y in second.responses] == [[5, 6], [7]]
    for prompt, wanted in zip((first.prompt, second.prompt), map(make_prompt, (4, 5)), strict=True):
        assert (prompt.prompt_id, prompt.text) == (wanted.prompt_id, wanted.text)
        assert prompt.columns == wanted.columns
        np.testing.assert_array_equal(prompt.tokens, wanted.tokens)
    for wrong in (data[:-40], encode(Heartbeat()), b""):
        with pytest.raises(ValueError, match="damaged in transit or sent by another version"):
            decode(wrong, Request)


def test_counts_of_a_lost_request_are_sent_again_and_once():
    house = House(1)
    process = Process(house, 0)
    counts, total = DecodeCounts(4, 3, 2, 1), DecodeCounts()
    for fate in ("lost", "answer lost", "arrives", "arrives"):
        process.client.beat(0, Heartbeat(decoded=counts))
        house.now += 3.0
        process.work(fate, 0)
        total = total.plus(counts)
    assert house.owner.take_decode_counts() == total


def test_an_owner_that_is_slow_for_40_s_is_one_clear_line():
    house = House(1)
    process = Process(house, 0)
    process.work("arrives", 0)
    lines = len(house.lines)
    for _ in range(4):
        house.now += 10.0
        process.work("lost", 0)
    house.now += 1.0
    process.work("arrives", 0)
    process.work("arrives", 1)
    (line,) = house.lines[lines:]
    assert line.startswith("searcher 0 had no response from the trainer for 41 s; its finished")


def test_decoding_continues_while_a_request_hangs():
    house = House(1)
    process, answers = Process(house, 0), threading.Event()
    send = process.wire.call
    process.wire.call = lambda method, data: answers.wait(30.0) and send(method, data)
    house.now += 3.0
    beat = threading.Thread(target=process.client.beat, args=(0, Heartbeat()), daemon=True)
    beat.start()
    assert process.client.take(0, 3, 0) == []  # at once
    assert beat.is_alive()
    answers.set()
    beat.join(10.0)
    house.now += 1.0
    assert [ticket.number for ticket in process.client.take(0, 3, 0)] == [0, 1, 2]


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
