# SPDX-License-Identifier: Apache-2.0
"""Objectives by name: every other file of this folder is one, and its `OBJECTIVE` the class.

Names come from the folder, so that a config can list them without loading jax; a file is loaded
when something about its objective is asked.
"""

import dataclasses
import importlib
import pkgutil
from typing import TYPE_CHECKING, Any

from tba_jax.train import objectives

if TYPE_CHECKING:
    from tba_jax.train.objectives.base import Objective

_SHARED = {"base", "choices", "pieces", "registry", "switches"}
# Where a setting is 0, an objective has a number of its own.
_OWN = {"clip_low", "clip_high", "importance_cap"}


def objective_names() -> tuple[str, ...]:
    """All objectives, in alphabetical order."""
    return tuple(sorted({m.name for m in pkgutil.iter_modules(objectives.__path__)} - _SHARED))


def objective_class(name: str) -> "type[Objective]":
    """The objective of this name."""
    return importlib.import_module(f"{objectives.__name__}.{name}").OBJECTIVE


def free_of_behavior() -> tuple[str, ...]:
    """Objectives that assume nothing of the sampler, as they are by default."""
    return tuple(n for n in objective_names() if not objective_class(n)().needs_behavior)


def make_objective(settings: Any) -> "Objective":
    """The objective `settings.name`; its fields are the settings of the same names.

    Args:
        settings: the section `objective` of a config. A field of the objective that it lacks keeps
            its default, and so does a clip or cap that is 0 there.
    """
    made: Any = objective_class(settings.name)
    names = [field.name for field in dataclasses.fields(made) if hasattr(settings, field.name)]
    values = {name: getattr(settings, name) for name in names}
    return made(**{name: value for name, value in values.items() if value or name not in _OWN})
