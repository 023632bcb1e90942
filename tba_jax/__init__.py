# SPDX-License-Identifier: Apache-2.0
"""Trajectory Balance with Asynchrony in JAX. Importing the package imports nothing heavy.

From Python: `load_config` returns a preset with changes, `run_training` trains, and `load_run`
reads the files of a run (docs/python_api.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba_jax.api import SavedRun as SavedRun
    from tba_jax.api import load_config as load_config
    from tba_jax.api import load_run as load_run
    from tba_jax.api import run_training as run_training

__version__ = "0.1.0"

_API = ("SavedRun", "load_config", "load_run", "run_training")


def __getattr__(name: str) -> Any:
    if name in _API:
        from tba_jax import api

        return getattr(api, name)
    raise AttributeError(f"module 'tba_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *_API])
