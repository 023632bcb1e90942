# SPDX-License-Identifier: Apache-2.0
"""Closing figures: what became of the work of searchers."""

from fake_groups import distinct_responses, make_buffer, make_groups

from tba_jax.run.conduct import economy_summary


def test_the_economy_says_what_became_of_groups():
    buffer = make_buffer(recency_prob=1.0)
    buffer.merge(make_groups({i: distinct_responses(2) for i in range(6)}), 0)
    buffer.draw(1, 2, 0)
    # Of six groups one was trained on and five wait.
    found = {"trained_share": 1.0, "length_rank": 0.5, "effective_m": 1.0, "warnings": []}
    assert economy_summary(buffer) == found
    buffer.merge(make_groups({7: distinct_responses(2)}), 1)
    assert economy_summary(buffer)["trained_share"] == 1 / 6
