# SPDX-License-Identifier: Apache-2.0
"""Games of two turns, enumerated: where each balance reaches the soft optimum, and where not."""

import numpy as np
import pytest
from fake_batches import slow

from tba_jax.studies.two_turns import measure

SEEDS = range(10)


@pytest.mark.parametrize(
    ("kind", "balance"),
    [
        ("from context", "episode"),
        slow("from context", "turn"),
        ("random, rewarded", "turn"),
        slow("random", "turn"),
        slow("hidden seed", "turn"),
    ],
)
def test_every_seed_reaches_the_optimum(kind, balance):
    found = measure(kind, balance, SEEDS)
    # float64 after 4,000 steps of Adam: what is left is rounding, and 1e-3 would be a bias.
    assert np.max(np.abs(found.first + found.second)) < 1e-6
    assert np.max(np.abs(found.lost)) < 1e-6


@pytest.mark.parametrize(
    ("kind", "first", "second"),
    [
        ("random, rewarded", 0.003, 0.03),
        slow("random", 0.003, 0.03),
        slow("hidden seed", 0.003, 0.01),
    ],
)
def test_whole_episodes_are_biased_where_observations_do_not_follow_from_the_context(
    kind, first, second
):
    found = measure(kind, "episode", SEEDS)
    assert found.first.mean() > first and found.second.mean() > second
    assert np.min(found.first + found.second) > (0.03 if kind == "random, rewarded" else 1e-3)
    assert found.lost.mean() > 0.01
