# SPDX-License-Identifier: Apache-2.0
"""The packed store against plain Python structures."""

import numpy as np
from fake_rounds import assert_same_trajectory, make_prompt, make_trajectory

from tba_jax.replay.store import (
    ID,
    PROMPT_OVERHEAD_BYTES,
    RESPONSE_OVERHEAD_BYTES,
    USES,
    TrajectoryStore,
)


def test_many_inserts_and_removals_agree_with_a_dictionary():
    """6,000 operations: the table grows twice, freed rows are used again, heaps are remade."""
    rng = np.random.default_rng(0)
    store = TrajectoryStore()
    model = {}  # row id -> [trajectory, uses]
    for row_id in range(6000):
        if rng.random() < 0.75 or not model:
            prompt_id, token = int(rng.integers(4)), int(rng.integers(5))
            reward, version = float(rng.integers(2)), int(rng.integers(30, 32))
            y = make_trajectory(prompt_id, [token], reward=reward, version=version)
            store.insert(make_prompt(prompt_id), y, row_id=row_id, merged=row_id // 30)
            model[row_id] = [y, 0]
        else:
            index = store.oldest()
            first_id = min(model, key=lambda i: (model[i][0].version_min, i))
            y, uses = model[first_id]
            row = store.rows[index].item()
            assert (row[ID], row[USES]) == (first_id, uses)
            (back,) = store.trajectories([index], [row])
            assert_same_trajectory(back, y)
            if rng.random() < 0.3:
                assert store.use(np.array([index]))[0][USES] == uses
                model[first_id][1] += 1
            else:
                assert store.remove(index)[ID] == first_id
                del model[first_id]
        assert store.num_trajectories == len(model)
    assert store.count_listed() == len(model) > 1024
    for prompt_id in range(4):
        indices = store.indices(prompt_id)
        rows = store.rows[indices].tolist()
        for row, back in zip(rows, store.trajectories(indices.tolist(), rows), strict=True):
            assert_same_trajectory(back, model[row[ID]][0])
    assert store.sum_versions == sum(y.version_min for y, _ in model.values())
    assert store.sum_rewards == sum(y.reward for y, _ in model.values())
    assert store.sum_uses == sum(uses for _, uses in model.values())
    prompt_bytes = sum(
        make_prompt(p).tokens.nbytes + len(f"prompt {p}") + PROMPT_OVERHEAD_BYTES for p in range(4)
    )
    assert store.num_bytes == len(model) * (8 + RESPONSE_OVERHEAD_BYTES) + prompt_bytes
    while (index := store.oldest()) is not None:
        store.remove(index)
    assert (store.num_trajectories, store.num_bytes, len(store)) == (0, 0, 0)
    assert (store.sum_uses, store.sum_versions) == (0, 0)


def test_a_table_that_grew_holds_no_phantom_rows():
    store = TrajectoryStore()
    for row_id in range(1500):
        y = make_trajectory(1, [row_id], version=1 + row_id)
        store.insert(make_prompt(1), y, row_id=row_id, merged=0)
    assert int(store.rows["id"][store.oldest()]) == 0
    store.remove(store.oldest())
    assert int(store.rows["id"][store.oldest()]) == 1


def test_stale_heap_entries_do_not_pile_up():
    store = TrajectoryStore()
    store.insert(make_prompt(1), make_trajectory(1, [1], version=0), row_id=0, merged=0)
    assert int(store.rows["id"][store.oldest()]) == 0
    for row_id in range(1, 5000):
        # Each replaces the one before, whose entry is behind that of row 0.
        before = store.indices(1)[1:].tolist()
        y = make_trajectory(1, [7], version=1)
        store.insert(make_prompt(1), y, row_id=row_id, merged=0)
        for index in before:
            store.remove(index)
        assert len(store._heap or ()) < 1100
    assert int(store.rows["id"][store.oldest()]) == 0
    store.remove(store.oldest())
    assert int(store.rows["id"][store.oldest()]) == 4999


def test_a_restored_store_has_the_same_sums_to_the_last_bit():
    store = TrajectoryStore()
    for row_id, reward in enumerate((1e16, 1.0, 1.0)):
        y = make_trajectory(1, [row_id], reward=reward)
        store.insert(make_prompt(1), y, row_id=row_id, merged=0)
    store.remove(store.indices(1)[0].item())
    restored = TrajectoryStore.restored(*store.snapshot([1]))
    assert store.sum_rewards != 2.0  # rounding is in it
    assert restored.sum_rewards == store.sum_rewards
    assert restored.num_bytes == store.num_bytes
