# SPDX-License-Identifier: Apache-2.0
"""Every program of the decoder compiles for TPU, without one: libtpu compiles for absent chips."""

import functools
import importlib.util
import os

import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import tiny_config
from jax.experimental import topologies
from jax.sharding import Mesh

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.shardings import abstract_weights
from tba_jax.devices.site import Site
from tba_jax.planning.estimates import shard_bytes

pytestmark = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install libtpu)",
)

# As wide as a vector register where it matters: the compiler pads narrower heads, and then the
# figures below say nothing about the cache.
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
SIZES = {"num_slots": 16, "prompt_length": 128, "prefill_prompts": 2}


@functools.cache
def devices(topology):
    # No TPU is looked for, and none is taken from a process that has it.
    os.environ.setdefault("TPU_SKIP_MDS_QUERY", "1")
    os.environ.setdefault("TPU_ACCELERATOR_TYPE", "v5litepod-4")
    os.environ.setdefault("TPU_WORKER_HOSTNAMES", "localhost")
    os.environ.setdefault("ALLOW_MULTIPLE_LIBTPU_LOAD", "1")
    return topologies.get_topology_desc(platform="tpu", topology_name=topology).devices


def compile_all(topology, parts, names=None):
    """{name: memory analysis} of programs on `parts` chips, and the cache bytes of each chip."""
    mesh = Mesh(np.array(devices(topology)[:parts]), ("model",))
    decoder = Decoder(
        CONFIG,
        compute_dtype=jnp.bfloat16,
        eos_ids=(0,),
        pad_id=1,
        prompt_buckets=(128,),
        max_length=1016,
        site=Site(mesh),
    )
    weights = abstract_weights(CONFIG, jnp.bfloat16, mesh)
    programs = decoder.lower_all(weights, **SIZES)
    compiled = {name: programs[name]().compile() for name in names or programs}
    size = shard_bytes(decoder.abstract_cache(SIZES["num_slots"]))
    return {name: program.memory_analysis() for name, program in compiled.items()}, size


def check(topology, parts, names=None):
    """Compile, and see in the compiler's figures that the cache is donated and not copied."""
    memory, size = compile_all(topology, parts, names)
    for name, figures in memory.items():
        if name == "copy" or name.startswith("chunk"):
            assert figures.alias_size_in_bytes == size, name
            # Weights, logits and scores of this model are far smaller than half a layer's cache.
            assert figures.temp_size_in_bytes < size / 4, (name, figures.temp_size_in_bytes, size)


def test_the_decoder_compiles_for_one_tpu():
    check("v5e:2x2", 1, ["prefill", "copy", "chunk"])


def test_the_decoder_compiles_for_a_tensor_parallel_group_of_tpus():
    check("v5e:2x2", 4, ["prefill", "extend", "copy", "chunk_truncated"])
