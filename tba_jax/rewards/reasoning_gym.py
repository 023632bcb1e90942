# SPDX-License-Identifier: Apache-2.0
"""Reward of the `reasoning_gym` tasks: the data set's own scorer, on the last <answer>.

Only reward processes import this module, because it needs the package reasoning-gym. The data of a
problem is generated again from data set, seed and index. Invariant: a response is scored for the
question that the model received; if the package generates another question, an error is raised.
"""

import functools
import importlib
import re
from collections.abc import Sequence
from typing import Any

from tba_jax.rewards.numeric import Content, text_of

try:
    # An import statement would make type checkers import this module itself.
    _package: Any = importlib.import_module("reasoning_gym")
except ImportError:
    raise ImportError(
        "tasks reasoning_gym:DATASET need the package reasoning-gym: "
        "pip install 'tba_jax[reasoning-gym]'"
    ) from None

_create = functools.lru_cache(maxsize=8)(_package.create_dataset)
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)


def answer_reward(
    prompts: Sequence[Content],
    completions: Sequence[Content],
    dataset: list[str],
    seed: list[int],
    size: list[int],
    index: list[int],
    **columns: Any,
) -> list[float]:
    """Return the data set's score of each answer, in [0, 1]; some data sets give partial credit.

    Args:
        dataset: name in reasoning-gym.
        seed, size: arguments with which the data set was generated.
        index: index of the problem in the data set.

    Raises:
        ValueError: the installed reasoning-gym generates another question for this seed and index.
    """
    rewards = []
    rows = zip(prompts, completions, dataset, seed, size, index, strict=True)
    for prompt, completion, name, data_seed, data_size, i in rows:
        data = _create(name, seed=data_seed, size=data_size)
        entry = data[i]
        if entry["question"] not in text_of(prompt):
            raise ValueError(
                f"reasoning_gym:{name}, seed {data_seed}, index {i}: the installed package "
                f"generates another question than the prompt: {entry['question']!r:.200}. Install "
                "the version with which the run started"
            )
        answers = _ANSWER.findall(text_of(completion))
        answer = answers[-1].strip() if answers else None
        rewards.append(float(data.score_answer(answer=answer, entry=entry)))
    return rewards
