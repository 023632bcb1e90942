# SPDX-License-Identifier: Apache-2.0
"""Reward of the `reasoning_gym` tasks: the data set's own scorer, on the last <answer>.

Only reward processes import this module: it needs the package reasoning-gym. A problem is made
again from data set, seed and index, so that what the scorer needs to know about it need not travel.
Invariant: a response is scored for the very question that was asked; if the package makes another
one of the same seed, that is an error.
"""

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any

from tba_jax.rewards.messages import Content, text_of

try:
    # Not an import statement: type checkers would find this very module.
    _package: Any = importlib.import_module("reasoning_gym")
except ImportError:
    raise ImportError(
        "tasks reasoning_gym:DATASET need the package reasoning-gym: "
        "pip install 'tba_jax[reasoning-gym]'"
    ) from None

_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


@functools.lru_cache(maxsize=8)
def _dataset(name: str, seed: int, size: int) -> Any:
    return _package.create_dataset(name, seed=seed, size=size)


def last_answer(text: str) -> str | None:
    """What the last <answer>...</answer> of a response holds; None without one."""
    answers = _ANSWER.findall(text)
    return answers[-1].strip() if answers else None


def answer_reward(
    prompts: Sequence[Content],
    completions: Sequence[Content],
    dataset: list[str],
    seed: list[int],
    size: list[int],
    index: list[int],
    **columns: Any,
) -> list[float]:
    """The data set's score of each answer, in [0, 1]; some give a part for an almost right one.

    Args:
        prompts: what was asked, texts or chat messages.
        completions: the responses, likewise.
        dataset: name in reasoning-gym.
        seed, size: the data set was made with.
        index: the problem's number in it.
        columns: not looked at.

    Raises:
        ValueError: the installed reasoning-gym makes another question of this seed and index.
    """
    rewards = []
    for prompt, completion, *of in zip(
        prompts, completions, dataset, seed, size, index, strict=True
    ):
        name, data_seed, data_size, i = of
        data = _dataset(name, data_seed, data_size)
        entry = data[i]
        if entry["question"] not in text_of(prompt):
            raise ValueError(
                f"reasoning_gym:{name} makes another question of seed {data_seed}, index {i} than "
                f"the one asked: {entry['question']!r:.200}"
            )
        answer = last_answer(text_of(completion))
        rewards.append(float(data.score_answer(answer=answer, entry=entry)))
    return rewards
