# SPDX-License-Identifier: Apache-2.0
"""Results of tickets: packed without loss, refused if inconsistent, summarised for the logs."""

import dataclasses
import math

import numpy as np
import pytest
from fake_tickets import make_report, make_result

from tba_jax.flow.state import pack_arrays, unpack_arrays
from tba_jax.flow.tickets import check_result, summarise
from tba_jax.flow.trajectory import Group

ARRAYS = {
    "odd": np.arange(3, dtype=np.uint8),
    "rows": np.arange(6, dtype="<i4").reshape(2, 3),
    "none": np.zeros((0, 4), np.float32),
    "flags": np.array([True, False]),
    "one": np.float64(0.1),
    "values": np.array([np.nan, -0.0, 1e-300]),
}
META = {"text": "zwei\nZeilen", "nested": [1, None, {"a": 0.5}]}


def test_what_was_packed_comes_back_exactly():
    arrays, meta = unpack_arrays(pack_arrays(ARRAYS, META))
    assert meta == META and set(arrays) == set(ARRAYS)
    for name, x in ARRAYS.items():
        got = arrays[name]
        assert (got.dtype, got.shape) == (x.dtype, x.shape), name
        assert got.tobytes() == x.tobytes(), name
    assert unpack_arrays(pack_arrays({}, None)) == ({}, None)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward": math.nan}, "reward is nan; count the response as rejected"),
        ({"prompt_id": 8}, "the response is in the group of prompt 3"),
        ({"response_tokens": np.zeros(0, np.int32)}, "an empty response"),
        (
            {"behavior_token_logprobs": np.zeros(1, np.float32)},
            r"its arrays have \[1\] values for 2 tokens",
        ),
        ({"token_advantages": np.full(2, np.nan, np.float32)}, "token_advantages is not finite"),
        ({"is_sampled": np.zeros(2, bool)}, "no token was sampled"),
    ],
)
def test_a_response_that_would_break_a_step_is_refused(changes, message):
    result = make_result(3)
    check_result(result)
    y, *others = result.group.trajectories
    bad = Group(result.group.prompt, (dataclasses.replace(y, **changes), *others), {})
    with pytest.raises(ValueError, match=f"ticket 3, prompt .*{message}"):
        check_result(result._replace(group=bad))


def test_search_metrics_are_means_over_tickets_and_leave_out_what_is_nan():
    assert summarise([]) == {}
    reports = [
        make_report(reward_mean=0.5, reward_part_a=1.0, environment_s=3.0),
        make_report(reward_mean=math.nan, reward_part_a=2.0),
    ]
    assert summarise(reports) == {
        "search/tickets": 2.0,
        "search/decode_s": 0.5,
        "search/reward_s": 0.25,
        "search/ticket_s": 1.0,
        "search/tokens_per_s": 16.0,
        "search/reward_mean": 0.5,
        "search/reward_part_a": 1.5,
        "search/environment_s": 3.0,
    }
