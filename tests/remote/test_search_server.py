# SPDX-License-Identifier: Apache-2.0
"""The search server accepts each response once, whatever arrives twice, late or fenced."""

import json
import re

import pytest
from fake_rounds import make_commit
from fake_search_server import IDENTITY, House, S, part_of, ticket

from tba_jax.flow.evaluation_shard import Lease
from tba_jax.remote.channel import NotReady
from tba_jax.remote.messages import (
    Heartbeat,
    JoinRequest,
    JoinResponse,
    from_json,
    pack_json,
)
from tba_jax.remote.search_channel import search_handlers


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


def test_back_pressure_and_admission_hold_searchers_back():
    house = House(max_staleness=1, prompts=2)
    first, second = (start.key for start in house.join(0, 1).starts)
    new = Heartbeat(version=0)
    given = [house.request(caller, 4, 0, new).tickets for caller in (first, second)]
    assert sum(map(len, given)) == 4
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
    house.admission.update(step=4, num_merged=0, num_fresh=0)
    house.server.set_version(4)
    assert house.request(behind, 4, 0, Heartbeat(version=3)).tickets == (0, 1, 2, 3)
    assert house.request(behind, 8, 4, Heartbeat(version=3)).tickets == ()
    assert house.request(ahead, 4, 0, Heartbeat(version=4)).tickets == (0, 1)
    house.server.put(behind, [ticket(0, 0, version=4)])  # it began with what came meanwhile
    house.check()


def test_a_searcher_whose_process_ended_is_lost_at_once():
    house = House()
    caller, _ = (start.key for start in house.join(0, 1).starts)
    house.request(caller, 2, 0)
    for _ in range(2):  # the second report is of a known loss
        house.server.lose_host([0])
        metrics = house.server.metrics()
        assert metrics["fleet/searchers"] == metrics["fleet/searchers_lost"] == 1
        assert house.outboxes[0].counts.lost == 4 and house.admission.num_under_way == 0
        assert " is lost" not in house.lines[-1]
    assert not house.server.lose_silent_searchers()
    house.join(0)
    metrics = house.server.metrics()
    assert metrics["fleet/searchers"] == 2 and metrics["fleet/joins"] == 3
    assert metrics["fleet/searchers_lost"] == 1
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
    part = part_of(1, "second")
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
    searcher = house.searchers[0]
    assert (searcher.num_given, searcher.num_given_rounds) == (5, 3)
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
