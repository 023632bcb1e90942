# SPDX-License-Identifier: Apache-2.0
"""GPU hosts that are not there: arguments, memory of programs, compilation."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tba_jax.config.presets import load as load_preset
from tba_jax.devices.site import any_device
from tba_jax.models import attention, transformer
from tba_jax.models.hf import families
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import chips, layouts
from tba_jax.planning.shapes import config_of

HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
needs_plugin = pytest.mark.skipif(
    not HAS_PLUGIN, reason="JAX's CUDA plugin is not installed (pip install 'tba_jax[cuda]')"
)
SMALL = TransformerConfig(
    vocab_size=256,
    hidden_size=128,
    num_layers=2,
    num_heads=2,
    num_kv_heads=1,
    head_dim=64,
    mlp_size=256,
)


def test_an_argument_names_hosts_of_gpus():
    assert chips.parse_topology("h100:8").shape == (1, 8)
    found = chips.parse_topology("h200:2x8")
    assert found.shape == (2, 8) and found.chip.name == "H200"


@needs_plugin
@pytest.mark.parametrize("shares", [False, True])
def test_packed_rows_have_flash_attention_with_its_gradient(shares):
    """No scores of heads in memory, with and without prompts that several responses see."""
    device = chips.parse_topology("h100:1").devices()[0]
    where = SingleDeviceSharding(device)
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=where),
        transformer.abstract_params(SMALL, jnp.bfloat16),
    )
    rows = jax.ShapeDtypeStruct((2, 384), jnp.int32, sharding=where)

    def loss(params, tokens, segments, contexts):
        shared = (contexts, contexts % 2 > 0) if shares else ()
        states = transformer.apply(
            params,
            tokens,
            tokens,
            segments > 0,
            config=SMALL,
            compute_dtype=jnp.bfloat16,
            visible=attention.packed(segments, *shared),
            sharding=ComputeSharding(SMALL, any_device("cuda")),
        )
        return jnp.sum(states.astype(jnp.float32))

    text = jax.jit(jax.grad(loss)).lower(params, rows, rows, rows).compile().as_text()
    calls = re.findall(r'custom_call_target="(__cudnn\$fmha\w*)"', text)
    assert sorted(calls) == ["__cudnn$fmhaScaleBiasSoftmax", "__cudnn$fmhaScaleBiasSoftmaxBackward"]
    assert not re.search(rf"\[2,{SMALL.num_heads},384,384\]", text)


@needs_plugin
@pytest.mark.parametrize(
    ("text", "preset", "model", "layout", "trainer"),
    [
        ("h100:1", "gsm8k", "realtreetune/rho-1b-sft-GSM8K", "shared", 1),
        ("h100:8", "gsm8k", "realtreetune/rho-1b-sft-GSM8K", "split", 4),
        ("h100:2x8", "math", "Qwen/Qwen2.5-7B", "split", 8),
        ("h200:8", "math", "Qwen/Qwen2.5-7B", "split", 4),
    ],
)
def test_hosts_of_gpus_are_split_freely(text, preset, model, layout, trainer):
    topology = chips.parse_topology(text)
    config = load_preset(f"math:{preset}")
    shape = families.transformer_config(config_of(model))
    _, found = layouts.choose(config, shape, topology.devices(), topology.chip.usable_bytes)
    assert (found.placement, found.trainer_mesh.size) == (layout, trainer)
