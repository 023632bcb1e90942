# SPDX-License-Identifier: Apache-2.0
"""What a program is made for is read off its devices, not off the process."""

import glob
import importlib.util
import os
import sys
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import pytest

from tba_jax.devices.platform import platform_of, prepare_process, step_options


def device(platform, version=""):
    return SimpleNamespace(platform=platform, client=SimpleNamespace(platform_version=version))


@pytest.mark.parametrize(
    ("given", "wanted"),
    [
        (device("tpu"), "tpu"),
        (device("gpu", "PJRT C API\ncuda 13000"), "cuda"),
        (device("gpu", "NVIDIA H100 80GB HBM3"), "cuda"),  # of a topology
        (device("gpu", "AMD Instinct MI300X"), "rocm"),
    ],
)
def test_a_device_has_a_platform(given, wanted):
    assert platform_of(given) == wanted


@pytest.mark.parametrize(("has_files", "expected"), [(False, "cpu"), (True, None)])
def test_libtpu_is_not_loaded_without_an_accelerator(has_files, expected, monkeypatch):
    """Also in a process that has imported JAX before the command begins."""
    monkeypatch.delenv("JAX_PLATFORMS", raising=False)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name == "libtpu")
    monkeypatch.setattr(glob, "glob", lambda pattern: [pattern] if has_files else [])
    config = SimpleNamespace(jax_platforms=None, update=lambda name, x: setattr(config, name, x))
    monkeypatch.setitem(sys.modules, "jax", SimpleNamespace(config=config))
    prepare_process()
    assert os.environ.get("JAX_PLATFORMS") == expected
    assert config.jax_platforms == expected


def test_products_of_wide_models_on_cpu_are_those_of_eigen():
    x = jnp.ones((64, 64))

    def compiled(hidden_size):
        given = step_options(jax.devices()[0], hidden_size)
        return jax.jit(jnp.matmul, compiler_options=given).lower(x, x).compile().as_text()

    assert "ynn" in compiled(511) and "ynn" not in compiled(512)
