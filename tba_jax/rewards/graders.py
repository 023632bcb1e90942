# SPDX-License-Identifier: Apache-2.0
r"""Rewards of tasks: numbers, boxed answers, answers of reasoning-gym, and digests of toy posts.

Reward processes import this module, so it imports only the standard library; a library of a reward
is imported at its first call. Invariants: responses and gold answers are parsed by the same rule. A
response without a boxed answer is wrong. A response is scored for the question that the model
received.
"""

import functools
import importlib
import inspect
import re
from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from typing import Any

Content = str | Sequence[Mapping[str, str]]
"""A text, or chat messages."""


def optional(module: str, user: str, extra: str) -> Any:
    """Import a module, or raise ImportError with the extra of this package that installs it."""
    try:
        return importlib.import_module(module)
    except ImportError:
        text = f"{user} needs the package {module}: pip install 'tba_jax[{extra}]'"
        raise ImportError(text) from None


def text_of(content: Content) -> str:
    """Return a text, or the content of the last chat message."""
    return content if isinstance(content, str) else content[-1]["content"]


def each(grade: Callable[..., float]) -> Callable[..., list[float]]:
    """Return a reward function with TRL's signature, which grades responses one by one.

    Arguments of `grade` are `response` and `prompt` (texts without special tokens) and columns of
    the data.
    """
    names = inspect.signature(grade).parameters

    def reward(prompts: Sequence[Any], completions: Sequence[Any], **columns: Any) -> list[float]:
        columns |= {"prompt": [*map(text_of, prompts)], "response": [*map(text_of, completions)]}
        given = [name for name in names if name in columns]
        rows = zip(*(columns[name] for name in given), strict=True)
        return [float(grade(**dict(zip(given, row, strict=True)))) for row in rows]

    reward.__doc__ = grade.__doc__
    return reward


def last_boxed(text: str) -> str | None:
    r"""Return the contents of the last \boxed{...} with balanced braces; None without one.

    last_boxed(r"so \boxed{\frac{1}{2}}.") == r"\frac{1}{2}"
    """
    for start in reversed([box.end() for box in re.finditer(r"\\boxed\{", text)]):
        depth = 1
        for brace in re.compile(r"[{}]").finditer(text, start):
            depth += 1 if brace[0] == "{" else -1
            if depth == 0:
                return text[start : brace.start()]
    return None


_MINUS = "\N{MINUS SIGN}"
# A sign belongs to the number unless an operand precedes it: "20-5" and "20 -5" end in 5.
_SIGN = rf"(?<![\w)\]}}%])(?<![0-9)%][ ])[-+{_MINUS}]"
# A comma separates only thousands: "3,4" are two numbers, "1,234" is one.
_INTEGRAL = r"(?>(?<![0-9],)[0-9]{1,3}(?:,[0-9]{3})+(?![0-9]|,[0-9])|[0-9]+)"
# ASCII digits only: `\d` also matches digits of other scripts. An exponent must follow its number
# ("12 m^2" ends in 12).
_UNSIGNED = (
    rf"(?>(?<![0-9^])(?<!\^\{{){_INTEGRAL}(?:\.[0-9]+)?|(?<![A-Za-z0-9])\.[0-9]+)"
    rf"(?:[eE][-+{_MINUS}]?[0-9]+)?+"
)
# More than two numbers with slashes are a date, not a fraction: "5/6/2020".
_SLASH = r"[ ]?/[ ]?"
_NUMBER = (
    rf"(?P<sign>{_SIGN}(?:\\?[$€£])?)?"
    rf"(?:(?<!/)(?<!/[ ])(?:(?<![0-9^])(?P<whole>{_INTEGRAL})[ ])?"
    rf"(?P<top>{_UNSIGNED}){_SLASH}(?P<bottom>{_UNSIGNED})(?!{_SLASH}[0-9])"
    rf"|(?P<plain>{_UNSIGNED}))"
)
_MARKED = rf"####[\s:=*(\\$€£]*{_NUMBER}(?P<heading>[.):][ ]+[^\W\d])?"


def _value(number: re.Match[str]) -> float | None:
    """Return the value of a match of _NUMBER; None for a division by 0."""
    parts = number.groupdict("0")
    sign = -1.0 if parts["sign"].startswith(("-", _MINUS)) else 1.0
    plain, whole, top, bottom = (
        float(parts[name].replace(",", "").replace(_MINUS, "-"))
        for name in ("plain", "whole", "top", "bottom")
    )
    if number["plain"]:
        return sign * plain
    # One division, so that the result is the float nearest to the fraction.
    return sign * (whole * bottom + top if top < bottom else top) / bottom if bottom else None


def last_number(text: str) -> float | None:
    """Return the last number of a text; None without one.

    Thousands commas, decimals, exponents, fractions and the minus sign U+2212 are parsed; units,
    percent and currency signs are ignored: last_number("so $1,234.50 in all") == 1234.5,
    last_number("1 1/2 cups") == 1.5.
    """
    values = [value for value in map(_value, re.finditer(_NUMBER, text)) if value is not None]
    return values[-1] if values else None


def gsm8k_answer(text: str) -> float | None:
    """Return the number after the first "####", else the last number; None without one.

    The first mark counts, because the text after an answer may be another problem with its own
    mark. A heading ("#### 2. Add them") counts only if no other number is marked.
    """
    marks = sorted(re.finditer(_MARKED, text), key=lambda mark: bool(mark["heading"]))
    value = _value(marks[0]) if marks else None
    return last_number(text) if value is None else value


def gsm8k_gold(text: str) -> str | None:
    """Return the answer after the last "####" of a solution, without commas; None without it."""
    _, mark, answer = text.rpartition("####")
    return answer.strip().replace(",", "") if mark else None


@each
def arithmetic_reward(response: str, answer: str) -> float:
    """Return 1.0 if the last integer of the response is the answer (an integer), else 0.0.

    "2-5" ends in 5, "2-5=-3" in -3. Commas separate the running totals of a worked response.
    """
    integers = re.findall(rf"(?:{_SIGN})?[0-9]+", response.replace(_MINUS, "-"))
    # Decimal, because Python's int refuses texts of more than 4,300 digits.
    return bool(integers) and Decimal(integers[-1]) == Decimal(answer)


@each
def gsm8k_reward(response: str, answer: str) -> float:
    """Return 1.0 if the answers of response and gold solution are equal (`gsm8k_answer`), else 0.0.

    Raises:
        ValueError: the gold solution has no number, so every response would be wrong.
    """
    right = gsm8k_answer(answer)
    if right is None:
        raise ValueError(
            f"gold solution {answer!r} has no number. End it like GSM8K solutions: '#### 42'"
        )
    return gsm8k_answer(response) == right


@each
def math_reward(response: str, answer: str) -> float:
    r"""Return 1.0 if the boxed answer equals the gold answer mathematically, else 0.0.

    The time limits of math-verify are off, because they grade a slow comparison as wrong. At the
    deadline of reward processes, a slow comparison is a named failure instead.

    Args:
        answer: gold solution with the answer in \boxed{...}, or the bare answer.

    Raises:
        ValueError: math-verify cannot parse the gold answer.
    """
    library = optional("math_verify", "the reward of task math", "math")
    boxed, given = last_boxed(answer), last_boxed(response)
    gold = answer if boxed is None else boxed
    right = _parse(library, gold)
    if not right:
        raise ValueError(f"math-verify cannot parse the gold answer {gold!r:.200}. Correct it")
    if given is None:
        return False
    bases = {base[1] for text in (gold, given) if (base := _BASE.search(text.strip()))}
    is_equal = library.verify(right, _parse(library, given), timeout_seconds=0, raise_on_error=True)
    return len(bases) < 2 and bool(is_equal)


# Base of answers such as 2516_8, which math-verify drops.
_BASE = re.compile(r"[0-9]_\{?([0-9]+)\}?$")


def _parse(library: Any, text: str) -> list[Any]:
    # math-verify cannot parse a number followed by a full stop.
    text = text.strip().removesuffix(".")
    return library.parse(f"$\\boxed{{{text}}}$", parsing_timeout=0)


@each
def answer_reward(
    prompt: str, response: str, dataset: str, seed: int, size: int, index: int
) -> float:
    """Return the data set's own score of the last <answer>, in [0, 1]; some give partial credit.

    The problem is generated again, from the arguments of reasoning-gym and its index.

    Raises:
        ValueError: the installed reasoning-gym generates another question for this seed and index.
    """
    data = _problems(dataset, seed, size)
    entry = data[index]
    if entry["question"] not in prompt:
        raise ValueError(
            f"reasoning_gym:{dataset}, seed {seed}, index {index}: the installed package generates "
            f"another question than the prompt: {entry['question']!r:.200}. Install the version "
            "with which the run started"
        )
    answers = re.findall(r"<answer>(.*?)</answer>", response, re.DOTALL)
    return data.score_answer(answer=answers[-1].strip() if answers else None, entry=entry)


@functools.lru_cache(maxsize=8)
def _problems(dataset: str, seed: int, size: int) -> Any:
    package = optional("reasoning_gym", "the reward of reasoning_gym:DATASET", "reasoning-gym")
    return package.create_dataset(dataset, seed=seed, size=size)


# In a post of 24 letters, a letter that occurs once has the share 1/24, one that occurs twice 2/24.
# The cost lies between these shares, so the best digest names once each letter that occurs twice.
CHARACTER_COST = 0.06


@each
def digest_reward(prompt: str, response: str) -> float:
    """Return the share of the post's letters in the digest, minus a cost per character.

    The prompt is a post and a colon; the response is a digest. It judges in place of humans.
    """
    post, named = prompt.removesuffix(":"), set(response)
    return sum(letter in named for letter in post) / len(post) - CHARACTER_COST * len(response)
