# SPDX-License-Identifier: Apache-2.0
"""Each device gets its own slice of a checkpoint, through two blocks of host memory."""

import json
import os
import socket
import subprocess
import sys
import tracemalloc
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import assert_equal, load_folder, make_folder, shardings_of
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from tba_jax.models import shard_writer, transformer


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))


@pytest.mark.parametrize(
    "rules",
    [
        {"embed": "fsdp"},  # replicated over data
        {"mlp": "fsdp", "heads": ("fsdp",), "kv_heads": "data"},
        {"embed": ("data", "fsdp"), "heads": None},
        {"embed": "fsdp", "heads": "data", "mlp": "data", "kv_heads": "data"},
    ],
    ids=str,
)
@pytest.mark.parametrize("family", ["llama", "gpt_neox"])
def test_a_sharded_load_equals_the_plain_one(tmp_path, mesh, family, rules, monkeypatch):
    # Small enough for several blocks per tensor, the last of them overlapping.
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", 200)
    config, params = make_folder(tmp_path, family=family)
    shardings = shardings_of(config, mesh, rules)
    loaded = load_folder(tmp_path, shardings=shardings)[1]
    assert_equal(loaded, params)
    jax.tree.map(lambda x, sharding: x.sharding == sharding or pytest.fail(), loaded, shardings)


def test_parameters_are_placed_on_the_given_device(tmp_path):
    config, params = make_folder(tmp_path)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    shardings = jax.tree.map(lambda _: where, transformer.abstract_params(config))
    loaded = load_folder(tmp_path, shardings=shardings)[1]
    assert_equal(loaded, params)
    assert all(x.sharding == where for x in jax.tree.leaves(loaded))


def test_without_shardings_arrays_follow_their_users(tmp_path):
    make_folder(tmp_path)
    params = load_folder(tmp_path)[1]
    other = jax.device_put(np.float32(2), jax.devices()[1])
    assert (params["final_norm"] * jnp.broadcast_to(other, 16)).devices() == other.devices()


@pytest.mark.parametrize(
    ("rules", "message"),
    [
        ({"layers": "data"}, r"layers/attn_norm: the sharding divides axis 0 of \[2, 16\]"),
        ({"vocab": "fsdp"}, r"embed of shape \[23, 16\] cannot be divided evenly"),
    ],
)
def test_shardings_that_cannot_be_filled_are_refused(tmp_path, mesh, rules, message):
    config, _ = make_folder(tmp_path)
    with pytest.raises(ValueError, match=message):
        load_folder(tmp_path, shardings=shardings_of(config, mesh, rules))


def test_blocks_are_written_in_place(monkeypatch):
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", 2**12)  # beyond which a shard is a large one
    spec = jax.ShapeDtypeStruct((3, 64, 2, 48), jnp.float32)
    for sharding in (None, NamedSharding(Mesh(jax.devices(), "x"), PartitionSpec(None, "x"))):
        filling = shard_writer.ShardWriter("leaf", spec, sharding)

        def pointers(filling=filling):
            return [s.data.unsafe_buffer_pointer() for s in filling._array.addressable_shards]

        start = pointers()
        filling.put(np.ones((2, 48, 64), np.float32).transpose(2, 0, 1), layer=1)
        assert pointers() == start
        local, order = filling._local, (0, 2, 3, 1)
        block = np.ones((len(start) * 1, 2, 48, 64 // len(start)), np.float32)
        program = shard_writer._write.lower(
            filling._array, block, np.zeros(4, np.int32), order=order, local=local
        ).compile()
        memory = program.memory_analysis()
        assert memory.alias_size_in_bytes == spec.size * 4 // len(start)
        assert memory.temp_size_in_bytes == 0
        array = filling.finish()
        assert array.sum() == 64 * 2 * 48
        # What comes out can be donated in its turn: nothing else holds it.
        array = jax.jit(lambda x: x + 1, donate_argnums=0)(array)
        assert [s.data.unsafe_buffer_pointer() for s in array.addressable_shards] == start


def test_only_its_own_slice_travels_to_a_device(tmp_path, mesh, monkeypatch):
    config, params = make_folder(tmp_path)
    sent = {}
    device_put = jax.device_put

    def spy(x, device, **how):
        sent[device] = sent.get(device, 0) + x.nbytes
        return device_put(x, device, **how)

    monkeypatch.setattr(jax, "device_put", spy)
    load_folder(tmp_path, shardings=shardings_of(config, mesh, {"embed": "fsdp"}))
    # Every leaf has an embed axis.
    total = sum(x.nbytes for x in jax.tree.leaves(params))
    assert sent == dict.fromkeys(jax.devices(), total // 4)


def test_the_host_holds_two_blocks(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", 2**16)
    spec = jax.ShapeDtypeStruct((2, 1024, 1024), jnp.float32)
    np.ones((1024, 1024), np.float16).tofile(tmp_path / "file")
    filling = shard_writer.ShardWriter("leaf", spec, None)
    piece = np.memmap(tmp_path / "file", np.float16, mode="r", shape=(1024, 1024)).T
    filling.put(piece, layer=0)  # compiles
    events, last = [], [None]
    wait, write = jax.block_until_ready, shard_writer._write

    def spy_wait(x):
        events.append(("wait", x is last[0]))
        return wait(x)

    def spy_write(*args, **kwargs):
        events.append(("write", True))
        last[0] = write(*args, **kwargs)
        return last[0]

    monkeypatch.setattr(jax, "block_until_ready", spy_wait)
    monkeypatch.setattr(shard_writer, "_write", spy_write)
    tracemalloc.start()
    filling.put(piece, layer=1)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # Writes may run behind their caller: the last one is waited for before the next.
    assert events[1:] == [("write", True), *[("wait", True), ("write", True)] * 63]
    assert 2**16 <= peak < 2 * 2**16 + 2**14  # the tensor has 2**22 bytes
    assert filling.finish().sum() == spec.size


@pytest.mark.parametrize("is_sharded", [False, True])
def test_a_small_model_is_put_together_on_the_host(tmp_path, mesh, monkeypatch, is_sharded):
    config, params = make_folder(tmp_path)
    shardings = shardings_of(config, mesh, {"embed": "fsdp"}) if is_sharded else None
    for program in ("_zeros", "_write"):
        monkeypatch.setattr(shard_writer, program, lambda *args, **kwargs: pytest.fail("compiled"))
    loaded = load_folder(tmp_path, shardings=shardings)[1]
    assert_equal(loaded, params)


def test_what_was_put_together_on_the_host_can_be_donated():
    spec = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))  # two share each part
    for sharding in (None, NamedSharding(mesh, PartitionSpec("fsdp"))):
        filling = shard_writer.ShardWriter("leaf", spec, sharding)
        filling.put(np.ones((64, 64), np.float32))
        added = jax.jit(lambda x: x + 1, donate_argnums=0)(filling.finish())
        for shard in added.addressable_shards:
            np.testing.assert_array_equal(shard.data, 2)


def test_programs_do_not_multiply_with_layers(tmp_path, monkeypatch):
    monkeypatch.setattr(shard_writer, "BLOCK_BYTES", 32)  # no shard is a small one
    shard_writer._write.clear_cache()
    counts = []
    for num_layers in (3, 6):
        config, _ = make_folder(tmp_path, num_layers=num_layers)
        before = shard_writer._write._cache_size()
        load_folder(tmp_path)
        counts.append(shard_writer._write._cache_size() - before)
    # In a layer: the norms, q, key and value, o, gate and up, down; outside: two whose shapes do
    # not change with the number of layers.
    assert counts == [6 + 2, 6]


LOAD_IN_PROCESSES = """
import sys
import jax
jax.config.update("jax_num_cpu_devices", 4)
jax.distributed.initialize(sys.argv[2], 2, int(sys.argv[3]))
import numpy as np
from jax.sharding import Mesh
from fake_models import random_params, tiny_config
from fake_models import load_folder, shardings_of
from tba_jax.models.hf import hf_weights

config = tiny_config()
whole = random_params(config)
# One leaf belongs to one process alone.
mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
shardings = shardings_of(config, mesh, {"embed": "fsdp", "heads": "data"})
first = jax.sharding.SingleDeviceSharding(jax.devices()[0])
shardings["final_norm"] = first
_, params, hf_config = load_folder(sys.argv[1], shardings=shardings)
shards = jax.tree.map(lambda x: x.addressable_shards, params)
jax.tree.map(
    lambda x, want: [np.testing.assert_array_equal(s.data, want[s.index]) for s in x],
    shards, whole, is_leaf=lambda x: isinstance(x, list),
)
assert len(shards["layers"]["q"]) == 4
assert len(shards["final_norm"]) == 1 - jax.process_index()
params["final_norm"] = whole["final_norm"]
hf_weights.save(sys.argv[1] + "/again", config, params, hf_config)
print("done")
"""


def test_each_process_loads_its_own_part_and_all_save_together(tmp_path):
    config, params = make_folder(tmp_path)
    with socket.socket() as s:
        s.bind(("localhost", 0))
        address = f"localhost:{s.getsockname()[1]}"
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", LOAD_IN_PROCESSES, str(tmp_path), address, str(i)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env=child_environment(),
        )
        for i in range(2)
    ]
    try:
        outputs = [process.communicate(timeout=120) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for out, err in outputs:
        assert out.splitlines()[-1:] == ["done"], err
    assert_equal(load_folder(tmp_path / "again")[1], params)


def child_environment():
    path = os.pathsep.join(str(x) for x in (Path(__file__).parents[1], Path(__file__).parents[2]))
    return os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": path}


def measure_memory(mib, num_devices):
    script = Path(__file__).with_name("loading_memory.py")
    command = [sys.executable, str(script), str(mib), str(num_devices)]
    done = subprocess.run(command, capture_output=True, text=True, env=child_environment())
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("num_devices", [pytest.param(1, marks=pytest.mark.slow), 8])
def test_loading_takes_little_memory_beyond_the_model(num_devices):
    # Measured: 16 MiB on one device, 60 MiB on eight, most of it the compiler's. A loader that
    # held the model would take 256 MiB.
    result = measure_memory(256, num_devices)
    assert result["params_bytes"] >= 256 * 2**20
    assert result["num_samples"] >= 10
    assert 0 < result["growth_bytes"] < 128 * 2**20


@pytest.mark.slow
@pytest.mark.parametrize("num_devices", [1, 8])
def test_loading_two_gib_stays_within_the_bound(num_devices):
    result = measure_memory(2048, num_devices)
    assert result["params_bytes"] == result["checkpoint_bytes"] >= 2**31
    assert result["num_files"] >= 5
    assert result["peak_bytes"] <= 1.5 * result["largest_tensor_bytes"] + 256 * 2**20
