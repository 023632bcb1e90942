# SPDX-License-Identifier: Apache-2.0
"""Slices by name, and for each a placement that the chips accept and config fields can say."""

import runpy
from pathlib import Path

import pytest

from tba_jax.config import get_field
from tba_jax.models import families
from tba_jax.planning import chips, layouts
from tba_jax.planning.model_shapes import PUBLISHED
from tba_jax.sharding import PlacementError

PRESETS = runpy.run_path(str(Path(__file__).parents[1] / "configs" / "math.py"))
RHO, QWEN = "realtreetune/rho-1b-sft-GSM8K", "Qwen/Qwen2.5-7B"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("v5e", "wanted CHIP:AxB"),
        ("v9:2x2", "no chip 'v9'"),
        ("v5p:2x2", "another number of axes"),
        ("v5e:2x4@3", "hosts have 1, 4 or 8 chips"),
        ("v5p:2x2x4@8", "hosts of v5p have 4 chips"),
    ],
)
def test_a_slice_that_does_not_exist_is_refused_by_name(text, message):
    with pytest.raises(ValueError, match=message):
        chips.parse_topology(text)


def test_hosts_have_four_chips_unless_told_eight():
    pytest.importorskip("libtpu")
    for text, hosts in (("v5e:2x4", 2), ("v5e:2x4@8", 1), ("v5p:2x2x4", 4)):
        devices = chips.parse_topology(text).devices()
        assert len({d.process_index for d in devices}) == hosts, text


def choose(preset, model, text):
    topology = chips.parse_topology(text)
    config = PRESETS["get_config"](preset)
    shape = families.transformer_config(PUBLISHED[model])
    return config, layouts.choose(config, shape, topology.devices(), topology.chip.hbm_bytes)


@pytest.mark.parametrize(
    ("preset", "model", "text", "name", "trainer", "groups", "group"),
    [
        ("gsm8k", RHO, "v5e:2x4", "whole_hosts", 4, 4, 1),
        ("gsm8k", RHO, "v5e:2x4@8", "split", 4, 4, 1),
        ("gsm8k", RHO, "v5e:1x1", "shared", 1, 1, 1),
        ("math", QWEN, "v5p:2x2x4", "per_host", 8, 8, 1),
        # Half of the chips do not hold the state and the copy that is saved.
        ("math", QWEN, "v6e:4x4", "interleaved", 16, 4, 4),
        # One host or all of them; and weights fit on no single chip.
        ("math", QWEN, "v5e:8x8", "interleaved", 64, 16, 4),
    ],
)
def test_every_slice_gets_a_placement_that_it_accepts(
    preset, model, text, name, trainer, groups, group
):
    pytest.importorskip("libtpu")
    config, choice = choose(preset, model, text)
    assert choice.name == name
    assert choice.placement.trainer_mesh.devices.size == trainer
    assert choice.num_groups == groups
    assert choice.placement.searcher_meshes[0].devices.size == group
    assert choice.takes_turns == (name in ("shared", "interleaved"))
    # The fields say it: a config with them is placed alike.
    devices = chips.parse_topology(text).devices()
    assert layouts.place(config, devices)._replace(fields=choice.fields).name == name
    for field, value in choice.fields.items():
        assert get_field(config, field) == value


def test_a_slice_of_several_hosts_wants_a_pod():
    pytest.importorskip("libtpu")
    config = PRESETS["get_config"]("gsm8k")
    with pytest.raises(PlacementError, match="--config.placement=pod"):
        layouts.place(config, chips.parse_topology("v5e:2x4").devices())


def test_a_batch_that_no_mesh_divides_is_named():
    pytest.importorskip("libtpu")
    config = PRESETS["get_config"]("math")
    config.batch.num_prompts = 31  # and 28 heads do not divide over 16 devices
    shape = families.transformer_config(PUBLISHED[QWEN])
    topology = chips.parse_topology("v6e:4x4")
    with pytest.raises(PlacementError, match=r"batch\.num_prompts=16"):
        layouts.choose(config, shape, topology.devices(), topology.chip.hbm_bytes)
