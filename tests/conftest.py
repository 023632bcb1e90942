# SPDX-License-Identifier: Apache-2.0
"""Settings every test shares: CPU, eight fake devices, no silent rank promotion."""

import os
import shutil
import signal
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
from jaxtyping import install_import_hook

from tba_jax.devices.platform import open_cache

jax.config.update("jax_num_cpu_devices", 8)
jax.config.update("jax_numpy_rank_promotion", "raise")

# beartype checks types and shapes of every call of these modules, which have functions and no
# containers of arrays: a hook would also check the containers, in which JAX puts other objects.
# Loops of the host, such as those of the buffer and of packing, would take twice as long.
CHECKED = (
    "tba_jax.train.losses",
    "tba_jax.train.groups",
    "tba_jax.train.ppo",
    "tba_jax.train.optimizers",
    "tba_jax.train.rounding",
    "tba_jax.flow.layout",
)
install_import_hook(CHECKED, "type_checks.checked")

MAX_CACHED_BYTES = 2 * 2**30
WATCHED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT)


def open_test_cache() -> Path:
    """Keep what tests compile for the next session; return the folder.

    The folder is shared by the workers of a session and by all checkouts of a user. It has no lock,
    which JAX takes together with a scan of all files: a program that is read while another worker
    writes it is compiled again (see `filterwarnings`).
    """
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_CACHE_HOME", str(home / "tba_jax" / "tests"))
        open_cache()
    jax.config.update("jax_compilation_cache_max_size", -1)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
    folder = Path(jax.config.jax_compilation_cache_dir)
    if "PYTEST_XDIST_WORKER" not in os.environ:
        size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
        if size > MAX_CACHED_BYTES:
            shutil.rmtree(folder)
            folder.mkdir()
    return folder


COMPILED = open_test_cache()


@pytest.fixture(scope="session", autouse=True)
def cache_home(tmp_path_factory):
    """The processes that tests start keep nothing in the cache folder of who runs the tests."""
    # Models that were downloaded stay where they are.
    os.environ.setdefault("HF_HOME", str(Path.home() / ".cache/huggingface"))
    os.environ["XDG_CACHE_HOME"] = str(tmp_path_factory.mktemp("cache_home"))


@pytest.fixture(scope="session")
def cache():
    """Return the compilation cache of the processes that the tests start."""
    return COMPILED


@pytest.fixture(autouse=True)
def unchanged_signals():
    """A test leaves the session's signal handlers, some of which ignore their signal.

    A session under nohup whose SIGHUP is no longer ignored ends with its terminal.
    """
    before = {number: signal.getsignal(number) for number in WATCHED}
    yield
    assert {number: signal.getsignal(number) for number in WATCHED} == before


@pytest.fixture
def compiled_once(cache, monkeypatch):
    """The processes that a test starts find what those of other tests have compiled."""
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    monkeypatch.setenv("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
