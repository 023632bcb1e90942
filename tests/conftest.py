# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares: CPU, eight fake devices, no silent rank promotion."""

import os
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# Most of the suite's time is compilation of programs that run for milliseconds.
os.environ["XLA_FLAGS"] = (
    os.environ.get("XLA_FLAGS", "")
    + " --xla_backend_optimization_level=0 --xla_llvm_disable_expensive_passes=true"
)

import jax
import pytest

jax.config.update("jax_num_cpu_devices", 8)
# Commands that are called in this process would keep what all later tests compile.
jax.config.update("jax_enable_compilation_cache", False)
jax.config.update("jax_numpy_rank_promotion", "raise")


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    """The processes that tests start keep nothing in the cache folder of who runs the tests."""
    # Models that were downloaded stay where they are.
    os.environ.setdefault("HF_HOME", str(Path.home() / ".cache/huggingface"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache_home"))


@pytest.fixture(scope="session")
def cache(tmp_path_factory):
    """One compilation cache for all the processes that the tests start."""
    return tmp_path_factory.mktemp("compiled")


@pytest.fixture
def compiled_once(cache, monkeypatch):
    """The processes that a test starts find what those of other tests have compiled."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
