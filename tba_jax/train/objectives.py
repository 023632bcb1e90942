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
_FILES = dict.fromkeys(
    "cispo dapo dr_grpo grpo gspo ipo online_dpo proximal_rloo reinforce rloo tb".split(), "losses"
) | {"ppo": "ppo", "vineppo": "ppo"}


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
            sampler is the current policy, so one version samples a whole response; ratio: it
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


def objective(needs: Needs | Callable[..., Needs]) -> Callable[[F], F]:
    """Return a decorator that declares the needs of a loss; a function gets the settings."""

    def declare(loss: F) -> F:
        typing.cast(Any, loss).needs = needs
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

    def __call__(self, groups: Any, beta: Any) -> Any:
        """Return the terms of the loss, `groups.Terms`.

        Raises:
            ConfigError: a user's loss raised an error, or did not return one term per response.
        """
        from tba_jax.train.groups import Terms, check_groups

        check_groups(groups)
        call = functools.partial(self.loss, groups, beta, **dict(self.settings))
        if self.loss.__module__.startswith("tba_jax."):
            return call()
        found = _of_user(self.name, "the function", call)
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
        known = {x.name.removeprefix("objective."): x for x in own_settings(self.name)}
        for name, setting in known.items():
            setting.check(self.value(name))
        for name, why in self.needs.wrong:
            remedy = f"Set --config.objective.{name}={known[name].default}."
            need(False, f"objective.{name}", self.value(name), why, remedy)


def objective_names() -> tuple[str, ...]:
    """Return the names of all objectives, in alphabetical order."""
    return tuple(sorted(_FILES))


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
    if not is_in_a_file(name):
        return getattr(importlib.import_module(f"tba_jax.train.{_FILES[name]}"), name)
    path = name.rpartition(":")[0]
    try:
        return _function_of_file(name, os.stat(os.path.expanduser(path)).st_mtime_ns)
    except OSError as error:
        raise ConfigError(
            f"objective.name={name}: {path} cannot be read ({error.strerror}). Give the path "
            f"from {os.getcwd()}, or an absolute one"
        ) from error


@functools.lru_cache(maxsize=32)
def _function_of_file(name: str, changed: int) -> Callable[..., Any]:
    """Return the function in a file; the file is loaded again when its time stamp changes."""
    path, _, own = name.rpartition(":")
    module = _of_user(name, f"loading {path}", lambda: import_file(path))
    return _checked(name, getattr(module, own, None))


def _of_user(name: str, what: str, call: Callable[[], Any]) -> Any:
    """Return the result of a user's code; the message of an error has its traceback."""
    try:
        return call()
    except Exception as error:  # a user's code may raise anything; the traceback shows the line
        where = "".join(traceback.format_exception(error)).rstrip()
        raise ConfigError(
            f"objective.name={name}: {what} raised {type(error).__name__}: {error}. Correct the "
            f"file.\n{where}"
        ) from error


def _checked(name: str, found: Any) -> Callable[..., Any]:
    """Return a user's loss function; refuse what cannot be called as one."""
    own = name.rpartition(":")[2]
    try:
        inspect.signature(found).bind(None, None)
        return found
    except TypeError as error:
        why = f"there is no {own}" if found is None else f"{own} is {found!r:.60}: {error}"
        raise ConfigError(
            f"objective.name={name}: {why}; wanted a function, "
            "def NAME(groups, beta, *, SETTING=DEFAULT). docs/objectives.md has an example"
        ) from error


def own_settings(name: str) -> tuple[Setting, ...]:
    """Import JAX, and return the settings of an objective, named "objective.NAME"."""
    loss, found = loss_function(name), []
    hints = typing.get_type_hints(loss, include_extras=True)
    for own, parameter in inspect.signature(loss).parameters.items():
        if parameter.kind is inspect.Parameter.KEYWORD_ONLY:
            hint, default = hints.get(own, type(parameter.default)), parameter.default
            about = [x for x in getattr(hint, "__metadata__", ()) if isinstance(x, About)]
            type_ = typing.get_args(hint)[0] if about else hint
            declared = (about or [About("")])[0]._asdict()
            found.append(Setting(f"objective.{own}", type_, default, **declared))
    return tuple(found)


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
    values = {n: s.default for n, s in known.items()}

    def read(setting: str, value: Any) -> None:
        if setting not in known:
            has = f"it has {', '.join(known)}" if known else "it has no settings of its own"
            raise violation(
                f"objective.{setting}",
                value,
                f"objective.name={name} has no such setting; {has}",
                f"Leave it out, or set --config.objective.{setting}=None.",
            )
        values[setting] = known[setting].read(value)

    check_all(*(functools.partial(read, n, value) for n, value in own.items()))
    return Objective(name, loss_function(name), tuple(values.items()))
