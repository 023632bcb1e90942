# SPDX-License-Identifier: Apache-2.0
"""Counts of tokens by layout are those of the batches that the trainer computes."""

import pytest

from tba_jax.bench import row_layouts


@pytest.mark.parametrize(
    ("layout", "expected"),
    [
        ("1 bucket", 4 + 2 * 8),  # a prompt and two responses, in one row
        ("packed 1x", 2 * (4 + 8)),  # a row for each response, with its own copy of the prompt
        ("packed 2x", 2 * (4 + 8)),  # one row of twice that length
    ],
)
def test_tokens_of_full_rows(layout, expected):
    draws = row_layouts.make_draws(1, 2, 4, 8, 1.0)
    assert row_layouts.num_tokens(draws, 1, 2, 4, 8, layout) == expected


def test_short_responses_take_fewer_packed_tokens():
    size = (4, 16, 64, 256)
    draws = row_layouts.make_draws(*size, 0.1)
    tokens = {name: row_layouts.num_tokens(draws, *size, name) for name in row_layouts._LAYOUTS}
    assert tokens["6 buckets"] == tokens["1 bucket"] > 4 * tokens["packed 1x"]
