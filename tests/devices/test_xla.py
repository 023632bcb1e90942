# SPDX-License-Identifier: Apache-2.0
"""Options of XLA's compilers: who gets which, and that a compiler without one is named."""

import importlib.util
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import SingleDeviceSharding

from tba_jax.devices import xla
from tba_jax.devices.config import XLA_PRESETS, XlaSettings
from tba_jax.planning import chips
from tba_jax.settings import ConfigError
from tba_jax.train.state import StepShardings
from tba_jax.train.step import _jitted

NEEDS = {
    "v5e:2x2": ("libtpu",),
    "v5p:2x2x1": ("libtpu",),
    "v6e:2x2": ("libtpu",),
    "h100:1": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
    "a100:1": ("jax_cuda12_plugin", "jax_cuda13_plugin"),
}


def options(text, device=None):
    return xla.compiler_options(XlaSettings(text), [device or jax.devices()[0]])


def test_products_of_eigen_on_cpu():
    name = "xla_cpu_experimental_ynn_fusion_type"
    chosen = options("eigen")
    assert list(chosen) == [name]
    x = jnp.ones((64, 64))

    def compiled(given):
        return jax.jit(jnp.matmul, compiler_options=given).lower(x, x).compile().as_text()

    assert "ynn" in compiled({}) and "ynn" not in compiled(chosen)


def test_options_are_those_of_the_platform_and_the_users_come_last():
    assert options("") == options("overlap") == {}  # nothing for a CPU
    given = "xla_cpu_enable_fast_math=True, xla_backend_optimization_level=1"
    found = {"xla_cpu_enable_fast_math": True, "xla_backend_optimization_level": "1"}
    assert options(given) == options(f"overlap, {given}") == found


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "xla_no_such_thing=1",
            "xla_no_such_thing=1': .*No such compile option.*Remove the option",
        ),
        ("xla_cpu_enable_fast_math=perhaps", "'perhaps' is not a valid bool value"),
    ],
)
def test_what_the_compiler_does_not_know_is_one_line(text, message):
    with pytest.raises(ConfigError, match=message) as caught:
        options(text)
    assert "\n" not in str(caught.value)


def test_what_is_no_option_is_refused_with_the_config():
    with pytest.raises(ConfigError, match="config.xla.options.* is neither NAME=VALUE nor one of"):
        XlaSettings(options="xla_cpu_enable_fast_math").check()


def test_the_train_step_is_compiled_with_them():
    where: Any = SingleDeviceSharding(jax.devices()[0])
    given = {"xla_no_such_thing": "1"}
    shardings = StepShardings(where, where, where, where, where, compiler_options=given)
    step: Any = _jitted(lambda state, batch: (state, batch), shardings)
    with pytest.raises(jax.errors.JaxRuntimeError, match="xla_no_such_thing"):
        step.lower(jnp.ones(2), jnp.ones(2)).compile()


@pytest.mark.parametrize("target", NEEDS)
def test_every_compiler_has_the_options_of_its_presets(target):
    if not any(importlib.util.find_spec(name) for name in NEEDS[target]):
        pytest.skip(f"{' or '.join(NEEDS[target])} is not installed")
    device = chips.parse_topology(target).devices()[0]
    assert tuple(xla.PRESETS) == XLA_PRESETS
    for preset in xla.PRESETS:
        assert bool(options(preset, device)) == (preset == "overlap")
    with pytest.raises(ConfigError, match="No such compile option: 'xla_no_such_thing'"):
        options("xla_no_such_thing=1", device=device)
