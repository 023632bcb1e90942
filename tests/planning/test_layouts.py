# SPDX-License-Identifier: Apache-2.0
"""Slices by name, and for each a placement that the chips accept and config fields can say."""

import pytest

from tba_jax.config.presets import load as load_preset
from tba_jax.config.rules import validate
from tba_jax.config.schema import replace
from tba_jax.devices.placement import MeshShape, PlacementError
from tba_jax.models.hf import families
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
    for held, group in ((lambda n: 2e9, 1), (lambda n: 14e9 / n, 4)):
        config = load_preset("math:gsm8k")
        devices, hbm = topology.devices(), topology.chip.hbm_bytes
        config, choice = layouts.choose(config, shape, devices, hbm, held)
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
    with pytest.raises(
        PlacementError,
        match="do not fit .* 2 host.* with 4 .*config.placement=hosts",
    ):
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
