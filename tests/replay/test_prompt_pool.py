# SPDX-License-Identifier: Apache-2.0
"""Draws without replacement from a set that changes."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from tba_jax.replay.draws import PromptPool

OPERATIONS = st.lists(
    st.tuples(st.sampled_from(["add", "discard", "draw", "recycle"]), st.integers(0, 7)),
    max_size=60,
)


@given(OPERATIONS)
def test_no_prompt_is_drawn_twice_in_an_epoch_whatever_changes(operations):
    rng = np.random.default_rng(0)
    pool, members, left = PromptPool(), set(), set()
    for name, prompt_id in operations:
        if name == "add":
            if prompt_id not in members:
                left.add(prompt_id)
            members.add(prompt_id)
            pool.add(prompt_id)
        elif name == "discard":
            members.discard(prompt_id)
            left.discard(prompt_id)
            pool.discard(prompt_id)
        elif name == "recycle":
            left = set(members)
            pool.recycle()
        else:
            drawn = pool.draw(rng, ())
            assert drawn in left if left else drawn is None
            left.discard(drawn)
        assert sorted(pool.ids) == sorted(members)
        assert set(pool.ids[: pool.num_left]) == left


def test_what_was_set_aside_comes_back_in_the_same_epoch():
    rng = np.random.default_rng(1)
    pool = PromptPool([1, 2, 3], 3)
    assert pool.draw(rng, {1, 2}) == 3
    assert pool.draw(rng, {1, 2}) is None
    pool.discard(2)
    pool.give_back()
    assert pool.draw(rng, ()) == 1
    assert pool.draw(rng, ()) is None


def test_every_order_of_an_epoch_is_equally_likely():
    """Chi-square over the 6 orders of 3 prompts, 6,000 epochs.

    With 5 degrees of freedom a statistic above 30.9 has probability 1e-5 for a correct shuffle;
    the seed is fixed, so it either holds for ever or never.
    """
    rng = np.random.default_rng(2)
    counts = {}
    for _ in range(6000):
        pool = PromptPool([1, 2, 3], 3)  # a used one would hide a bias towards some position
        order = tuple(pool.draw(rng, ()) for _ in range(3))
        counts[order] = counts.get(order, 0) + 1
    assert len(counts) == 6
    assert sum((n - 1000) ** 2 / 1000 for n in counts.values()) < 30.9
