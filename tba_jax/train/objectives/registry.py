# SPDX-License-Identifier: Apache-2.0
"""Registry of objectives by name.

A config lists the names without loading JAX; a file is loaded when its objective is used. An
objective may also be a class in a user's file, "path/to/file.py:CLASS".
"""

import dataclasses
import functools
import importlib
import inspect
import os
import traceback
import types
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from tba_jax.settings import (
    GIVEN,
    ConfigError,
    Setting,
    check_all,
    declared,
    import_file,
    is_in_a_file,
    violation,
)

if TYPE_CHECKING:
    from jax import Array

    from tba_jax.train.objectives.base import GroupData, Loss, Objective

# Name -> file of this folder and class.
_OBJECTIVES = {
    "cispo": ("clipped", "Cispo"),
    "dapo": ("clipped", "Dapo"),
    "dr_grpo": ("clipped", "DrGrpo"),
    "grpo": ("clipped", "Grpo"),
    "gspo": ("clipped", "Gspo"),
    "online_dpo": ("online_dpo", "OnlineDpo"),
    "ppo": ("ppo", "Ppo"),
    "proximal_rloo": ("clipped", "ProximalRloo"),
    "reinforce": ("reinforce", "Reinforce"),
    "rloo": ("reinforce", "Rloo"),
    "tb": ("tb", "TrajectoryBalance"),
    "vineppo": ("clipped", "VinePpo"),
}


def objective_names() -> tuple[str, ...]:
    """Return the names of all objectives, in alphabetical order."""
    return tuple(_OBJECTIVES)


def is_objective(name: str) -> bool:
    """Return whether the name is an objective or has the form path/to/file.py:CLASS."""
    return name in _OBJECTIVES or is_in_a_file(name)


def objective_class(name: str) -> "type[Objective]":
    """Import JAX, and return the class of the objective.

    Raises:
        ConfigError: the name is path/to/file.py:CLASS, and that file has no such objective.
    """
    if name in GIVEN:
        return _checked(name, GIVEN[name])
    if is_in_a_file(name):
        path = name.rpartition(":")[0]
        try:
            changed = os.stat(os.path.expanduser(path)).st_mtime_ns
        except OSError as error:
            raise ConfigError(
                f"objective.name={name}: {path} cannot be read ({error.strerror}). Give the path "
                f"from {os.getcwd()}, or an absolute one"
            ) from error
        return _class_of_file(name, changed)
    module, own = _OBJECTIVES[name]
    return getattr(importlib.import_module(f"tba_jax.train.objectives.{module}"), own)


@functools.lru_cache(maxsize=32)
def _class_of_file(name: str, changed: int) -> "type[Objective]":
    """Return the class in a file; the file is loaded again when its time stamp changes."""
    del changed
    path, _, own = name.rpartition(":")
    try:
        found = getattr(import_file(path), own, None)
    except Exception as error:  # a user's file may raise anything; the traceback shows the line
        where = "".join(traceback.format_exception(error)).rstrip()
        raise ConfigError(
            f"objective.name={name}: loading {path} raised {type(error).__name__}: {error}. "
            f"Correct the file.\n{where}"
        ) from error
    return _checked(name, found)


def _checked(name: str, found: Any) -> "type[Objective]":
    """Return the class of a user's objective; refuse a class that cannot be trained."""
    from tba_jax.train.objectives.base import Objective

    own = name.rpartition(":")[2]
    if not (isinstance(found, type) and issubclass(found, Objective)):
        kind = f"there is no {own}" if found is None else f"{own} is {found!r:.60}"
        raise ConfigError(
            f"objective.name={name}: {kind}; wanted a class derived from "
            "tba_jax.train.objectives.base.Objective. docs/objectives.md has an example"
        )
    missing = sorted(found.__abstractmethods__)
    # Only frozen dataclasses have a hash of their values.
    is_frozen = "__dataclass_params__" in vars(found) and found.__hash__ is not None
    if missing or not is_frozen:
        kind = f"{own} lacks {', '.join(missing)}" if missing else f"{own} can be changed"
        raise ConfigError(
            f"objective.name={name}: {kind}; wanted a frozen dataclass with every method. Put "
            "@dataclasses.dataclass(frozen=True) above it. docs/objectives.md has an example"
        )
    try:
        inspect.signature(found.__call__).bind(None, None, None)
    except TypeError as error:
        raise ConfigError(
            f"objective.name={name}: {own} is called with (data, beta), and {error}. Write "
            "def __call__(self, data, beta)"
        ) from error
    return found


def call_objective(objective: "Objective", data: "GroupData", beta: "Array") -> "Loss":
    """Return the loss of a batch.

    Raises:
        ConfigError: an objective of the user raised an error, or did not return a loss.
    """
    from tba_jax.train.objectives.base import Loss

    if type(objective).__module__.startswith("tba_jax."):
        return objective(data, beta)
    own = type(objective).__name__
    try:
        found = objective(data, beta)
    except Exception as error:  # a user's code may raise anything; the traceback shows the line
        where = "".join(traceback.format_exception(error)).rstrip()
        raise ConfigError(
            f"objective.name: {own} raised {type(error).__name__}: {error}. Correct its __call__."
            f"\n{where}"
        ) from error
    if not isinstance(found, Loss):
        raise ConfigError(
            f"objective.name: {own} returned {type(found).__name__}; wanted a "
            "tba_jax.train.objectives.base.Loss. docs/objectives.md has an example"
        )
    return found


def own_settings(name: str) -> tuple[Setting, ...]:
    """Import JAX, and return the settings that an objective declares in its file.

    These settings are the dataclass fields that `settings.field` declares. Their names are
    "objective.NAME", as on the command line.
    """
    return tuple(declared(objective_class(name), "objective."))


def own_names() -> tuple[str, ...]:
    """Import JAX, and return the sorted names of all objectives' own settings."""
    found = {s.name for name in objective_names() for s in own_settings(name)}
    return tuple(sorted(name.removeprefix("objective.") for name in found))


def free_of_behavior() -> tuple[str, ...]:
    """Return the objectives that accept responses of any sampler with their default settings."""
    return tuple(n for n in objective_names() if not objective_class(n)().needs_behavior)


def make_objective(
    name: str, own: Mapping[str, Any] = types.MappingProxyType({}), shared: Any = None
) -> "Objective":
    """Return an objective with these settings.

    Args:
        name: name of the objective.
        own: the objective's own settings by name; settings that are left out keep their defaults.
        shared: settings that every objective has. A dataclass field that is not a setting takes
            the value of the shared setting of the same name.

    Raises:
        ConfigError: the objective lacks one of the settings, or a value has another type.
    """
    made: Any = objective_class(name)
    known = {s.name.removeprefix("objective."): s for s in own_settings(name)}
    check_all(*(functools.partial(_typed, name, known, n, value) for n, value in own.items()))
    values = {n: _typed(name, known, n, value) for n, value in own.items()}
    for entry in dataclasses.fields(made):
        if entry.name not in known and hasattr(shared, entry.name):
            values[entry.name] = getattr(shared, entry.name)
    return made(**values)


def _typed(objective: str, known: Mapping[str, Setting], name: str, value: Any) -> Any:
    """Return the value of an objective's own setting; an int becomes a declared float."""
    has = f"it has {', '.join(known)}" if known else "it has no settings of its own"
    if name not in known:
        raise violation(
            f"objective.{name}",
            value,
            f"objective.name={objective} has no such setting; {has}",
            f"Leave it out, or set --config.objective.{name}=None.",
        )
    type_ = known[name].type
    wanted = str if known[name].choices else type_
    if wanted is float and type(value) is int:
        return float(value)
    if type(value) is not wanted:
        raise violation(
            f"objective.{name}",
            value,
            known[name].rule or f"must be a {known[name].kind}".replace("a True", "True"),
            f"The default is {known[name].default}.",
        )
    return value
