# SPDX-License-Identifier: Apache-2.0
"""The owner: every ticket is merged once, whatever is lost, late or repeated."""

import numpy as np
import pytest
from fake_groups import make_prompt
from fake_tickets import IDENTITY, House, Numbered, S, make_result

from tba_jax.flow.tickets import DecodeCounts, Ticket
from tba_jax.remote import owner as owners
from tba_jax.remote.channel import Rewind
from tba_jax.remote.messages import Mail, encode


def numbers(tickets):
    return [ticket.number for ticket in tickets]


def join(house, *searchers):
    return house.owner.join(searchers, "a", IDENTITY)


def put(house, searcher, *taken, version=0):
    results = [make_result(n, version=version, searcher=searcher) for n in taken]
    house.owner.put(searcher, results)


def lose(house, searcher):
    """The process of a searcher is lost."""
    for place, process in [*house.owner._processes.items()]:
        if searcher in process.searchers:
            house.owner._lose(place)


def test_tickets_are_numbered_prompts_and_a_repeated_result_is_dropped():
    house = House()
    first, second = house.owner.take(0, 2, 0), house.owner.take(1, 3, 0)
    assert (numbers(first), numbers(second)) == ([0, 1], [2, 3, 4])
    assert [ticket.prompt.prompt_id for ticket in second] == [2, 3, 4]
    put(house, 1, 4, 2)
    put(house, 0, 1)
    put(house, 0, 1, 0)  # the answer to the first message was lost
    house.merge()
    assert house.merged == [0, 1, 2, 4] and house.owner.decoded_tokens == 4 * 4
    put(house, 1, 2, 3)
    house.merge()
    assert house.merged == [0, 1, 2, 4, 3]
    assert house.owner.metrics()["fleet/duplicates"] == 2
    house.check()


def test_a_message_that_cannot_be_read_or_has_a_bad_result_leaves_no_trace():
    """The channel answers a ValueError with HTTP 400; any other error would end the run."""
    house = House()
    for handler in house.owner.handlers().values():
        with pytest.raises(ValueError, match="cannot be read .* Install the same version"):
            handler(encode("a"))
    house.owner.take(0, 1, 0)
    with pytest.raises(ValueError, match="ticket 5 was not issued"):
        put(house, 0, 0, 5)
    with pytest.raises(ValueError, match="reward is nan"):
        house.owner.put(0, [make_result(0, rewards={0: [np.nan, 0.0]})])
    assert house.owner.ledger() == {"generated": 0, "waiting": 0, "lost": 0}
    assert not house.owner.take(0, 0, 0) and house.owner.num_under_way == 1


def test_a_silent_process_is_lost_and_must_join_again():
    house = House(3)
    silent, other = join(house, 0), join(house, 1, 2)
    house.owner.join((), "idle", "")  # has no searchers to lose
    house.owner.take(0, 2, 0)
    for number in range(6):
        house.now += 6.0
        house.owner.answer(other, number, False, (Mail(1, idle_s=6.0), Mail(2)))
        house.owner.lose_silent()
    assert house.lines[-1] == ("searchers [0] on a: no message for 36 s; their tickets begin again")
    assert house.owner.absent == [0] and house.owner.ledger()["lost"] == 2 * S
    with pytest.raises(Rewind, match="had no message for too long"):
        house.owner.answer(silent, 0, False, (Mail(0),))
    join(house, 0)
    assert house.owner.absent == [] and house.owner.idle_s == [0.0, 36.0, 0.0]
    assert house.owner.metrics()["fleet/searchers"] == 3
    assert house.owner.metrics()["fleet/joins"] == 4


@pytest.mark.parametrize("num_searchers", [1, 2, 4])
def test_a_restored_owner_continues_for_any_number_of_searchers(num_searchers):
    house = House(prompts=Numbered(long=(1, 6)))
    assert numbers(house.owner.take(0, 5, 0)) == [0, 2, 3, 4, 5]
    put(house, 0, 0, 3)
    house.merge()
    put(house, 0, 5)
    house.owner.beat(1, 3.0, DecodeCounts())
    house.save()
    put(house, 0, 2)  # after the checkpoint
    house.owner.take(1, 4, 0)
    house.num_searchers = num_searchers
    house.restore()
    assert house.owner.ledger() == {"generated": 3 * S, "waiting": S, "lost": 0}
    last = num_searchers - 1
    assert numbers(house.owner.take(last, 4, 0)) == [2, 4, 7, 8]
    put(house, last, 2, 4, 7, 8)
    house.merge()
    assert house.merged == [0, 3, 2, 4, 5, 7, 8]
    assert house.owner.num_skipped == 2 and sum(house.owner.idle_s) == 3.0 * (num_searchers > 1)
    house.check()


def test_as_many_tickets_begin_as_are_allowed_with_the_version_of_the_trainer():
    house = House()
    house.owner.allow(0, -1)
    assert not house.owner.take(0, 4, 0) and house.owner.is_done
    house.owner.allow(5, 3)
    assert not house.owner.take(0, 9, 2) and not house.owner.is_done
    assert numbers(house.owner.take(0, 9, 3)) == [0, 1, 2]  # an equal share
    assert numbers(house.owner.take(1, 9, 3)) == [3, 4]
    put(house, 0, 0, 1, 2, version=3)
    assert not house.owner.take(0, 9, 3)
    join(house, 1)
    lose(house, 1)
    assert numbers(house.owner.take(0, 9, 3)) == [3, 4]
    put(house, 0, 4, 3, version=3)
    assert house.owner.is_done
    house.merge(most=2)
    assert house.merged == [0, 1]  # with an exact lag, in the order of the numbers
    house.merge(most=2)
    assert house.merged == [0, 1, 2, 3]


@pytest.mark.parametrize(
    ("settings", "version", "step", "wanted"),
    [
        ({"max_staleness": 0}, 0, 9, 1000),  # no bound
        ({}, 0, 0, 12),  # three batches of four: used at staleness 0, 1 and 2
        ({}, 6, 7, 8),  # one step since these weights is gone
        ({}, 4, 7, 0),  # it would be late at once
        ({"share": 0.5}, 0, 0, 6),  # half of the slots are replay
        ({"share": 0.1}, 0, 0, 4),  # never less than a batch can need at once
        ({"initial_fill": 40}, 0, 0, 20),
        ({"initial_fill": 40}, 1, 1, 12),
        ({}, -1, 0, 0),  # there are no weights
    ],
)
def test_as_many_are_open_as_the_trainer_takes_within_the_bound(settings, version, step, wanted):
    house = House(**{"max_staleness": 2, **settings})
    house.owner.note_step(step)
    taken = house.owner.take(0, 1000, version)
    assert len(taken) == house.owner.num_under_way == wanted
    if 0 < wanted < 1000:
        put(house, 0, 0, version=version)
        assert not house.owner.take(0, 1000, version)  # open until it is used
        house.merge()
        house.owner.note_step(step)
        assert len(house.owner.take(0, 1000, version)) == 1


def test_too_many_bytes_that_wait_hold_searchers_back(monkeypatch):
    monkeypatch.setattr(owners, "_MOST_BYTES", 1)
    house = House()
    house.owner.take(0, 2, 0)
    put(house, 0, 0)
    assert not house.owner.take(0, 2, 0)
    house.merge()
    assert numbers(house.owner.take(0, 2, 0)) == [2, 3]


def test_given_responses_come_first_and_once():
    given = [Ticket(i, make_prompt(i), (np.array([5], np.int32),)) for i in range(3)]
    house = House(max_staleness=1, num_prompts=1, initial_fill=S, given=given)
    taken = house.owner.take(0, 2, 0)
    assert [len(ticket.responses) for ticket in taken] == [1, 1]
    join(house, 0)
    lose(house, 0)
    taken = house.owner.take(0, 9, 0)
    assert numbers(taken) == [0, 1, 2, 3]
    assert taken[3].prompt.prompt_id == 3 and not taken[3].responses
    put(house, 0, 0, 1, 3)
    assert not house.owner.is_filled
    put(house, 0, 2)
    assert house.owner.is_filled
    house.merge()
    house.save()
    house.given = ()  # a resumed run does not read them again
    house.restore()
    assert house.owner.num_given == 3 and numbers(house.owner.take(0, 1, 0)) == [4]


def test_a_process_without_searchers_waits_for_the_end():
    house = House()
    place = house.owner.join((), "idle", "")
    assert not house.owner.wants_stop and house.owner.absent == [0, 1]
    house.owner.answer(place, 0, True, ())
    assert house.owner.wants_stop
