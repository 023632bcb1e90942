# SPDX-License-Identifier: Apache-2.0
"""Messages between searchers and the owner come back as they were."""

import numpy as np
import pytest
from fake_groups import make_prompt
from fake_tickets import make_result, shard_of

from tba_jax.flow.tickets import DecodeCounts, EvaluationTicket, Ticket
from tba_jax.remote.messages import (
    Demand,
    Heartbeat,
    Response,
    Sender,
    pack_demand,
    pack_put,
    pack_response,
    pack_shard,
    unpack_demand,
    unpack_put,
    unpack_response,
    unpack_shard,
)

SENDER = Sender("e", 3)


def test_requests_come_back_as_they_were():
    demand = Demand(4, 7, [1, 2], True)
    heartbeat = Heartbeat(1.5, DecodeCounts(3, 4, 5, 6), True)
    assert unpack_demand(pack_demand(SENDER, demand, heartbeat)) == (SENDER, demand, heartbeat)
    ticket = EvaluationTicket(4, 8, ())
    shard = shard_of(ticket, "a")
    assert unpack_shard(pack_shard(SENDER, 4, 8, shard)) == (SENDER, ticket, shard)
    assert unpack_shard(pack_shard(SENDER, 4, 8, None)) == (SENDER, ticket, None)


def test_damaged_results_are_refused():
    data = pack_put(SENDER, [make_result(3), make_result(4)])
    sender, found = unpack_put(data)
    assert sender == SENDER and [result.number for result in found] == [3, 4]
    assert pack_put(sender, found) == data
    with pytest.raises(ValueError, match="damaged in transit or sent by another version"):
        unpack_put(data[:-40])


def test_tickets_come_back_with_tokens_columns_and_given_responses():
    given = Ticket(1, make_prompt(5), (np.array([5, 6], np.int32), np.array([7], np.int32)))
    shard = EvaluationTicket(8, 2, (make_prompt(2), make_prompt(3)))
    sent = Response("ok", 3, [4, 6], 0.5, "why", [Ticket(9, make_prompt(4)), shard, given])
    found = unpack_response(pack_response(sent))
    assert found[:-1] == sent[:-1]
    first, second, third = found.tickets
    assert (first.number, first.responses, second[:2]) == (9, (), (8, 2))
    assert [y.tolist() for y in third.responses] == [[5, 6], [7]]
    prompts = [first.prompt, *second.prompts, third.prompt]
    for prompt, wanted in zip(prompts, map(make_prompt, (4, 2, 3, 5)), strict=True):
        assert (prompt.prompt_id, prompt.text) == (wanted.prompt_id, wanted.text)
        assert prompt.columns == wanted.columns
        np.testing.assert_array_equal(prompt.tokens, wanted.tokens)
    assert unpack_response(pack_response(Response("ended"))).status == "ended"
