# SPDX-License-Identifier: Apache-2.0
"""Declarations of settings: type, default, range and meaning, in the room that uses the setting.

A room's `config.py` holds frozen dataclasses of such fields:

    @dataclasses.dataclass(frozen=True)
    class ReplaySettings(Section):
        capacity_per_prompt: int = field(100, "responses kept per prompt", at_least=1)
        pace: Literal["off", "trainer"] = field("off", "whether the trainer waits for new data")

The choices of a field are those of its `Literal` type. Validation, the command line, `--dry_run`
and docs/config.md come from these declarations. Invariant: a message about a setting names field,
value, rule and remedy, in one line.

A setting that changes with the optimiser step is a `Schedule`. The user writes it as one value.
"""

import ast
import dataclasses
import functools
import hashlib
import importlib.util
import math
import os
import re
import sys
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from types import ModuleType
from typing import Any, Literal, Self, TypeVar

T = TypeVar("T")

# Counts are int32 on devices and in files; rates, times and bounds are float32.
_LARGEST = 2**31
_LARGEST_BYTES = 2**53
_LARGEST_FLOAT = 1e30
# A smaller number is 0 in float32, or its reciprocal is infinite.
_SMALLEST_FLOAT = 1e-30

# A field with this choice also accepts a function in a user's file, path/to/file.py:FUNCTION.
IN_A_FILE = "FILE.py:FUNCTION"

Dtype = Literal["float32", "bfloat16"]


class ConfigError(ValueError):
    """A configuration that cannot run; each message has field, value, rule and remedy."""

    def __str__(self) -> str:
        if len(self.args) == 1:
            return str(self.args[0])
        return "\n".join([f"{len(self.args)} problems:", *(f"- {text}" for text in self.args)])


def check_all(*checks: Callable[[], None]) -> None:
    """Call every check, and raise one error with the messages of all violations.

    Raises:
        ConfigError: has every message. A plain ValueError is raised only if it is the first error:
            after other errors it is a consequence of them.
    """
    found: dict[str, None] = {}
    for check in checks:
        try:
            check()
        except ConfigError as error:
            found |= dict.fromkeys(error.args)
        except ValueError:
            if not found:
                raise
    if found:
        raise ConfigError(*found)


def need(ok: bool, field: str, value: Any, rule: str, remedy: str) -> None:
    """Raise a ConfigError unless `ok`; see `violation`."""
    if not ok:
        raise violation(field, value, rule, remedy)


def violation(field: str, value: Any, rule: str, remedy: str) -> ConfigError:
    """Return the error of a broken rule: "config.FIELD = VALUE: RULE. REMEDY"."""
    return ConfigError(f"config.{field} = {value!r}: {rule}. {remedy}")


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A number for every optimiser step, counted from 0.

    The user writes a schedule as a number, or as one of

        linear(START, FINAL, STEPS)    a straight line over STEPS steps
        cosine(START, FINAL, STEPS)    half a cosine wave over STEPS steps

    Without STEPS the last step of the run has FINAL. Three options may follow: `warmup=W` rises
    linearly to START over the first W steps, `hold=H` then stays at START for H steps, and `jump=J`
    goes to FINAL at step J.

    Attributes:
        start: value of START.
        final: value of FINAL; unused in a constant.
        steps: value of STEPS; None: up to the last step of the run.
        shape: constant, linear or cosine.
        warmup, hold: values of W and H.
        jump: value of J; None: no jump.
    """

    start: float
    final: float = 0.0
    steps: int | None = None
    shape: Literal["constant", "linear", "cosine"] = "constant"
    warmup: int = 0
    hold: int = 0
    jump: int | None = None

    @property
    def begin(self) -> int:
        """Step at which warm-up and hold end: the first step of a line or cosine."""
        return self.warmup + self.hold

    @property
    def numbers(self) -> tuple[float, ...]:
        """Values of START and, unless the schedule is constant, FINAL."""
        return (self.start,) if self.shape == "constant" else (self.start, self.final)

    def is_always(self, value: float) -> bool:
        """Return whether the number is `value` at every step."""
        return not self.warmup and all(number == value for number in self.numbers)

    def over(self, num_steps: int) -> "Schedule":
        """Return the same schedule with STEPS filled in for a run of `num_steps` steps."""
        if self.shape == "constant" or self.steps is not None:
            return self
        return dataclasses.replace(self, steps=max(1, num_steps - self.begin))

    def __str__(self) -> str:
        if self.shape == "constant":
            return _shortest(self.start)
        options = {"warmup": self.warmup, "hold": self.hold, "jump": self.jump}
        given = [f"{name}={value}" for name, value in options.items() if value not in (0, None)]
        length = [] if self.steps is None else [str(self.steps)]
        return f"{self.shape}({', '.join([*map(_shortest, self.numbers), *length, *given])})"

    @property
    def plain(self) -> float | str:
        """Form for `parse_schedule`: a number for a constant, otherwise the text."""
        return self.start if self.shape == "constant" else str(self)


def parse_schedule(name: str, value: Any) -> Schedule:
    """Return the schedule that a number or a text describes.

    Args:
        value: a number, a text such as "linear(0.01, 0.001, 500)", or a schedule.

    Raises:
        ConfigError: see `violation`.
    """
    if isinstance(value, Schedule):
        return value
    example = f'Write a number, or for example --config.{name}="linear(0.01, 0.001, 500)".'
    if not isinstance(value, (int, float, str)) or isinstance(value, bool):
        raise violation(name, value, "must be a number or a schedule", example)
    try:
        return Schedule(float(value))
    except ValueError:
        pass  # the text is not a number; try to read it as KIND(...)
    try:
        call = ast.parse(str(value).strip(), mode="eval").body
        if not isinstance(call, ast.Call):
            raise ValueError("is neither a number nor KIND(...)")
        numbers = [ast.literal_eval(number) for number in call.args]
        options = {str(word.arg): ast.literal_eval(word.value) for word in call.keywords}
        return _schedule(ast.unparse(call.func), numbers, options)
    except (SyntaxError, ValueError, TypeError) as error:
        rule = str(error) if type(error) is ValueError else "cannot be read as KIND(NUMBERS)"
        raise violation(name, value, rule, example) from error


_SHAPES: tuple[Any, ...] = ("linear", "cosine")
_NUMBERS, _OPTIONS = ("START", "FINAL", "STEPS"), ("warmup", "hold", "jump")


def _schedule(shape: Any, numbers: list[Any], options: dict[str, Any]) -> Schedule:
    """Return the schedule from the parts of KIND(...).

    Raises:
        ValueError: a part is invalid; the message is the violated rule.
    """
    for name, allowed in ((shape, _SHAPES), *((option, _OPTIONS) for option in options)):
        if name not in allowed:
            raise ValueError(f"{name!r} must be one of {', '.join(allowed)}")
    if len(numbers) not in (2, 3):
        called = ", ".join(_NUMBERS)
        raise ValueError(f"{shape} takes {called}, and {len(numbers)} numbers are given")
    for name, number in (dict(zip(_NUMBERS, numbers, strict=False)) | options).items():
        least = int(name == "STEPS")
        if name not in _NUMBERS[:2] and (type(number) is not int or number < least):
            raise ValueError(f"{name} = {number!r} must be a whole number, at least {least}")
        if type(number) not in (int, float):
            raise ValueError(f"{name} = {number!r} must be a number")
    start, final, steps = [*numbers, None][:3]
    return Schedule(float(start), float(final), steps, shape, **options)


def _shortest(number: float) -> str:
    """Return the shortest text that reads back as the same float."""
    text = repr(number).removesuffix(".0")
    mantissa, e, exponent = text.partition("e")
    return f"{mantissa.removesuffix('.0')}e{int(exponent)}" if e else text


class Section:
    """Base class of a section: the settings that one room declares."""

    def replaced(self, values: Mapping[str, Any]) -> Self:
        """Return the section with some values changed, setting name -> value."""
        return dataclasses.replace(typing.cast(Any, self), **values)

    def check(self) -> None:
        """Check rules between several fields of this section."""


def field(default: T, meaning: str, **options: Any) -> T:
    """Declare a field of a section.

    Args:
        options: attributes of `Setting` from `on_resume` on.
    """
    return dataclasses.field(default=default, metadata={"meaning": meaning, **options})


def share(default: float, meaning: str, **options: Any) -> float:
    """Declare a field between 0 and 1; arguments are those of `field`."""
    return field(default, meaning, at_least=0, at_most=1, **options)


@dataclasses.dataclass(frozen=True)
class Setting:
    """A declared field.

    Attributes:
        name: name with the section, as on the command line: "search.top_p".
        type: type of the values.
        default, meaning: arguments of `field`.
        on_resume: whether a resumed run may change the field. True for logs, storage and limits;
            False for settings of the computation.
        at_least, above, at_most: bounds of a number; `above` is exclusive.
        among: choices that are computed at import, so that a `Literal` type cannot list them.
    """

    name: str
    type: Any
    default: Any
    meaning: str
    on_resume: bool = False
    at_least: float | None = None
    above: float | None = None
    at_most: float | None = None
    among: tuple[str, ...] = ()

    @property
    def choices(self) -> tuple[str, ...]:
        """All allowed values if the setting is a choice; else ()."""
        is_literal = typing.get_origin(self.type) is Literal
        return typing.get_args(self.type) if is_literal else self.among

    @property
    def rule(self) -> str:
        """Rule that a value must meet; "" if any value is allowed."""
        if self.choices:
            return f"must be one of {', '.join(choice or repr(choice) for choice in self.choices)}"
        if self.at_most is not None:
            start = f"({self.above}" if self.above is not None else f"[{self.at_least}"
            return f"must lie in {start}, {self.at_most}]"
        if self.above is not None:
            return f"must be above {self.above}" if self.above else "must be positive"
        return "" if self.at_least is None else f"must be at least {self.at_least}"

    @property
    def kind(self) -> str:
        """Type of the values, in words for documentation and errors."""
        kinds = {str: "text", int: "whole number", float: "number", bool: "truth value"}
        kinds |= {Schedule: "number or schedule", bool | str: "truth value or text"}
        return kinds.get(self.type, "list")

    def read(self, value: Any) -> Any:
        """Return a value of the setting's type from a Python value, or from text.

        Raises:
            ConfigError: the value has another type; see `violation`.
        """
        if self.type is Schedule:
            return parse_schedule(self.name, value)
        wanted = str if self.choices else self.type
        is_list = typing.get_origin(wanted) is tuple
        try:
            return _as_list(wanted, value) if is_list else _as(wanted, value)
        except (ValueError, SyntaxError):
            rule = self.rule if self.choices else f"must be a {self.kind}"
            raise violation(self.name, value, rule, f"The default is {self.default}.") from None

    def check(self, value: Any) -> None:
        """Refuse a value outside the choices or bounds."""
        for number in value.numbers if isinstance(value, Schedule) else (value,):
            if problem := self._problem(number):
                raise violation(self.name, getattr(value, "plain", value), *problem)

    def _problem(self, value: Any) -> tuple[str, str] | None:
        """Return the violated rule and the remedy."""
        default = f"The default is {self.default}."
        if self.choices:
            ok = value in self.choices or (IN_A_FILE in self.choices and is_in_a_file(value))
            remedy = f"Set --config.{self.name}={self.default} for the default behaviour."
            return None if ok else (self.rule, remedy)
        if (
            (self.at_least is not None and value < self.at_least)
            or (self.above is not None and not value > self.above)
            or (self.at_most is not None and value > self.at_most)
        ):
            return self.rule, default
        if self.type is int:
            limit = _LARGEST_BYTES if self.name.endswith("_bytes") else _LARGEST
            return None if abs(value) < limit else (f"must be below {limit:,}", default)
        if self.type in (float, Schedule):
            if not abs(value) < _LARGEST_FLOAT and not value == math.inf == self.default:
                return "must be a finite number", default
            if 0 < abs(value) < _SMALLEST_FLOAT:
                return f"is 0 in float32: must be 0 or at least {_SMALLEST_FLOAT:g}", default
        return None


def _as(wanted: Any, value: Any) -> Any:
    """Return a value as bool, int, float or str; or as one of bool and str.

    Raises:
        ValueError: the value has another type.
    """
    if isinstance(value, str) and wanted is not str:
        if wanted in (bool, bool | str):
            value = {"true": True, "1": True, "false": False, "0": False}.get(value.lower(), value)
        else:
            value = wanted(value)
    if wanted is float and type(value) is int:
        value = float(value)
    if type(value) not in (typing.get_args(wanted) or (wanted,)):
        raise ValueError("another type")
    return value


def _as_list(type_: Any, value: Any) -> tuple[Any, ...]:
    """Return a value, or a text such as "1.0,0.5" or "('a', 'b')", as a tuple of one type.

    Raises:
        ValueError, SyntaxError: the value is not such a list.
    """
    if isinstance(value, str):
        try:
            value = ast.literal_eval(value)
        except (ValueError, SyntaxError):
            value = [item.strip() for item in value.split(",")]
    items = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(_as(typing.get_args(type_)[0], item) for item in items)


def declared(section: type, prefix: str = "") -> Iterator[Setting]:
    """Yield the settings of a section and of its subsections, in order.

    Args:
        prefix: prefix of the names.
    """
    types = typing.get_type_hints(section)
    for entry in dataclasses.fields(section):
        type_ = types[entry.name]
        if isinstance(type_, type) and issubclass(type_, Section):
            yield from declared(type_, f"{prefix}{entry.name}.")
        elif "meaning" in entry.metadata:
            yield Setting(prefix + entry.name, type_, entry.default, **entry.metadata)


def is_in_a_file(name: str) -> bool:
    """Return whether a name has the form path/to/file.py:NAME."""
    path, _, own = name.rpartition(":")
    return path.endswith(".py") and bool(own)


def import_file(path: str) -> ModuleType:
    """Import a Python file by its path, under a module name that no other module has.

    Raises:
        FileNotFoundError: the file does not exist. The code of the file may raise any exception.
    """
    full = os.path.abspath(os.path.expanduser(path))
    if not os.path.isfile(full):
        raise FileNotFoundError(f"no file {full}")
    folder = os.path.dirname(full)
    if folder not in sys.path:
        sys.path.append(folder)  # the file may import its neighbours, as a script may
    name = f"user_file_{hashlib.sha256(full.encode()).hexdigest()[:12]}"
    spec = importlib.util.spec_from_file_location(name, full)
    assert spec is not None and spec.loader is not None  # true for every .py file
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module  # `dataclasses` looks up the module of a class here
    try:
        spec.loader.exec_module(module)
    except BaseException:
        del sys.modules[name]
        raise
    return module


# Objects that `run_training` received, by "notebook.py:NAME"; other processes do not have them.
GIVEN: dict[str, Any] = {}


def importable_name(function: Any) -> str:
    """Return "module:NAME" or "FILE.py:NAME" for another process to import; "" if impossible."""
    module = sys.modules.get(getattr(function, "__module__", None) or "")
    own = getattr(function, "__qualname__", "<none>")
    file = getattr(module, "__file__", None)
    found = functools.reduce(lambda x, part: getattr(x, part, None), own.split("."), module)
    if found is not function or module is None or file is None:
        return ""
    return f"{file}:{own}" if module.__name__ == "__main__" else f"{module.__name__}:{own}"


def given_names(things: Sequence[Any]) -> list[str]:
    """Store each object in `GIVEN` under a new name; return the names."""
    names: list[str] = []
    for i, thing in enumerate(things):
        own = getattr(thing, "__qualname__", type(thing).__qualname__).rpartition(".")[2]
        name = f"notebook.py:{re.sub(r'[^A-Za-z0-9_]', '', own)}"
        names.append(f"{name}_{i + 1}" if name in names else name)
        GIVEN[names[-1]] = thing
    return names
