# SPDX-License-Identifier: Apache-2.0
"""Programs lowered from shapes are those of a session, and they do not copy the cache.

libtpu compiles them for absent chips.
"""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config, tiny_decoder
from jax.sharding import Mesh

from tba_jax.decoding.requests import SamplingSettings
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


def shapes_of(args):
    return [(x.shape, jnp.dtype(x.dtype)) for x in jax.tree.leaves(args)]


def test_a_session_runs_the_programs_that_were_lowered(monkeypatch):
    """Arguments of a session's programs have the shapes that were lowered, and no others."""
    decoder, programs = lowered(jax.devices()[:1], jnp.float32)
    names = {"extend": "prefill", "copy": "copy", "run_chunk": "chunk"}
    for method, name in names.items():
        wanted, run = shapes_of(programs[name]().in_avals), getattr(decoder, method)

        def checked(*args, wanted=wanted, run=run):
            assert shapes_of(args) == wanted
            return run(*args)

        monkeypatch.setattr(decoder, method, checked)
    found = decoder.decode(
        random_params(CONFIG),
        [np.array([3, 4, 5], np.int32)],
        num_samples=16,
        key=jax.random.key(0),
        settings=SamplingSettings(max_new_tokens=3, top_p=0.5),
    )
    assert len(found[0]) == 16


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
