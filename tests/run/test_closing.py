# SPDX-License-Identifier: Apache-2.0
"""Closing figures: what became of the work of searchers."""

from fake_rounds import distinct_responses, make_buffer, make_commit

from tba_jax.replay.config import ReplaySettings
from tba_jax.run.conduct import economy_summary


def host(num_prompts, num_batches, **settings):
    """A buffer with one merge of so many prompts, and so many batches of one of them."""
    buffer = make_buffer(recency_prob=1.0, **settings)
    responses = {i: distinct_responses(2) for i in range(num_prompts)}
    buffer.merge([make_commit(responses)], 0)
    for step in range(num_batches):
        buffer.sample(1, 2, step)
    return buffer


def test_the_economy_says_what_became_of_groups():
    buffer = host(6, 1)
    settings = ReplaySettings(recency_prob=1.0)
    # Of six groups one was trained on and five wait for their turn.
    found = economy_summary(buffer.economy, buffer.num_untouched_groups, settings)
    assert found["trained_share"] == 1.0 and found["effective_m"] == 1.0
    assert (found["length_rank"], found["late_share"], found["warnings"]) == (0.5, 0.0, [])
    assert economy_summary(buffer.economy, 0, settings)["trained_share"] == 1 / 6
