# SPDX-License-Identifier: Apache-2.0
"""The frontier of a study: win rates within a divergence budget, and the table's medians."""

import pytest

from tba_jax.studies import frontier


def record(step, kl, win_rate, **more):
    names = {
        "reward_mean": 0.1,
        "gold_reward_mean": 0.5,
        "perplexity": 5.0,
        "perplexity_diluted": 1.3,
        "kl_to_reference": kl,
        "win_rate": win_rate,
    }
    return {"step": step, **{f"eval/{k}": v for k, v in (names | more).items()}}


RUN = [record(0, 0.0, 0.4), record(20, 2.0, 0.6), record(40, 4.0, 0.5), record(60, 1.0, 0.7)]


@pytest.mark.parametrize(
    ("budget", "best"),
    [
        (0.0, 0.4),
        (0.5, 0.45),  # on the way from (0, 0.4) to (2, 0.6)
        (1.0, 0.7),
        (4.0, 0.7),
    ],
)
def test_best_within_a_budget_follows_the_path(budget, best):
    assert frontier.best_within(RUN, budget) == pytest.approx(best)


def test_a_path_that_leaves_and_returns_counts_where_it_crosses():
    run = [record(0, 3.0, 0.9), record(1, 1.0, 0.5)]
    assert frontier.best_within(run, 2.0) == pytest.approx(0.7)


def test_table_and_figure_of_two_variants():
    other = [record(0, 0.0, 0.4), record(20, 1.0, 0.5), record(60, 3.0, 0.6, perplexity=7.0)]
    curves = {"tb": [RUN, other, other], "rloo": [other]}
    lines = frontier.table(curves).splitlines()
    assert lines[2].startswith("| tb | 3 | 60.0 % (60.0, 70.0) | 3.00 | 45.0 % | 50.0 % | 55.0 % |")
    assert lines[2].endswith("| 0.100 | 0.500 | 7.00, 1.300 |")
    assert lines[3].startswith("| rloo | 1 | 60.0 % (60.0, 60.0) |")
    assert frontier.figure(curves).startswith(b"\x89PNG")
