# SPDX-License-Identifier: Apache-2.0
"""Checkpoints: exact, complete or invisible, and clear when damaged."""

import json
import re
import threading
import time

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.devices.cluster import Cluster
from tba_jax.flow.state import PartState, pack_arrays
from tba_jax.run.checkpoint import CheckpointError, Checkpoints, load_host_state
from tba_jax.storage import digests

HOST = {"buffer": PartState({"tokens": np.arange(7)}, {}), "clock": PartState({}, {"elapsed_s": 1})}


def save(workdir, *steps, run_id=""):
    """Checkpoints with these steps, complete."""
    checkpoints = Checkpoints(workdir, run_id=run_id)
    for step in steps:
        checkpoints.save(step, {"w": jnp.arange(2**14, dtype=jnp.float32)}, HOST)
    checkpoints.wait()
    return checkpoints


def flip(file, at):
    data = bytearray(file.read_bytes())
    data[at] ^= 1
    file.write_bytes(data)


def test_a_checkpoint_of_another_run_is_refused(tmp_path):
    checkpoints = save(tmp_path, 12, run_id="f00d")
    assert checkpoints.newest_intact(Cluster()) == 12
    checkpoints.close()
    with pytest.raises(CheckpointError, match="checkpoint 12 is of run f00d.* was copied there"):
        Checkpoints(tmp_path, run_id="beef").newest_intact(Cluster())


@pytest.mark.parametrize("is_divided", [True, False])
def test_train_state_may_be_donated_once_save_has_returned(tmp_path, is_divided):
    mesh = Mesh(np.array(jax.local_devices()), ("fsdp",))
    sharding = NamedSharding(mesh, PartitionSpec("fsdp" if is_divided else None))
    # Large enough for the write to be under way while the steps below run.
    want = np.arange(2**22, dtype=np.float32).reshape(8, -1)
    state = {"w": jax.device_put(want, sharding), "step": jnp.int32(0)}
    step = jax.jit(lambda s: {"w": -s["w"] - 1, "step": s["step"] + 1}, donate_argnums=0)
    target = jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(0, state, HOST)
    for _ in range(3):
        state = jax.block_until_ready(step(state))
    checkpoints.wait()
    restored = checkpoints.read(0, target)
    np.testing.assert_array_equal(restored["w"], want)
    assert restored["w"].sharding == sharding and restored["step"] == 0
    checkpoints.close()


def test_one_flipped_bit_of_any_file_is_named_with_the_remedy(tmp_path, monkeypatch):
    monkeypatch.setattr(digests, "_PIECE", 100)
    with pytest.raises(CheckpointError, match="no complete checkpoint in .*checkpoints: "):
        load_host_state(str(tmp_path))
    checkpoints = save(tmp_path, 10, 20)
    assert checkpoints.damage(20) == checkpoints.damage(10) == []
    folder = tmp_path / "checkpoints" / "20"
    written = json.loads((folder / "digests.json").read_text())["files"]
    weights = max(written, key=lambda name: written[name][0])
    assert weights.startswith("train_state/ocdbt.process_0/d/") and len(written) >= 8
    rng = np.random.default_rng(0)
    for name, (size, digest) in written.items():
        at = int(rng.integers(size))
        flip(folder / name, at)
        (found,) = checkpoints.damage(20)
        assert found.startswith(f"{name} has the digest ") and found.endswith(f", not {digest}")
        flip(folder / name, at)
    (folder / weights).write_bytes((folder / weights).read_bytes() + b"1")
    (found,) = checkpoints.damage(20)
    assert re.match(rf"{weights} has [\d,]+ bytes, not [\d,]+$", found)
    (folder / weights).write_bytes((folder / weights).read_bytes()[:-1])
    flip(folder / weights, 99)
    shares = [checkpoints.damage(20, share=(i, 2)) for i in (0, 1)]
    assert sorted(map(len, shares)) == [0, 1]
    with pytest.raises(CheckpointError, match=f"checkpoints/20 is damaged: {weights} has the dig"):
        checkpoints.newest_intact(Cluster())  # a run calls this before it reads the train state
    flip(folder / weights, 99)
    for at in range(0, (folder / "digests.json").stat().st_size, 5):
        flip(folder / "digests.json", at)
        assert checkpoints.damage(20) or digests.run_of(folder) != "", at
        flip(folder / "digests.json", at)
    (folder / "host_buffer").write_bytes(b"")
    remedy = "20 is damaged: host_buffer has 0 bytes.*Move that folder away.*checkpoints/10"
    with pytest.raises(CheckpointError, match=remedy):
        load_host_state(str(tmp_path))
    checkpoints.close()


def test_storage_that_hangs_ends_the_wait_and_leaves_the_older_checkpoint(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path)
    checkpoints.save(10, {"w": jnp.zeros(2)}, HOST)
    checkpoints.wait()
    may_end = threading.Event()

    def hang(arrays, meta):
        assert may_end.wait(60.0)
        return pack_arrays(arrays, meta)

    monkeypatch.setattr("tba_jax.run.checkpoint.pack_arrays", hang)
    checkpoints.save(20, {"w": jnp.zeros(2)}, HOST)  # returns: written in the background
    start = time.monotonic()
    with pytest.raises(CheckpointError) as caught:
        checkpoints.wait(timeout_s=1.0)
    assert time.monotonic() - start < 20
    assert "checkpoints/20 failed: TimeoutError: not complete after 1 s" in str(caught.value)
    assert "Complete checkpoints: [10]" in str(caught.value)
    assert load_host_state(str(tmp_path))[0] == 10  # an incomplete checkpoint is invisible
    may_end.set()
    checkpoints.wait(timeout_s=30.0)
