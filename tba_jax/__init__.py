# SPDX-License-Identifier: Apache-2.0
"""Trajectory Balance with Asynchrony in JAX. Importing the package imports nothing heavy.

From Python: `load_config` returns a preset with changes, `run_training` trains, and `load_run`
reads the files of a run (docs/python_api.md).
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tba_jax.api import SavedRun, load_config, load_run, run_training

__version__ = "0.1.0"
__all__ = ("SavedRun", "load_config", "load_run", "run_training")


def __getattr__(name: str) -> Any:
    if name in __all__:
        from tba_jax import api

        return getattr(api, name)
    raise AttributeError(f"module 'tba_jax' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*globals(), *__all__])
