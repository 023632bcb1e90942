# SPDX-License-Identifier: Apache-2.0
"""Messages between searchers and the search server come back as they were."""

import json

import numpy as np
import pytest
from fake_search_server import part_of, ticket

from tba_jax.flow.evaluation_shard import Lease
from tba_jax.flow.rounds import DecodeCounts
from tba_jax.remote.messages import (
    Heartbeat,
    JoinRequest,
    JoinResponse,
    Response,
    SearcherKey,
    SearcherStart,
    from_json,
    pack_json,
    pack_put,
    unpack_put,
)


def test_commits_come_back_exactly():
    sent = [ticket(0, 3), ticket(0, 4)]
    key = SearcherKey("1", 0, 1)
    found, (first, second) = unpack_put(pack_put(key, sent))
    assert found == key and (first.round, second.round) == (3, 4)
    for before, after in zip(
        sent[0].groups[0].trajectories, first.groups[0].trajectories, strict=True
    ):
        np.testing.assert_array_equal(before.response_tokens, after.response_tokens)
        assert before.version_max == after.version_max
    assert pack_put(*unpack_put(pack_put(key, sent))) == pack_put(key, sent)
    with pytest.raises(ValueError, match="damaged in transit or sent by another version"):
        unpack_put(pack_put(key, sent)[:-40])


@pytest.mark.parametrize(
    "message",
    [
        JoinRequest((0, 1), "host", {"code": "a"}, ((3, 1), (0, 0))),
        JoinResponse((SearcherStart(SearcherKey("e", 1, 2), {"next_round": 3}),), 5, "", 1.5),
        Response("ok", (1, 2), 3, 0.5, "why", Lease(4, 1), (4, 6)),
        Response("ended"),
        Heartbeat(1.0, (0.1, 0.2), DecodeCounts(3, 4, 5, 6), True, 7, True),
        part_of(1, "second"),
    ],
)
def test_messages_come_back_as_they_were(message):
    back = from_json(type(message), json.loads(pack_json(message)))
    assert back == message and type(back) is type(message)
