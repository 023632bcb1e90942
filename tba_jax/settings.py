# SPDX-License-Identifier: Apache-2.0
"""How a setting is declared: its type, default, range and meaning, once, where it is consumed.

A room's `config.py` holds frozen dataclasses of such fields:

    @dataclasses.dataclass(frozen=True)
    class ReplaySettings(Section):
        capacity_per_prompt: int = field(100, "responses kept per prompt", at_least=1)
        late: Literal["train", "drop", "wait"] = field("train", "what happens to late responses")

The choices of a field are those of its `Literal` type. Validation, the command line, `--dry_run`
and docs/config.md come from these declarations. Invariant: a message about a setting names field,
value, rule and remedy, in one line.
"""

import dataclasses
import math
import typing
from collections.abc import Iterator
from typing import Any, Literal, TypeVar

T = TypeVar("T")

# Counts are int32 on devices and in files; rates, times and bounds are computed in float32.
_LARGEST = 2**31
_LARGEST_BYTES = 2**53
_LARGEST_FLOAT = 1e30
# Smaller numbers are 0 in float32, or their reciprocal is infinite.
_SMALLEST_FLOAT = 1e-30

Dtype = Literal["float32", "bfloat16"]


class ConfigError(ValueError):
    """A configuration that cannot run; the message says field, value, rule and remedy."""


def need(ok: bool, field: str, value: Any, rule: str, remedy: str) -> None:
    """Raise unless `ok`.

    Raises:
        ConfigError: "config.FIELD = VALUE: RULE. REMEDY".
    """
    if not ok:
        raise ConfigError(f"config.{field} = {value!r}: {rule}. {remedy}")


class Section:
    """Base of a room's settings."""

    def check(self) -> None:
        """Rules across the fields of this section; single fields are checked as declared.

        Raises:
            ConfigError: see `need`.
        """


def field(
    default: T,
    meaning: str,
    *,
    at_least: float | None = None,
    above: float | None = None,
    at_most: float | None = None,
    among: tuple[str, ...] = (),
    on_resume: bool = False,
) -> T:
    """A field of a section.

    Args:
        default: its default.
        meaning: what it means, in its unit.
        at_least, above, at_most: bounds of a number; `above` is exclusive.
        among: its choices, where they are found and no `Literal` could name them.
        on_resume: whether a resumed run may change it: it decides what is logged, kept and risked,
            not what is computed.
    """
    bounds = {"at_least": at_least, "above": above, "at_most": at_most, "among": among}
    return dataclasses.field(
        default=default, metadata={"meaning": meaning, "on_resume": on_resume, **bounds}
    )


def share(default: float, meaning: str, *, on_resume: bool = False) -> float:
    """A field between 0 and 1."""
    return field(default, meaning, at_least=0, at_most=1, on_resume=on_resume)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A declared field.

    Attributes:
        name: with its sections, as on the command line: "search.top_p".
        type: of its values.
        default, meaning, on_resume, at_least, above, at_most, among: as given to `field`.
    """

    name: str
    type: Any
    default: Any
    meaning: str
    on_resume: bool
    at_least: float | None
    above: float | None
    at_most: float | None
    among: tuple[str, ...]

    @property
    def choices(self) -> tuple[str, ...]:
        """Its values, if they are few; else ()."""
        is_literal = typing.get_origin(self.type) is Literal
        return typing.get_args(self.type) if is_literal else self.among

    @property
    def rule(self) -> str:
        """What its value must be; "" for any."""
        if self.choices:
            return f"must be one of {', '.join(choice or repr(choice) for choice in self.choices)}"
        if self.at_most is not None:
            start = f"({self.above}" if self.above is not None else f"[{self.at_least}"
            return f"must lie in {start}, {self.at_most}]"
        if self.above is not None:
            return f"must be above {self.above}" if self.above else "must be positive"
        return "" if self.at_least is None else f"must be at least {self.at_least}"

    @property
    def _size(self) -> str:
        """What every number must be, so that what is computed from it exists."""
        if self.type is int:
            return f"must be below {_LARGEST_BYTES if self._is_bytes else _LARGEST:,}"
        if self.type is float and self.at_most is None:
            return f"must be a finite number{', or inf' * (self.default == math.inf)}"
        return ""

    @property
    def _is_bytes(self) -> bool:
        return self.name.endswith("_bytes")

    def _has_size(self, value: Any) -> bool:
        if self.type is int:
            return abs(value) < (_LARGEST_BYTES if self._is_bytes else _LARGEST)
        if self.type is float:
            return abs(value) < _LARGEST_FLOAT or (value == math.inf == self.default)
        return True

    def check(self, value: Any) -> None:
        """Refuse a value that is not among the choices or within the bounds.

        Raises:
            ConfigError: see `need`.
        """
        ok = (
            (not self.choices or value in self.choices)
            and (self.at_least is None or value >= self.at_least)
            and (self.above is None or value > self.above)
            and (self.at_most is None or value <= self.at_most)
        )
        if ok and not self._has_size(value):
            need(False, self.name, value, self._size, f"The default is {self.default}.")
        if ok and self.type is float and 0 < abs(value) < _SMALLEST_FLOAT:
            rule = f"must be 0 or at least {_SMALLEST_FLOAT:g} in size, as smaller numbers are 0"
            need(False, self.name, value, rule, f"The default is {self.default}.")
        if self.choices:
            remedy = f"Set --config.{self.name}={self.default} for the default behaviour."
        elif self.at_most is not None and self.type is int:
            remedy = f"The default is {self.default}."
        elif self.at_most is not None:
            remedy = f"Give a share, not a percent; the default is {self.default}."
        else:
            remedy = "Raise it." if self.above is None else f"Give a value above {self.above}."
        need(ok, self.name, value, self.rule, remedy)


def declared(section: type, prefix: str = "") -> Iterator[Setting]:
    """The settings of a section and of the sections in it, in their order.

    Args:
        section: a dataclass.
        prefix: of their names.
    """
    types = typing.get_type_hints(section)
    for entry in dataclasses.fields(section):
        type_ = types[entry.name]
        if dataclasses.is_dataclass(type_):
            assert isinstance(type_, type)
            yield from declared(type_, f"{prefix}{entry.name}.")
        else:
            yield Setting(prefix + entry.name, type_, entry.default, **entry.metadata)
