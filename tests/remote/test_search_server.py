# SPDX-License-Identifier: Apache-2.0
"""The search server accepts each response once, whatever arrives twice, late or fenced."""

import json
import re
from collections import Counter

import numpy as np
import pytest
from fake_rounds import make_commit
from hypothesis import given, settings
from hypothesis import strategies as st

from tba_jax.evaluation.service import EvaluationService
from tba_jax.flow.evaluation_shard import EvaluationShard, Lease
from tba_jax.flow.state import PartState
from tba_jax.remote.channel import NotReady, Unreachable
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
    JoinResponse,
    Response,
    SearcherKey,
    SearcherStart,
    Trace,
    from_json,
    pack_json,
    pack_lease_result,
    pack_put,
    unpack_lease_result,
    unpack_put,
)
from tba_jax.remote.search_channel import search_handlers
from tba_jax.remote.search_server import SearchServer
from tba_jax.remote.searcher_table import Listeners, ServerSettings
from tba_jax.replay.admission import Admission, Demand
from tba_jax.replay.outbox import Outbox

IDENTITY = {"code": "1", "model": "m"}
S = 2  # responses of a ticket


def ticket(slot, number, version=0):
    return make_commit(
        {number: [[5, number + 1], [6]]}, round=number, searcher=slot, version=version
    )


class Figures:
    """An evaluator of five parts, whose figures are their numbers and who did them."""

    num_shards = 5

    def shard(self, params, number, station=0):
        return part_of(number, params)

    def merge(self, parts):
        return sorted((part.first, part.texts[0][0]) for part in parts)


def part_of(number, who):
    return EvaluationShard(number, [[[1]]], [[True]], [[who]], [[1.0]], {}, [[False]], {})


class House:
    """A trainer's side with a clock of its own; `restore` makes the next one from a checkpoint."""

    def __init__(self, num_searchers=2, *, max_staleness=0, outbox_bytes=2**20, prompts=4):
        self.now, self.lines = 0.0, []
        self.outboxes = {slot: Outbox(outbox_bytes) for slot in range(num_searchers)}
        self.demand = Demand(prompts, 1.0, max_staleness, 1)
        self.epoch = 0
        self.taken, self.saved = [], None
        self.events, self.num_chunks = [], dict.fromkeys(range(num_searchers), 0)
        self.given = []
        self.open_server()
        self.save()

    def open_server(self):
        self.epoch += 1
        unmerged = sum(outbox.num_groups for outbox in self.outboxes.values())
        self.admission = Admission(self.demand, list(self.outboxes), unmerged)
        self.service = EvaluationService(Figures(), lambda: self.now)
        self.server = SearchServer(
            ServerSettings(str(self.epoch), IDENTITY, S, heartbeat_timeout_s=10.0, max_tickets=4),
            self.outboxes,
            self.admission,
            self.service,
            clock=lambda: self.now,
            log=self.lines.append,
            num_chunks=self.num_chunks,
            listeners=Listeners(
                lambda *facts: self.given.append(facts),
                self.events.append,
                self.num_chunks.__setitem__,
            ),
        )

    def request(self, *message):
        return self.server.request_tickets(*message)

    def join(self, *slots, identity=IDENTITY):
        return self.server.join(JoinRequest(slots or (0,), "a", identity))

    def merge(self):
        commits = [c for outbox in self.outboxes.values() for c in outbox.take()]
        self.taken += [(c.searcher, c.round) for c in commits]
        self.admission.update(step=0, version=0, num_merged=len(commits), num_fresh=0)

    def save(self):
        states = {slot: outbox.state() for slot, outbox in self.outboxes.items()}
        self.saved = states, list(self.taken), list(self.events), dict(self.num_chunks)

    def restore(self):
        states, self.taken = self.saved[0], list(self.saved[1])
        self.events, self.num_chunks = list(self.saved[2]), dict(self.saved[3])
        for slot, (arrays, meta) in states.items():
            self.outboxes[slot].restore(PartState(arrays, json.loads(json.dumps(meta))))
        self.open_server()

    def check(self):
        """Each response counts once, each ticket once, and admission counts the open tickets."""
        pending = Counter()
        generated = lost = 0
        for slot, outbox in self.outboxes.items():
            counts = outbox.counts
            generated, lost = generated + counts.generated, lost + counts.lost
            pending.update({slot: counts.pending})
        assert generated == sum(pending.values()) + S * len(self.taken) + lost
        assert lost >= 0
        assert len(set(self.taken)) == len(self.taken)
        for slot in self.outboxes:
            chunks = [event["chunk"] for event in self.events if event["searcher"] == slot]
            assert chunks == sorted(set(chunks)) and all(n < self.num_chunks[slot] for n in chunks)
        begun = sum(
            len(slot.open_tickets) for slot in self.server._searchers.values() if slot.is_connected
        )
        assert self.admission.num_under_way == begun + sum(
            outbox.num_groups for outbox in self.outboxes.values()
        )


def test_a_repeated_put_is_acknowledged_as_one():
    house = House()
    caller = house.join().starts[0].key
    assert house.request(caller, 2, 0).tickets == (0, 1)
    data = [ticket(0, 0), ticket(0, 1)]
    assert house.server.put(caller, data).status == "ok"
    assert house.server.put(caller, data).status == "duplicate"
    # Half of it is new: the rest of a message whose answer was lost.
    assert house.request(caller, 1, 2).tickets == (2,)
    assert house.server.put(caller, [ticket(0, 1), ticket(0, 2)]).status == "ok"
    house.merge()
    assert house.taken == [(0, 0), (0, 1), (0, 2)]
    assert house.server.metrics()["fleet/duplicates"] == 3
    house.check()


def test_an_older_incarnation_is_fenced_and_its_open_tickets_are_lost():
    house = House()
    zombie = house.join().starts[0].key
    house.request(zombie, 3, 0)
    house.server.put(zombie, [ticket(0, 1)])
    start = house.join().starts[0]
    assert start.key.incarnation == 2
    assert start.position["next_round"] == 0 and [n for n, _ in start.position["ahead"]] == [1]
    assert house.server.put(zombie, [ticket(0, 0)]).status == "fenced"
    assert house.outboxes[0].counts == (6, 2, 4)  # one ticket came, two were lost
    assert house.request(start.key, 3, 0).tickets == (0, 2, 3)
    house.check()


def test_an_unadmitted_ticket_is_refused_and_its_message_leaves_no_trace():
    house = House()
    caller = house.join().starts[0].key
    house.request(caller, 1, 0)
    answer = house.server.put(caller, [ticket(0, 0), ticket(0, 5)])
    assert answer.status == "refused"
    assert answer.reason == (
        "ticket 5 was not admitted for searcher 0, whose open tickets are [0]; request tickets "
        "first"
    )
    assert house.outboxes[0].counts == (0, 0, 0)
    assert "sends responses of searcher 1" in house.server.put(caller, [ticket(1, 0)]).reason
    short = make_commit({0: [[5]]}, round=0)
    assert "has 1 responses, wanted 2" in house.server.put(caller, [short]).reason
    house.check()


def test_searchers_rewind_after_a_restore_and_sample_again():
    house = House()
    caller = house.join().starts[0].key
    house.request(caller, 4, 0)
    house.server.put(caller, [ticket(0, 0)])
    house.save()
    house.server.put(caller, [ticket(0, 1)])
    house.merge()
    house.restore()
    assert house.server.put(caller, [ticket(0, 2)]).status == "rewind"
    assert house.request(caller, 1, 4).status == "rewind"
    start = house.join().starts[0]
    assert start.position["next_round"] == 1
    assert house.request(start.key, 1, 1).tickets == (1,)
    assert house.server.put(start.key, [ticket(0, 1)]).status == "ok"
    house.merge()
    assert house.taken == [(0, 0), (0, 1)]
    house.check()


def test_a_lost_response_is_sent_again():
    house = House()
    caller = house.join().starts[0].key
    assert house.request(caller, 2, 0).tickets == (0, 1)
    assert house.request(caller, 2, 0).tickets == (0, 1)
    assert house.request(caller, 2, 2).tickets == (2, 3)
    assert house.admission.num_under_way == 4


def test_back_pressure_and_admission_hold_searchers_back():
    house = House(max_staleness=1, prompts=2)
    first, second = (start.key for start in house.join(0, 1).starts)
    new = Heartbeat(version=0)
    given = [house.request(caller, 4, 0, new).tickets for caller in (first, second)]
    assert sum(map(len, given)) == house.admission.limit == 4
    full = House(outbox_bytes=1)
    caller = full.join().starts[0].key
    full.request(caller, 2, 0)
    full.server.put(caller, [ticket(0, 0)])
    assert full.request(caller, 2, 2).tickets == ()
    full.merge()
    assert full.request(caller, 2, 2).tickets == (2, 3)


def test_the_staleness_bound_counts_from_the_weights_of_the_searcher():
    house = House(max_staleness=2, prompts=2)
    behind, ahead = (start.key for start in house.join(0, 1).starts)
    house.admission.update(step=4, version=4, num_merged=0, num_fresh=0)
    house.server.set_version(4)
    assert house.request(behind, 4, 0, Heartbeat(version=3)).tickets == (0, 1, 2, 3)
    assert house.request(behind, 8, 4, Heartbeat(version=3)).tickets == ()
    assert house.request(ahead, 4, 0, Heartbeat(version=4)).tickets == (0,)  # one is kept
    house.server.put(behind, [ticket(0, 0, version=4)])  # it began with what came meanwhile
    house.check()


def test_a_searcher_whose_process_ended_is_lost_at_once():
    house = House()
    caller, _ = (start.key for start in house.join(0, 1).starts)
    house.request(caller, 2, 0)
    for reason in ("", "its machine is gone"):  # the second report is of a known loss
        house.server.lose_host([0], reason)
        metrics = house.server.metrics()
        assert metrics["fleet/searchers"] == metrics["fleet/searchers_lost"] == 1
        assert house.outboxes[0].counts.lost == 4 and house.admission.num_under_way == 0
        assert " is lost" not in house.lines[-1]
    assert not house.server.lose_silent_searchers()
    house.join(0)
    metrics = house.server.metrics()
    assert metrics["fleet/searchers"] == 2 and metrics["fleet/joins"] == 3
    assert metrics["fleet/searchers_lost"] == 1
    house.server.lose_host([1], "its machine is gone")
    assert house.lines[-1] == "searcher 1 on a is lost: its machine is gone"
    house.check()


def test_a_silent_searcher_is_lost_until_its_next_message():
    house = House()
    caller, other = (start.key for start in house.join(0, 1).starts)
    house.request(caller, 2, 0)
    for _ in range(6):
        house.now += 2.0
        house.request(other, 0, 0)
        house.server.lose_silent_searchers()
    assert house.outboxes[0].counts.lost == 4 and house.admission.num_under_way == 0
    assert house.lines[-1] == (
        "searcher 0 on a is lost: no message for 12 s. Its 2 open tickets are sampled again when "
        "the searcher is back"
    )
    assert house.server.metrics()["fleet/searchers"] == 1
    assert house.server.put(caller, [ticket(0, 0)]).status == "ok"  # only the net was slow
    assert house.outboxes[0].counts == (2, 2, 0)
    assert house.lines[-1] == "searcher 0 on a is back after 12 s"
    house.check()


def test_searchers_lease_evaluation_shards_and_leases_of_a_lost_one_are_withdrawn():
    house = House()
    house.service.request(3, ["trainer"])
    first, second = (start.key for start in house.join(0, 1).starts)
    free = Heartbeat(can_evaluate=True)
    assert house.server.gives_leases and house.request(first, 0, 0).lease is None
    assert house.request(first, 0, 0, free).lease == Lease(3, 0)
    assert house.request(first, 0, 0, free).lease == Lease(3, 0)  # the answer was lost
    assert house.request(second, 0, 0, free).lease == Lease(3, 1)
    data = pack_lease_result(second, Lease(3, 1), part_of(1, "second"))
    key, lease, part = unpack_lease_result(data)
    assert key == second and lease == Lease(3, 1)
    assert house.server.return_lease(second, Lease(3, 1), part).status == "ok"
    assert house.server.return_lease(second, Lease(3, 1), part).status == "duplicate"
    for _ in range(6):
        house.now += 2.0
        house.request(second, 0, 0)
        house.server.lose_silent_searchers()
    assert house.request(second, 0, 0, free).lease == Lease(3, 0)  # the first one is silent
    assert house.server.return_lease(first, Lease(3, 0), part_of(0, "first")).status == "duplicate"
    assert (
        house.server.return_lease(second, Lease(3, 0), None).status == "ok"
    )  # its weights are gone
    house.server.stop_leases()
    assert not house.server.gives_leases and house.request(second, 0, 0, free).lease is None
    while house.service.step(0):
        pass
    (finished,) = house.service.poll()
    who = ["trainer", "second", "trainer", "trainer", "trainer"]
    assert finished.evaluation == list(enumerate(who)) and house.service.wanted == ()
    with pytest.raises(ValueError, match="12 bytes of an evaluation shard cannot be read"):
        unpack_lease_result(data[:12])


@pytest.mark.parametrize("jump", [3600.0, -3600.0])
def test_a_clock_jump_loses_no_searcher(jump):
    house = House()
    caller = house.join().starts[0].key
    house.request(caller, 2, 0)
    house.now += jump
    assert not house.server.lose_silent_searchers()
    house.now += 1.0
    assert house.request(caller, 0, 2).status == "ok"
    house.check()


@pytest.mark.parametrize(
    "identity, why",
    [
        (
            {"code": "2", "model": "m"},
            "its code is 2, and the code of the trainer is 1",
        ),
        ({"code": "1"}, r"its model is \(absent\), and the model of the trainer is m"),
    ],
)
def test_a_process_with_other_code_or_model_is_refused(identity, why):
    welcome = House().join(identity=identity)
    assert welcome.starts == ()
    assert re.search(why, welcome.refusal)
    assert "no searcher 7" in House().join(7).refusal


def test_requests_after_the_end_are_answered_ended():
    house = House()
    caller = house.join().starts[0].key
    house.server.close()
    assert house.request(caller, 1, 0).status == "ended"
    assert house.join().refusal == "the run has ended"


def test_searchers_of_a_trainer_that_failed_wait_for_another():
    """Searchers hear of the end of a run that ended; a failed run may continue elsewhere."""
    current = []
    join = search_handlers(lambda: current[-1])["join"]
    request = pack_json(JoinRequest((0,), "a", IDENTITY))
    for fails in (True, False):
        house = House()
        current.append(house.server)
        assert from_json(JoinResponse, json.loads(join(request))).starts
        if fails:
            current.append(None)
            with pytest.raises(NotReady, match="starting, or has failed"):
                join(request)
        else:
            house.server.close()
            assert from_json(JoinResponse, json.loads(join(request))).refusal == "the run has ended"


def test_given_responses_are_tickets_that_need_no_admission():
    """They are the first rounds of a searcher, of any size, and are never lost."""
    house = House(max_staleness=1, prompts=1)
    key = house.server.join(JoinRequest((0,), "a", IDENTITY, ((5, 3),))).starts[0].key
    assert house.given == [(0, 5, 3)]
    assert house.request(key, 4, 0, Heartbeat(version=0)).tickets[:3] == (0, 1, 2)
    house.server.lose_host([0])
    assert house.outboxes[0].counts.lost <= S  # at most the one sampled ticket
    key = house.server.join(JoinRequest((0,), "a", IDENTITY, ((5, 3),))).starts[0].key
    assert house.request(key, 1, 0, Heartbeat(version=0)).tickets == (0,)
    odd = make_commit({7: [[5]]}, round=0, searcher=0)  # one response
    assert house.server.put(key, [odd]).status == "ok"


def test_a_process_without_searchers_learns_when_the_run_has_ended():
    house = House()
    nobody = JoinRequest((), "idle", {})
    assert not house.server.join(nobody).refusal
    house.server.close()
    assert house.server.join(nobody).refusal == "the run has ended"


def test_a_stop_request_of_one_searcher_stops_the_run():
    house = House()
    key = house.join(0).starts[0].key
    assert house.server.absent == [1]
    house.request(key, 0, 0, Heartbeat())
    assert not house.server.wants_stop
    house.request(key, 0, 0, Heartbeat(wants_stop=True))
    assert house.server.wants_stop


def test_commits_come_back_exactly():
    sent = [ticket(0, 3), ticket(0, 4)]
    key = SearcherKey("1", 0, 1)
    trace = Trace(({"event": "chunk", "chunk": 4},), 7)
    found, (first, second), back = unpack_put(pack_put(key, sent, trace))
    assert back == trace
    assert found == key and (first.round, second.round) == (3, 4)
    for before, after in zip(
        sent[0].groups[0].trajectories, first.groups[0].trajectories, strict=True
    ):
        np.testing.assert_array_equal(before.response_tokens, after.response_tokens)
        assert before.version_max == after.version_max
    assert pack_put(*unpack_put(pack_put(key, sent, trace))) == pack_put(key, sent, trace)
    with pytest.raises(ValueError, match="damaged in transit or sent by another version"):
        unpack_put(pack_put(key, sent, trace)[:-40])


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
        self.num_chunks, self.events = start.num_chunks, []
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
                trace=self.trace,
                versions=lambda version, evaluated: None,
                log=self.house.lines.append,
            ),
            clock=lambda: self.house.now,
            timeout_s=1e6,
        )

    def trace(self):
        events, self.events = tuple(self.events), []
        return Trace(events, self.num_chunks)

    def work(self, fate, choice):
        self.wire.fate = fate
        if choice % 4:  # some chunks are worth an event
            self.events.append({"searcher": self.slot, "chunk": self.num_chunks})
        self.num_chunks += 1
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
    house.server.stop_leases()
    while house.service.step(0):
        pass
    assert house.service.is_idle
    finished = house.service.poll()
    assert {f.version for f in finished} >= set(wanted)
    assert all([number for number, _ in f.evaluation] == list(range(5)) for f in finished)


@pytest.mark.parametrize(
    "message",
    [
        JoinRequest((0, 1), "host", {"code": "a"}, ((3, 1), (0, 0))),
        JoinResponse((SearcherStart(SearcherKey("e", 1, 2), {"next_round": 3}, 4),), 5, "", 1.5),
        Response("ok", (1, 2), 3, 0.5, "why", Lease(4, 1), (4, 6)),
        Response("ended"),
        Heartbeat(1.0, (0.1, 0.2), (3, 4), True, 7, True),
    ],
)
def test_messages_come_back_as_they_were(message):
    back = from_json(type(message), json.loads(pack_json(message)))
    assert back == message and type(back) is type(message)
