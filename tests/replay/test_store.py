# SPDX-License-Identifier: Apache-2.0
"""The packed store against plain Python structures."""

import numpy as np
from fake_rounds import assert_same_trajectory, make_prompt, make_trajectory

from tba_jax.replay.store import ID, RESPONSE_OVERHEAD_BYTES, TrajectoryStore


def test_many_inserts_and_removals_agree_with_a_dictionary():
    """3,000 operations: the table grows twice, freed slots are used again, heaps are remade."""
    rng = np.random.default_rng(0)
    store, model = TrajectoryStore(), {}  # model: (prompt id, token) -> (id, trajectory)
    for row_id in range(6000):
        if rng.random() < 0.75 or not model:
            prompt_id, token = int(rng.integers(4)), int(rng.integers(2500))
            reward, version = float(rng.integers(-5, 5)), int(rng.integers(30))
            y = make_trajectory(prompt_id, [token], reward=reward, version=version)
            replaced = store.insert(make_prompt(prompt_id), y, row_id=row_id, sync=0)
            old = model.pop((prompt_id, token), None)
            assert (replaced is None) == (old is None)
            assert replaced is None or replaced[ID] == old[0]
            model[prompt_id, token] = (row_id, y)
        else:
            field = "reward" if rng.random() < 0.5 else "version_min"
            slot = store.smallest(field)
            key, (first_id, y) = min(
                model.items(), key=lambda item: (getattr(item[1][1], field), item[1][0])
            )
            assert int(store.rows["id"][slot]) == first_id
            slots = [slot]
            (back,) = store.trajectories(slots, store.rows[slots].tolist())
            assert_same_trajectory(back, y)
            assert store.remove(slot)[ID] == first_id
            del model[key]
        assert store.num_trajectories == len(model)
    assert store.count_listed() == len(model) > 1024
    for prompt_id in range(4):
        slots = store.slots(prompt_id)
        for back in store.trajectories(slots.tolist(), store.rows[slots].tolist()):
            assert_same_trajectory(back, model[prompt_id, int(back.response_tokens[0])][1])
    trajectories = [y for _, y in model.values()]
    assert store.sum_versions == sum(y.version_min for y in trajectories)
    assert store.sum_rewards == sum(y.reward for y in trajectories)
    prompt_bytes = sum(make_prompt(p).tokens.nbytes + len(f"prompt {p}") for p in range(4))
    assert store.num_bytes == len(model) * (8 + RESPONSE_OVERHEAD_BYTES) + prompt_bytes
    while (slot := store.smallest("reward")) is not None:
        store.remove(slot)
    assert (store.num_trajectories, store.num_bytes, len(store)) == (0, 0, 0)


def test_a_table_that_grew_holds_no_phantom_rows():
    store = TrajectoryStore()
    for row_id in range(1500):
        y = make_trajectory(1, [row_id], reward=1.0 + row_id)
        store.insert(make_prompt(1), y, row_id=row_id, sync=0)
    assert int(store.rows["id"][store.smallest("reward")]) == 0
    store.remove(store.smallest("reward"))
    assert int(store.rows["id"][store.smallest("reward")]) == 1


def test_stale_heap_entries_do_not_pile_up():
    store = TrajectoryStore()
    store.insert(make_prompt(1), make_trajectory(1, [1], reward=-1.0), row_id=0, sync=0)
    assert int(store.rows["id"][store.smallest("reward")]) == 0
    for row_id in range(1, 5000):
        # Each replaces the one before, whose entry lies above the live smallest one.
        store.insert(make_prompt(1), make_trajectory(1, [7]), row_id=row_id, sync=0)
        assert len(store._heaps.get("reward", ())) < 1100
    assert int(store.rows["id"][store.smallest("reward")]) == 0
    store.remove(store.smallest("reward"))
    assert int(store.rows["id"][store.smallest("reward")]) == 4999


def test_a_restored_store_has_the_same_sums_to_the_last_bit():
    store = TrajectoryStore()
    for row_id, reward in enumerate((1e16, 1.0, 1.0)):
        y = make_trajectory(1, [row_id], reward=reward)
        store.insert(make_prompt(1), y, row_id=row_id, sync=0)
    store.remove(store.slots(1)[0].item())
    restored = TrajectoryStore.restored(*store.snapshot([1]))
    assert store.sum_rewards != 2.0  # rounding is in it
    assert restored.sum_rewards == store.sum_rewards
    assert restored.num_bytes == store.num_bytes
