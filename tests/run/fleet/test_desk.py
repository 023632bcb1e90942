# SPDX-License-Identifier: Apache-2.0
"""Each response once, whatever arrives twice, late, or from whom it should not come any more."""

import contextlib
import json
import re
from collections import Counter

import numpy as np
import pytest
from fake_rounds import make_commit
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_jax.config.schema import make_config
from tba_jax.evaluation.evaluator import Part
from tba_jax.evaluation.service import EvaluationService
from tba_jax.flow.state import PartState
from tba_jax.replay.admission import Admission, Demand
from tba_jax.replay.outbox import Outbox
from tba_jax.run.fleet.desk import Desk
from tba_jax.run.fleet.link import Dismissed, Grants, Link, Loan, Rewind, Unreachable
from tba_jax.run.fleet.messages import Hello, Vitals, decode, decode_part, encode, encode_part
from tba_jax.run.fleet.seats import Terms
from tba_jax.run.fleet.training import TrainerHost, opened
from tba_jax.weights.stored import Stored

IDENTITY = {"code": "1", "model": "m"}
S = 2  # responses of a ticket


def ticket(slot, number, version=0):
    return make_commit(
        {number: [[5, number + 1], [6]]}, round=number, searcher=slot, version=version
    )


class Figures:
    """An evaluator of five parts, whose figures are their numbers and who did them."""

    num_parts = 5

    def part(self, params, number, station=0):
        return part_of(number, params)

    def merge(self, parts):
        return sorted((part.first, part.texts[0][0]) for part in parts)


def part_of(number, who):
    return Part(number, [[[1]]], [[True]], [[who]], [[1.0]], {}, [[False]], {})


class House:
    """A trainer's side with a clock of its own; `restore` makes the next one from a checkpoint."""

    def __init__(
        self,
        num_slots=2,
        *,
        max_staleness=0,
        outbox_bytes=2**20,
        prompts=4,
        stored=lambda version: None,
    ):
        self.now, self.lines, self.stored = 0.0, [], stored
        self.outboxes = {slot: Outbox(outbox_bytes) for slot in range(num_slots)}
        self.demand = Demand(prompts, 1.0, max_staleness, 1)
        self.epoch = 0
        self.taken, self.saved = [], None
        self.open_desk()
        self.save()

    def open_desk(self):
        self.epoch += 1
        unmerged = sum(outbox.num_groups for outbox in self.outboxes.values())
        self.admission = Admission(self.demand, list(self.outboxes), unmerged)
        self.service = EvaluationService(Figures(), lambda: self.now)
        self.desk = Desk(
            Terms(str(self.epoch), IDENTITY, S, silence_s=10.0, num_tickets_ahead=4),
            self.outboxes,
            self.admission,
            self.service,
            clock=lambda: self.now,
            tell=self.lines.append,
            stored=self.stored,
        )

    def sit(self, *slots, identity=IDENTITY):
        return self.desk.join(Hello(slots or (0,), "a", identity))

    def merge(self):
        commits = [c for outbox in self.outboxes.values() for c in outbox.take()]
        self.taken += [(c.searcher, c.round) for c in commits]
        self.admission.update(step=0, version=0, num_merged=len(commits), num_fresh=0)

    def save(self):
        states = {slot: outbox.state() for slot, outbox in self.outboxes.items()}
        self.saved = states, list(self.taken)

    def restore(self):
        states, self.taken = self.saved[0], list(self.saved[1])
        for slot, (arrays, meta) in states.items():
            self.outboxes[slot].restore(PartState(arrays, json.loads(json.dumps(meta))))
        self.open_desk()

    def check(self):
        """Every response under one heading, every ticket once, admission as the slots are."""
        pending = Counter()
        generated = lost = 0
        for slot, outbox in self.outboxes.items():
            counts = outbox.counts
            generated, lost = generated + counts.generated, lost + counts.lost
            pending.update({slot: counts.pending})
        assert generated == sum(pending.values()) + S * len(self.taken) + lost
        assert lost >= 0
        assert len(set(self.taken)) == len(self.taken)
        begun = sum(len(slot.begun) for slot in self.desk._slots.values() if slot.is_there)
        assert self.admission.num_under_way == begun + sum(
            outbox.num_groups for outbox in self.outboxes.values()
        )


def test_a_repeated_put_is_acknowledged_as_one():
    house = House()
    caller = house.sit().seats[0].caller
    assert house.desk.assign(caller, 2, 0).tickets == (0, 1)
    data = [ticket(0, 0), ticket(0, 1)]
    assert house.desk.put(caller, data).verdict == "ok"
    assert house.desk.put(caller, data).verdict == "duplicate"
    # Half of it is new: the rest of a message whose answer was lost.
    assert house.desk.assign(caller, 1, 2).tickets == (2,)
    assert house.desk.put(caller, [ticket(0, 1), ticket(0, 2)]).verdict == "ok"
    house.merge()
    assert house.taken == [(0, 0), (0, 1), (0, 2)]
    assert house.desk.figures()["fleet/duplicates"] == 3
    house.check()


def test_an_older_incarnation_is_fenced_and_what_it_began_is_lost():
    house = House()
    zombie = house.sit().seats[0].caller
    house.desk.assign(zombie, 3, 0)
    house.desk.put(zombie, [ticket(0, 1)])
    seat = house.sit().seats[0]
    assert seat.caller.incarnation == 2
    assert seat.position["next_round"] == 0 and [n for n, _ in seat.position["ahead"]] == [1]
    assert house.desk.put(zombie, [ticket(0, 0)]).verdict == "fenced"
    assert house.outboxes[0].counts == (6, 2, 4)  # one ticket came, two were lost
    assert house.desk.assign(seat.caller, 3, 0).tickets == (0, 2, 3)
    house.check()


def test_a_ticket_that_nobody_gave_out_is_refused_and_nothing_of_its_message_stays():
    house = House()
    caller = house.sit().seats[0].caller
    house.desk.assign(caller, 1, 0)
    answer = house.desk.put(caller, [ticket(0, 0), ticket(0, 5)])
    assert answer.verdict == "refused"
    assert answer.why == (
        "ticket 5 was not given to searcher 0, which has [0]; ask before beginning one"
    )
    assert house.outboxes[0].counts == (0, 0, 0)
    assert "brings responses of 1" in house.desk.put(caller, [ticket(1, 0)]).why
    short = make_commit({0: [[5]]}, round=0)
    assert "has 1 responses, wanted 2" in house.desk.put(caller, [short]).why
    house.check()


def test_a_restored_trainer_has_searchers_rewind_and_draw_again():
    house = House()
    caller = house.sit().seats[0].caller
    house.desk.assign(caller, 4, 0)
    house.desk.put(caller, [ticket(0, 0)])
    house.save()
    house.desk.put(caller, [ticket(0, 1)])
    house.merge()
    house.restore()
    assert house.desk.put(caller, [ticket(0, 2)]).verdict == "rewind"
    assert house.desk.assign(caller, 1, 4).verdict == "rewind"
    seat = house.sit().seats[0]
    assert seat.position["next_round"] == 1
    assert house.desk.assign(seat.caller, 1, 1).tickets == (1,)
    assert house.desk.put(seat.caller, [ticket(0, 1)]).verdict == "ok"
    house.merge()
    assert house.taken == [(0, 0), (0, 1)]
    house.check()


def test_an_answer_that_was_lost_is_given_again():
    house = House()
    caller = house.sit().seats[0].caller
    assert house.desk.assign(caller, 2, 0).tickets == (0, 1)
    assert house.desk.assign(caller, 2, 0).tickets == (0, 1)
    assert house.desk.assign(caller, 2, 2).tickets == (2, 3)
    assert house.admission.num_under_way == 4


def test_back_pressure_and_admission_hold_searchers_back():
    house = House(max_staleness=1, prompts=2)
    first, second = (seat.caller for seat in house.sit(0, 1).seats)
    new = Vitals(version=0)
    given = [house.desk.assign(caller, 4, 0, new).tickets for caller in (first, second)]
    assert sum(map(len, given)) == house.admission.limit == 4
    full = House(outbox_bytes=1)
    caller = full.sit().seats[0].caller
    full.desk.assign(caller, 2, 0)
    assert not full.desk.put(caller, [ticket(0, 0)]).has_room
    assert full.desk.assign(caller, 2, 2).tickets == ()
    full.merge()
    assert full.desk.assign(caller, 2, 2).tickets == (2, 3)


def test_a_bound_counts_from_the_weights_that_a_searcher_has():
    house = House(max_staleness=2, prompts=2)
    behind, ahead = (seat.caller for seat in house.sit(0, 1).seats)
    house.admission.update(step=4, version=4, num_merged=0, num_fresh=0)
    house.desk.ring(4)
    assert house.desk.assign(behind, 4, 0, Vitals(version=3)).tickets == (0, 1, 2, 3)
    assert house.desk.assign(behind, 8, 4, Vitals(version=3)).tickets == ()
    assert house.desk.assign(ahead, 4, 0, Vitals(version=4)).tickets == (0,)  # one is kept
    house.desk.put(behind, [ticket(0, 0, version=4)])  # it began with what came meanwhile
    house.check()


def test_a_searcher_is_told_where_weights_are_until_it_says_that_it_knows():
    stored = {4: Stored(4, ()), 2: Stored(2, ())}
    house = House(stored=stored.get)
    caller = house.sit().seats[0].caller

    def told(**vitals):
        return [each.version for each in house.desk.assign(caller, 0, 0, Vitals(**vitals)).weights]

    assert told() == []  # nothing is published
    house.desk.ring(4)
    assert told() == told() == [4]  # the first answer may be lost
    assert told(told=4) == []
    house.service.request(2, [None])  # an evaluation of an older version
    assert told(told=4, can_evaluate=True) == [2]
    house.desk.ring(6)  # dropped already: what is newer comes with the next word
    assert told(told=4) == []


def test_a_silent_searcher_is_lost_until_it_is_heard_of_again():
    house = House()
    caller, other = (seat.caller for seat in house.sit(0, 1).seats)
    house.desk.assign(caller, 2, 0)
    for _ in range(6):
        house.now += 2.0
        house.desk.assign(other, 0, 0)
        house.desk.sweep()
    assert house.outboxes[0].counts.lost == 4 and house.admission.num_under_way == 0
    assert house.lines[-1] == (
        "searcher 0 on a is lost: nothing heard for 12 s; 2 tickets that it had begun are drawn "
        "again when its slot is filled"
    )
    assert house.desk.figures()["fleet/searchers"] == 1
    assert house.desk.put(caller, [ticket(0, 0)]).verdict == "ok"  # only the net was slow
    assert house.outboxes[0].counts == (2, 2, 0)
    assert house.lines[-1] == "searcher 0 on a is heard of again, after 12 s"
    house.check()


def test_searchers_do_the_parts_of_an_evaluation_and_those_of_a_lost_one_come_back():
    house = House()
    house.service.request(3, ["trainer"])
    first, second = (seat.caller for seat in house.sit(0, 1).seats)
    free = Vitals(can_evaluate=True)
    assert house.desk.lends and house.desk.assign(first, 0, 0).loan is None
    assert house.desk.assign(first, 0, 0, free).loan == (3, 0)
    assert house.desk.assign(first, 0, 0, free).loan == (3, 0)  # the answer was lost
    assert house.desk.assign(second, 0, 0, free).loan == (3, 1)
    part = decode_part(encode_part(part_of(1, "second")))
    assert house.desk.hand_in(second, (3, 1), part).verdict == "ok"
    assert house.desk.hand_in(second, (3, 1), part).verdict == "duplicate"
    for _ in range(6):
        house.now += 2.0
        house.desk.assign(second, 0, 0)
        house.desk.sweep()
    assert house.desk.assign(second, 0, 0, free).loan == (3, 0)  # the first one is silent
    assert house.desk.hand_in(first, (3, 0), part_of(0, "first")).verdict == "duplicate"
    assert house.desk.hand_in(second, (3, 0), None).verdict == "ok"  # its weights are gone
    house.desk.stop_lending()
    assert not house.desk.lends and house.desk.assign(second, 0, 0, free).loan is None
    while house.service.step(0):
        pass
    (finished,) = house.service.poll()
    who = ["trainer", "second", "trainer", "trainer", "trainer"]
    assert finished.evaluation == list(enumerate(who)) and house.service.wanted == ()
    with pytest.raises(ValueError, match="12 bytes of an evaluation cannot be read"):
        decode_part(encode_part(part)[:12])


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_that_jumps_loses_nobody(jump):
    house = House()
    caller = house.sit().seats[0].caller
    house.desk.assign(caller, 2, 0)
    house.now += jump
    assert not house.desk.sweep()
    house.now += 1.0
    assert house.desk.assign(caller, 0, 2).verdict == "ok"
    house.check()


@pytest.mark.parametrize(
    "identity, why",
    [
        ({"code": "2", "model": "m"}, "its code is 2, and the trainer's is 1; install the same"),
        ({"code": "1"}, r"its model is \(absent\), and the trainer's is m"),
    ],
)
def test_a_host_with_other_code_or_model_is_refused_with_a_sentence(identity, why):
    welcome = House().sit(identity=identity)
    assert welcome.seats == ()
    assert re.search(why, welcome.refusal)
    assert "no searcher 7" in House().sit(7).refusal


def test_who_asks_after_the_end_is_told():
    house = House()
    caller = house.sit().seats[0].caller
    house.desk.close()
    assert house.desk.assign(caller, 1, 0).verdict == "over"
    assert house.sit().refusal == "the run has ended"


def test_searchers_of_a_trainer_that_failed_wait_for_another(tmp_path):
    """That the run has ended they are told where it has: some other process may go on with it."""
    host = TrainerHost(make_config(), tmp_path, ())
    for fails in (True, False):
        house = House()
        with contextlib.suppress(LookupError), opened(house.desk, lambda: 1.0, host._open):
            assert host.join(Hello((0,), "a", IDENTITY))[0].seats
            if fails:
                raise LookupError("of a member of its gang")
        if fails:
            with pytest.raises(Unreachable, match="starting, or has failed"):
                host.join(Hello((0,), "a", IDENTITY))
        else:
            assert host.join(Hello((0,), "a", IDENTITY))[0].refusal == "the run has ended"


def test_commits_come_back_exactly():
    sent = [ticket(0, 3), ticket(0, 4)]
    (first, second) = decode(encode(sent))
    assert (first.round, second.round) == (3, 4)
    for before, after in zip(
        sent[0].groups[0].trajectories, first.groups[0].trajectories, strict=True
    ):
        np.testing.assert_array_equal(before.response_tokens, after.response_tokens)
        assert before.version_max == after.version_max
    assert encode(decode(encode(sent))) == encode(sent)
    with pytest.raises(ValueError, match="damaged on the way, or sent by another version"):
        decode(encode(sent)[:-40])


class Wire:
    """Messages to whichever desk there is; some are lost before they arrive, some after."""

    def __init__(self, house):
        self.house, self.fate = house, "arrives"

    def _said(self, say):
        if self.fate == "lost":
            raise Unreachable("no answer in 10 s")
        answer = say()
        if self.fate == "answer lost":
            raise Unreachable("no answer in 10 s")
        return answer

    def assign(self, *message):
        return self._said(lambda: self.house.desk.assign(*message))

    def put(self, *message):
        return self._said(lambda: self.house.desk.put(*message))

    def hand_in(self, *message):
        return self._said(lambda: self.house.desk.hand_in(*message))


class Process:
    """A process that is a searcher: it begins what it is granted, ends it in some order."""

    def __init__(self, house, slot):
        self.house, self.slot = house, slot
        self.wire = Wire(house)
        self.is_dismissed = False
        self.sit()

    def sit(self):
        (seat,) = self.house.desk.join(Hello((self.slot,), "a", IDENTITY)).seats
        self.outbox, self.grants, self.begun = Outbox(2**20), Grants(), []
        self.loan = Loan()
        self.outbox.start_from(seat.position)
        self.next = seat.position["next_round"]
        self.link = Link(
            seat,
            self.wire,
            self.outbox,
            self.grants,
            self.loan,
            room=lambda: 3 - len(self.begun),
            vitals=lambda put_s: Vitals(version=0),
            on_version=lambda version, weights: None,
            clock=lambda: self.house.now,
            patience_s=1e6,
        )

    def work(self, fate, choice):
        self.wire.fate = fate
        while self.grants.admit(self.slot, 0):
            while self.outbox.is_committed(self.next) or self.next in self.begun:
                self.next += 1
            self.begun.append(self.next)
        if self.begun and choice % 3:
            number = self.begun.pop(choice // 3 % len(self.begun))
            self.outbox.put(ticket(self.slot, number))
        if choice % 2 and (asked := self.loan.begin()) is not None:
            could = choice % 5 > 0
            self.loan.end(asked, part_of(asked[1], f"searcher {self.slot}") if could else None)
        try:
            self.link.step()
        except Rewind:
            self.sit()
        except Dismissed:
            self.is_dismissed = True


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
def test_each_response_once_whatever_happens(events):
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
                house.desk.sweep()
        elif kind == "jump":
            house.now += 1e5 * (choice - 2)
        house.check()
    # Whoever is the last of a slot ends everything up to where it is: no ticket was skipped.
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
    house.desk.stop_lending()
    while house.service.step(0):
        pass
    assert house.service.is_idle
    finished = house.service.poll()
    assert {f.version for f in finished} >= set(wanted)
    assert all([number for number, _ in f.evaluation] == list(range(5)) for f in finished)
