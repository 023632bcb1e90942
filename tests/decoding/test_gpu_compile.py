# SPDX-License-Identifier: Apache-2.0
"""Programs of the decoder compiled for an H100 that is not there, by the plugin of jax[cuda12]."""

import importlib.util
import re

import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import tiny_config
from jax.experimental import topologies
from jax.sharding import Mesh

from tba_jax.decoding import lowering
from tba_jax.decoding.engine import Decoder
from tba_jax.devices.site import Site

pytestmark = pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="the compiler for NVIDIA GPUs is not installed (pip install 'jax[cuda12]')",
)

# XLA's own description of the chip, xla/backends/gpu/target_config/specs/h100_sxm.txtpb.
H100 = """
gpu_device_info {
  threads_per_block_limit: 1024
  threads_per_warp: 32
  shared_memory_per_block: 49152
  shared_memory_per_core: 233472
  threads_per_core_limit: 2048
  core_count: 132
  fpus_per_core: 128
  block_dim_limit_x: 2147483647
  block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000
  l2_cache_size: 52428800
  clock_rate_ghz: 1.98
  device_memory_size: 84978434048
  shared_memory_per_block_optin: 232448
  cuda_compute_capability { major: 9 minor: 0 }
  registers_per_core_limit: 65536
  registers_per_block_limit: 65536
}
platform_name: "CUDA"
dnn_version_info { major: 9 minor: 8 }
device_description_str: "NVIDIA H100 80GB HBM3"
"""
CONFIG = tiny_config(
    qkv_bias=True,
    hidden_size=256,
    num_layers=2,
    num_heads=8,
    num_kv_heads=4,
    head_dim=80,
    mlp_size=512,
    vocab_size=512,
    max_positions=2048,
)
NOT_LAUNCHED = {"parameter", "constant", "get-tuple-element", "tuple", "bitcast"}


def compiled(name):
    """(text, memory analysis, bytes of the cache on a device)."""
    devices = topologies.get_topology_desc(
        platform="cuda", topology_name="", target_config=H100, topology="1x1x1"
    ).devices
    mesh = Mesh(np.array(devices), ("model",))
    decoder = Decoder(
        CONFIG,
        compute_dtype=jnp.bfloat16,
        eos_ids=(0,),
        pad_id=1,
        prompt_buckets=(128,),
        max_length=1016,
        site=Site(mesh),
    )
    weights = lowering.abstract_weights(CONFIG, jnp.bfloat16, mesh)
    sizes = {"num_slots": 16, "prompt_length": 128}
    lower = dict(lowering.lower_all(decoder, weights, **sizes))[name]
    # Nothing can be measured where no GPU is; products are then not cut along their inner axis.
    found = lower().compile({"xla_gpu_autotune_level": 0, "xla_gpu_experimental_force_split_k": 1})
    text, memory = found.as_text(), found.memory_analysis()
    assert text is not None and memory is not None
    return text, memory, decoder.cache_bytes(16)


def launches(text, computation):
    """Operations of a computation that start something on the device."""
    lines = re.search(rf"^%?{re.escape(computation)} .*?\{{$(.*?)^\}}", text, re.M | re.S)
    assert lines, computation
    found = re.findall(r"^  (?:ROOT )?%?\S+ = (?:\(.*?\)|\S+) ([\w-]+)\(", lines[1], re.M)
    return [name for name in found if name not in NOT_LAUNCHED]


def test_prompts_are_admitted_in_place():
    text, memory, cache = compiled("admit")
    assert memory.alias_size_in_bytes == cache and memory.temp_size_in_bytes == 0
    entry = re.search(r"^ENTRY %?(\S+)", text, re.M)
    assert entry and launches(text, f"ENTRY %{entry[1]}") == ["fusion"] * 2 * CONFIG.num_layers
