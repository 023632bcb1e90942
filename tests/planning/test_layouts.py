# SPDX-License-Identifier: Apache-2.0
"""Slices and GPU hosts by name, and a placement for each that the chips accept."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tba_jax.config.presets import load as load_preset
from tba_jax.config.rules import validate
from tba_jax.config.schema import replace
from tba_jax.devices.placement import MeshShape, PlacementError
from tba_jax.devices.site import any_device
from tba_jax.models import attention, transformer
from tba_jax.models.hf import families
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import chips, layouts, sizes
from tba_jax.planning.shapes import config_of

RHO, QWEN = "realtreetune/rho-1b-sft-GSM8K", "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e", "expected CHIP:AxB"),
        ("v9:2x2", "unknown chip 'v9'"),
        ("v5p:2x2", "wrong number of axes"),
        ("v5e:2x4@3", "v5e hosts have 1 or 4 or 8"),
        *[(f"h100:{x}", "1 to 8 GPUs; expected h100:GPUS") for x in ("9", "2x2x8", "8@4", "0x8")],
        ("v5p:2x2x4@8", "v5p hosts have 1 or 4"),
    ],
)
def test_a_slice_that_does_not_exist_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        chips.parse_topology(text)


def choose(preset, model, text, **changes):
    topology = chips.parse_topology(text)
    config = replace(load_preset(f"math:{preset}"), changes)
    shape = families.transformer_config(config_of(model))
    return layouts.choose(config, shape, topology.devices(), topology.chip.hbm_bytes)


@pytest.mark.parametrize(
    ("preset", "model", "text", "name", "trainer", "groups", "group"),
    [
        # Hosts of v5e or v6e train all together or not at all.
        ("gsm8k", RHO, "v5e:2x4", "shared", 8, 8, 1),
        ("gsm8k", RHO, "v5e:2x4@8", "split", 4, 4, 1),
        ("gsm8k", RHO, "v5e:1x1", "shared", 1, 1, 1),
        ("math", QWEN, "v5p:2x2x4", "split", 8, 8, 1),
        ("math", QWEN, "v6e:4x4", "shared", 16, 4, 4),
        # One host or all of them; and weights fit on no single chip.
        ("math", QWEN, "v5e:8x8", "shared", 64, 16, 4),
    ],
)
def test_every_slice_gets_a_placement_that_it_accepts(
    preset, model, text, name, trainer, groups, group
):
    pytest.importorskip("libtpu")
    config, choice = choose(preset, model, text)
    assert choice.placement == name
    assert choice.trainer_mesh.devices.size == trainer
    assert choice.num_searchers == groups
    assert choice.searcher_meshes[0].devices.size == group
    # The fields say it: a config with them is placed alike.
    validate(config)
    devices = chips.parse_topology(text).devices()
    assert layouts.place(config, devices).placement == name
    # No host of a pod may search alone.
    if len(devices) > 8:
        hosts = {d.process_index for d in devices}
        assert {d.process_index for d in choice.trainer_mesh.devices.flat} == hosts


def test_judges_that_one_chip_cannot_hold_make_groups_larger():
    pytest.importorskip("libtpu")
    topology = chips.parse_topology("v5e:2x4")
    shape = families.transformer_config(config_of(RHO))
    config, place = load_preset("math:gsm8k"), (topology.devices(), topology.chip.hbm_bytes)
    for held, group in ((lambda n: 2e9, 1), (lambda n: 14e9 / n, 4)):
        _, choice = layouts.choose(config, shape, *place, held)
        assert choice.searcher_meshes[0].devices.size == group


def test_the_configs_own_placement_is_kept_on_several_hosts():
    pytest.importorskip("libtpu")
    config = load_preset("math:math")
    config = replace(config, {"placement": "split"})  # with mesh.fsdp=4, one device of each host
    devices = chips.parse_topology("v5p:2x2x4").devices()
    choice = layouts.place(config, devices)
    assert (choice.placement, choice.num_searchers) == ("split", 4)
    assert choice.trainer_mesh.shape["fsdp"] == 4
    # On v5e four of eight chips are one whole host, and the other would search alone.
    with pytest.raises(PlacementError, match="do not fit .* 2 host.* with 4 .*placement=hosts"):
        layouts.place(config, chips.parse_topology("v5e:2x4").devices())


def test_a_mesh_divides_rows_of_which_at_most_a_fifth_are_empty():
    shape = families.transformer_config(config_of(RHO))

    def mesh(size, hosts=1, **changes):
        given = {f"batch.{name}": value for name, value in changes.items()}
        config = replace(load_preset("math:gsm8k"), given)
        found = sizes.mesh_shape(size, config, shape, hosts)
        return found.fsdp, found.model

    # Seven prompts with twenty responses each, packed and padded; or a row for each of the prompts.
    assert mesh(4) == mesh(4, packed_length=0) == (4, 1) and mesh(8) == (8, 1)
    shared = {"packed_length": 0}
    assert mesh(8, **shared) == (8, 1)  # one of eight
    assert mesh(8, **shared, num_prompts=5) == (2, 4)  # one of six, not three of eight
    # The axis of experts is the config's. It saves no memory: each device has the tokens of all.
    moe = families.transformer_config(config_of("Qwen/Qwen3-30B-A3B"))
    config = load_preset("math:qwen3_30b_a3b")
    assert sizes.mesh_shape(16, config, moe, 2) == MeshShape(fsdp=16)
    config = replace(config, {"mesh.expert": 4})
    assert sizes.mesh_shape(16, config, moe, 2) == MeshShape(fsdp=4, expert=4)
    # Two hosts with rows of their own, which bring as many prompts each.
    assert mesh(8, 2, packed_length=0, num_prompts=6) == (2, 4)


HAS_PLUGIN = any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13))
needs_plugin = pytest.mark.skipif(
    not HAS_PLUGIN, reason="JAX's CUDA plugin is not installed (pip install 'tba_jax[cuda]')"
)
SIZES = {"vocab_size": 256, "hidden_size": 128, "mlp_size": 256, "num_layers": 2, "head_dim": 64}
SMALL = TransformerConfig(**SIZES, num_heads=2, num_kv_heads=1)


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
