# SPDX-License-Identifier: Apache-2.0
"""The benchmark compares the two forms it says it compares; memory at full size by compiling."""

import argparse
import importlib.util
import json

import jax
import pytest
from jax.sharding import SingleDeviceSharding

from tba_jax.bench import logprob as bench
from tba_jax.models.scoring import KEPT_BYTES
from tba_jax.planning import chips

FULL_SIZE = {"d": 2048, "vocab_size": 152_064, "tokens": 2048}


def full_size(dtype):
    sizes = {"vocab_block": 2048, "chunk_tokens": 8192, "kept_bytes": KEPT_BYTES}
    return argparse.Namespace(**FULL_SIZE, dtype=dtype, **sizes)


def test_figures_of_a_small_table(capsys):
    argv = ["--d=32", "--vocab_size=1000", "--tokens=64", "--vocab_block=128", "--repeats=2"]
    assert bench.main([*argv, "--kept_bytes=0", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["vocab_size"] == 1000 and result["repeats"] == 2
    # 64 x 1000 logits against a block of 64 x 128 twice, its rows and the hidden gradient.
    assert 0.1 < result["memory_ratio"] < 0.5
    assert result["temporary_mib"]["naive"] >= 64 * 1000 * 4 / 2**20
    assert result["time_ratio"] > 0 and result["min_time_ratio"] > 0
    assert result["roofline_s"]["fused"] == pytest.approx(4 / 3 * result["roofline_s"]["naive"])
    # float32 sums over 32 and 1,000 terms, values of order 1 to 10.
    assert max(result["max_difference"].values()) < 2e-5


def test_kept_logits_are_made_once(capsys):
    argv = ["--d=32", "--vocab_size=1000", "--tokens=64", "--repeats=1", "--json"]
    logits = 4 * 64 * 1000
    assert bench.main([*argv, f"--kept_bytes={logits}"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["keeps_logits"]
    assert result["roofline_s"]["fused"] == pytest.approx(result["roofline_s"]["naive"])
    # The product, and beside it the logits (that over the temperature) and those of the targets.
    assert logits <= result["temporary_mib"]["fused"] * 2**20 < 3.1 * logits
    assert max(result["max_difference"].values()) < 2e-5
    assert bench.main([*argv, f"--kept_bytes={logits - 1}"]) == 0
    assert not json.loads(capsys.readouterr().out.splitlines()[-1])["keeps_logits"]


def test_a_tenth_of_the_memory_on_cpu():
    memory = bench.temporary_bytes(full_size("float32"), SingleDeviceSharding(jax.devices()[0]))
    assert memory["naive"] >= 4 * FULL_SIZE["tokens"] * FULL_SIZE["vocab_size"]
    assert memory["fused"] <= memory["naive"] / 10


def needs(found, what):
    return pytest.mark.skipif(not found, reason=f"{what} is not installed")


needs_libtpu = needs(importlib.util.find_spec("libtpu"), "libtpu")
needs_plugin = needs(
    any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)), "JAX's CUDA plugin"
)


# In float32 too the TPU compiler rounds the inputs of products, and would keep a rounded table.
@pytest.mark.slow
@pytest.mark.parametrize(
    ("topology", "dtype"),
    [
        pytest.param("v5e:2x2", "float32", marks=needs_libtpu),
        pytest.param("v5e:2x2", "bfloat16", marks=needs_libtpu),
        pytest.param("v5p:2x2x1", "bfloat16", marks=needs_libtpu),
        pytest.param("v6e:2x2", "bfloat16", marks=needs_libtpu),
        pytest.param("h100:1", "bfloat16", marks=needs_plugin),
    ],
)
def test_a_tenth_of_the_memory_on_absent_devices(topology, dtype):
    device = chips.parse_topology(topology).devices()[0]
    memory = bench.temporary_bytes(full_size(dtype), SingleDeviceSharding(device))
    assert memory["fused"] <= memory["naive"] / 10


def test_no_ratio_of_nothing():
    assert bench._ratio({"naive": 0, "fused": 8}) is None
    assert bench._ratio({"naive": 16, "fused": 8}) == 0.5
