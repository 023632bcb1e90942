# SPDX-License-Identifier: Apache-2.0
"""Programs lowered from shapes do not copy the cache; libtpu compiles them for absent chips.

That a run executes these programs is tested in planning/test_plan.py.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import tiny_config, tiny_decoder
from jax.sharding import Mesh

from tba_jax.decoding.shardings import abstract_weights
from tba_jax.devices.site import Site
from tba_jax.planning import chips
from tba_jax.planning.estimates import shard_bytes
from tba_jax.planning.programs import lower_decoder

# As wide as a vector register where it matters: the compiler for TPU pads narrower heads, and then
# the figures below say nothing about the cache.
CONFIG = tiny_config(
    qkv_bias=True,
    hidden_size=64,
    num_heads=8,
    num_kv_heads=4,
    head_dim=128,
    mlp_size=128,
    vocab_size=512,
    max_positions=2048,
)
NEEDS_LIBTPU = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install libtpu)",
)


def lowered(devices, dtype):
    """A decoder, and {name: function that lowers the program} on a mesh of these devices."""
    mesh = Mesh(np.array(devices), ("model",))
    sizes = {"prompt_tokens": 128, "max_length": 1016, "chunk_steps": 8}
    decoder = tiny_decoder(CONFIG, compute_dtype=dtype, site=Site(mesh), **sizes)
    weights = abstract_weights(CONFIG, dtype, mesh)
    return decoder, lower_decoder(decoder, weights, num_slots=16)


@pytest.mark.parametrize(
    ("platform", "num_devices", "names"),
    [
        ("cpu", 1, ["copy", "chunk"]),
        pytest.param("tpu", 1, ["prefill", "copy", "chunk"], marks=NEEDS_LIBTPU),
        pytest.param("tpu", 4, ["prefill", "extend", "copy", "chunk"], marks=NEEDS_LIBTPU),
    ],
)
def test_programs_compile_and_the_cache_is_donated_and_never_copied(platform, num_devices, names):
    devices = jax.devices()
    if platform == "tpu":
        devices = chips.parse_topology("v5e:2x2").devices()
    dtype = jnp.dtype(jnp.bfloat16 if platform == "tpu" else jnp.float32)
    decoder, programs = lowered(devices[:num_devices], dtype)
    size = shard_bytes(decoder.abstract_cache(16))
    # Keys and values, layers, slots, heads, columns, head_dim.
    assert size == 2 * 2 * 16 * 4 * 1024 * 128 * dtype.itemsize / num_devices
    for name in names:
        memory = programs[name]().compile().memory_analysis()
        if name == "copy" or name.startswith("chunk"):
            assert memory.alias_size_in_bytes == size, name
            # Weights, logits and scores of this model are far smaller than half a layer's cache.
            assert memory.temp_size_in_bytes < size / 4, (name, memory.temp_size_in_bytes, size)
