# SPDX-License-Identifier: Apache-2.0
"""Closing figures: what became of the work of searchers."""

import types

from fake_rounds import distinct_responses, make_buffer, make_commit

from tba_jax.config.schema import make_config
from tba_jax.replay.admission import Admission, Demand
from tba_jax.replay.config import ReplaySettings
from tba_jax.run.conduct import economy_summary
from tba_jax.run.drivers import diagnostics


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


def test_a_run_says_what_it_wastes_and_which_bound_its_latencies_allow():
    buffer = host(4, 25)
    config = make_config({"replay.max_staleness": 2, "replay.pace": "trainer"})
    run = types.SimpleNamespace(buffer=buffer, config=config)
    admission = Admission(Demand(2, 1.0, 2, 1), [0])
    # 25 slots, and only four groups were new.
    (short,) = diagnostics(run, admission)
    assert short.startswith("0.16 of the slots hold the newest data")
    admission.note_step(2.0)
    for _ in range(4):
        admission.admit(0, 0)
        admission.commit(0, 9.0, 0)
    _, late = diagnostics(run, admission)
    assert late == (
        "100% of responses exceed replay.max_staleness=2 and were trained late (mean latency 4.5 "
        "steps of 2.00 s, 95 % within 4.5). Set --config.replay.max_staleness=6 to cover 95 %"
    )
