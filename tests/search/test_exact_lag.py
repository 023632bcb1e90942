# SPDX-License-Identifier: Apache-2.0
"""An exact lag beside a trainer: whoever is slow, a step's data are as old as they shall be."""

import numpy as np
import pytest
from fake_search import World

from tba_jax.replay.exact_lag import ExactLag, quota_of


def lagged(world, lag, sync_period, quota):
    return ExactLag(lag, sync_period=sync_period, quota=quota, outboxes={3: world.outbox})


def train(world, admission, steps, sync_period, speeds, seen):
    """A trainer that does as the asynchronous driver's, with `speeds` chunks beside each look."""
    step = 0
    while step < steps:
        if step and step % sync_period == 0 and world.version < step:
            if not admission.has_begun(world.version):
                world.run(next(speeds))
                continue
            world.version = step  # published
        if not admission.is_due(step):
            world.run(next(speeds))
            continue
        commits = world.outbox.take_below(admission.due(step))
        if commits:
            seen.append((step, [c.round for c in commits], {c.version for c in commits}))
        world.run(next(speeds))  # searchers go on while a step is made
        step += 1


@pytest.mark.parametrize("sync_period", [1, 3])
@pytest.mark.parametrize("lag", [1, 2, 5])
def test_every_publication_draws_its_quota_and_is_trained_on_so_much_later(lag, sync_period):
    orders = []
    for speed in (0, 1):  # of searchers, as random as threads are
        rng = np.random.default_rng(speed)
        world = World(lambda i, j: 1 + (5 * i + j) % 4, in_flight=False)
        quota = 2 * sync_period
        world.admission = admission = lagged(world, lag, sync_period, quota)
        world.search = world.begin()
        speeds = iter(lambda rng=rng, speed=speed: int(rng.integers(1, 4 + 20 * speed)), None)
        seen = []
        train(world, admission, 6 * sync_period, sync_period, speeds, seen)
        for publication, (step, numbers, versions) in enumerate(seen):
            assert step == publication * sync_period
            assert numbers == list(range(publication * quota, (publication + 1) * quota))
            assert versions == {max(0, publication - lag) * sync_period}
        orders.append(seen)
        assert len(seen) == 6
        # Searchers are ahead by what the lag leaves them, and by no more.
        assert admission.num_committed <= (6 + lag) * quota
    assert orders[0] == orders[1]


def test_what_a_resumed_run_has_to_draw_again_is_drawn_and_no_more():
    world = World(lambda i, j: 9 if i == 1 else 1, in_flight=False)
    world.admission = admission = lagged(world, 1, 1, 2)
    world.search = world.begin()
    world.run(12)
    assert world.outbox.committed[0] == 4 and not admission.admit(3, 0)  # (D + 1) quotas
    assert admission.admit(3, 1) and admission.num_under_way == 5
    # Its ticket 4 was begun and is lost; the run goes on at step 2.
    after = lagged(world, 1, 1, 2)
    assert after.is_due(1) and not after.is_due(2)
    assert not after.has_begun(2)
    begun = [after.admit(3, 2) for _ in range(5)]
    assert begun == [True] * 4 + [False] and after.has_begun(2)


def test_quotas_are_enough_for_all_steps():
    assert quota_of(16, 1, [0]) == 16
    assert quota_of(16, 3, [0, 1, 2, 3, 4]) == 10  # of 48 in all
