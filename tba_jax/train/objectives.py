# SPDX-License-Identifier: Apache-2.0
"""Objectives by name: the settings and needs that a loss function declares.

A loss function is decorated with `objective`. Its keyword arguments are its settings; an argument
annotated with `Annotated[type, About(meaning)]` is documented and has a range. A config lists the
names without loading JAX; a loss is imported when its objective is used.
"""

import dataclasses
import functools
import importlib
import inspect
import os
import traceback
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

from tba_jax.settings import (
    GIVEN,
    ConfigError,
    Setting,
    check_all,
    import_file,
    is_in_a_file,
    need,
    violation,
)

F = TypeVar("F", bound=Callable[..., Any])

# Name -> file of this folder, whose function has that name.
_FILES = {
    "cispo": "losses",
    "dapo": "losses",
    "dr_grpo": "losses",
    "grpo": "losses",
    "gspo": "losses",
    "ipo": "losses",
    "online_dpo": "losses",
    "ppo": "ppo",
    "proximal_rloo": "losses",
    "reinforce": "losses",
    "rloo": "losses",
    "tb": "losses",
    "vineppo": "vineppo",
}


class About(typing.NamedTuple):
    """Meaning and bounds of a setting, as in `settings.field`."""

    meaning: str
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None


@dataclasses.dataclass(frozen=True)
class Needs:
    """What a loss function needs.

    Attributes:
        total: what the sum of the terms is divided by, counted over the batch.
        sampler: any: the loss is right for responses of any sampler; policy: it assumes that the
            sampler is the current policy, so responses of several versions are refused; ratio: it
            reads the sampler's log-probs. Only any accepts responses of no version of the policy.
        beta: positive: the loss divides by beta; any: beta may be 0; unused: beta is not read.
        head: learned head that the loss reads, or "".
        advantages: whether the loss reads advantages that the searcher estimated.
        wrong: (setting, reason) of each setting that contradicts the others.
    """

    total: Literal["prompts", "responses", "tokens"] = "responses"
    sampler: Literal["any", "policy", "ratio"] = "ratio"
    beta: Literal["positive", "any", "unused"] = "any"
    head: Literal["", "log_z", "value"] = ""
    advantages: bool = False
    wrong: tuple[tuple[str, str], ...] = ()


def _setting(name: str, type_: Any, default: Any, about: About) -> Setting:
    bounds = {"at_least": about.at_least, "above": about.above, "at_most": about.at_most}
    full = f"objective.{name}"
    return Setting(full, type_, default, about.meaning, on_resume=False, among=(), **bounds)


# Settings of the step and of searchers that some objectives have: name -> type, default, meaning.
_OF_THE_STEP: Mapping[str, tuple[type, Any, About]] = {
    "epochs": (int, 1, About("passes over each batch", at_least=1)),
    "minibatches": (
        int,
        1,
        About("optimiser updates of a pass, each by an equal part of the batch", at_least=1),
    ),
    "log_z_rate": (
        float,
        1.0,
        About("learning rate of the head of log Z or of values, divided by the policy's", above=0),
    ),
    "log_z_layers": (
        int,
        1,
        About("layers of that head: 1: linear; more: with GELU and LayerNorm", at_least=1),
    ),
    "vine_tokens": (
        int,
        8,
        About("tokens of a response between two states with estimated values", at_least=1),
    ),
    "vine_samples": (
        int,
        4,
        About("continuations per state for the estimate of its value", at_least=1),
    ),
}


def objective(needs: Needs | Callable[..., Needs], also: tuple[str, ...] = ()) -> Callable[[F], F]:
    """Return a decorator that declares what a loss function needs.

    Args:
        needs: its needs; or a function that returns them from the settings, as keywords.
        also: settings of the step that the objective has besides its keyword arguments.
    """

    def declare(loss: F) -> F:
        declared: Any = loss
        declared.needs, declared.also = needs, also
        return loss

    return declare


@dataclasses.dataclass(frozen=True)
class Objective:
    """A loss function with the values of its settings; hashable.

    Attributes:
        name: name of the objective.
        loss: the function.
        settings: (name, value) of every setting, in the order of its declaration.
    """

    name: str
    loss: Callable[..., Any]
    settings: tuple[tuple[str, Any], ...] = ()

    def value(self, setting: str, default: Any = None) -> Any:
        """Return the value of a setting, or the default if the objective lacks it."""
        return dict(self.settings).get(setting, default)

    @functools.cached_property
    def needs(self) -> Needs:
        """Needs of the loss with these settings."""
        found = getattr(self.loss, "needs", Needs())
        return found if isinstance(found, Needs) else found(**dict(self.settings))

    @property
    def num_updates(self) -> int:
        """Optimiser updates per batch."""
        return self.value("epochs", 1) * self.value("minibatches", 1)

    def __call__(self, groups: Any, beta: Any) -> Any:
        """Return the terms of the loss, `groups.Terms`.

        Raises:
            ConfigError: a user's loss raised an error, or did not return one term per response.
        """
        from tba_jax.train.groups import Terms, check_groups

        check_groups(groups)
        also = getattr(self.loss, "also", ())
        given = {n: value for n, value in self.settings if n not in also}
        if self.loss.__module__.startswith("tba_jax."):
            return self.loss(groups, beta, **given)
        try:
            found = self.loss(groups, beta, **given)
        except Exception as error:  # a user's code may raise anything; the traceback shows the line
            where = "".join(traceback.format_exception(error)).rstrip()
            raise ConfigError(
                f"objective.name={self.name} raised {type(error).__name__}: {error}. Correct the "
                f"function.\n{where}"
            ) from error
        terms = found if isinstance(found, Terms) else Terms(found)
        if getattr(terms.loss, "shape", None) != groups.reward.shape:
            got = getattr(terms.loss, "shape", type(terms.loss).__name__)
            raise ConfigError(
                f"objective.name={self.name} returned {got}; wanted one term for each response, "
                f"shape {groups.reward.shape}, or groups.Terms. docs/objectives.md has an example"
            )
        return terms

    def check(self) -> None:
        """Refuse settings outside their ranges, and settings that contradict each other.

        Raises:
            ConfigError: see `settings.need`.
        """
        for setting in own_settings(self.name):
            setting.check(self.value(setting.name.removeprefix("objective.")))
        for name, why in self.needs.wrong:
            default = next(x.default for x in own_settings(self.name) if x.name.endswith(name))
            remedy = f"Set --config.objective.{name}={default}."
            need(False, f"objective.{name}", self.value(name), why, remedy)


def objective_names() -> tuple[str, ...]:
    """Return the names of all objectives, in alphabetical order."""
    return tuple(_FILES)


def is_objective(name: str) -> bool:
    """Return whether the name is an objective or has the form path/to/file.py:FUNCTION."""
    return name in _FILES or is_in_a_file(name)


def loss_function(name: str) -> Callable[..., Any]:
    """Import JAX, and return the loss function of the objective.

    Raises:
        ConfigError: the name is path/to/file.py:FUNCTION, and that file has no such loss.
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
        return _function_of_file(name, changed)
    return getattr(importlib.import_module(f"tba_jax.train.{_FILES[name]}"), name)


@functools.lru_cache(maxsize=32)
def _function_of_file(name: str, changed: int) -> Callable[..., Any]:
    """Return the function in a file; the file is loaded again when its time stamp changes."""
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


def _checked(name: str, found: Any) -> Callable[..., Any]:
    """Return a user's loss function; refuse what cannot be called as one."""
    own, wanted = name.rpartition(":")[2], "def NAME(groups, beta, *, SETTING=DEFAULT)"
    if not inspect.isfunction(found):
        kind = f"there is no {own}" if found is None else f"{own} is {found!r:.60}"
        raise ConfigError(
            f"objective.name={name}: {kind}; wanted a function, {wanted}. docs/objectives.md has "
            "an example"
        )
    try:
        inspect.signature(found).bind(None, None)
    except TypeError as error:
        raise ConfigError(
            f"objective.name={name}: {own} is called with (groups, beta), and {error}. Write "
            f"{wanted}"
        ) from error
    return found


def own_settings(name: str) -> tuple[Setting, ...]:
    """Import JAX, and return the settings of an objective, named "objective.NAME"."""
    return _settings_of(loss_function(name))


@functools.lru_cache(maxsize=64)
def _settings_of(loss: Callable[..., Any]) -> tuple[Setting, ...]:
    hints = typing.get_type_hints(loss, include_extras=True)
    found = []
    for name, parameter in inspect.signature(loss).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            hint, default = hints.get(name, type(parameter.default)), parameter.default
            about = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, About)]
            type_ = typing.get_args(hint)[0] if about else hint
            found.append(_setting(name, type_, default, about[0] if about else About("")))
    also = getattr(loss, "also", ())
    return (*found, *(_setting(name, *_OF_THE_STEP[name]) for name in also))


def own_names() -> tuple[str, ...]:
    """Import JAX, and return the sorted names of all objectives' own settings."""
    found = {s.name for name in objective_names() for s in own_settings(name)}
    return tuple(sorted(name.removeprefix("objective.") for name in found))


def make_objective(name: str, own: Mapping[str, Any] = types.MappingProxyType({})) -> Objective:
    """Return an objective with these settings; settings that are left out keep their defaults.

    Raises:
        ConfigError: the objective lacks one of the settings, or a value has another type.
    """
    known = {s.name.removeprefix("objective."): s for s in own_settings(name)}
    check_all(*(functools.partial(_typed, name, known, n, value) for n, value in own.items()))
    values = {n: s.default for n, s in known.items()}
    values |= {n: _typed(name, known, n, value) for n, value in own.items()}
    return Objective(name, loss_function(name), tuple(values.items()))


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
