# SPDX-License-Identifier: Apache-2.0
"""Reward of the `reasoning_gym` tasks: the data set's own scorer, on the last <answer>.

Only reward processes import this module, because it needs the package reasoning-gym. The data of a
problem is generated again from data set, seed and index. Invariant: a response is scored for the
question that the model received; if the package generates another question, an error is raised.
"""

import functools
import importlib
import re
from typing import Any

from tba_jax.rewards.numeric import each

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


@each
def answer_reward(
    prompt: str, response: str, dataset: str, seed: int, size: int, index: int
) -> float:
    """Return the data set's score of the answer, in [0, 1]; some data sets give partial credit.

    Args:
        dataset: name in reasoning-gym.
        seed, size: arguments with which the data set was generated.
        index: index of the problem in the data set.

    Raises:
        ValueError: the installed reasoning-gym generates another question for this seed and index.
    """
    data = _create(dataset, seed=seed, size=size)
    entry = data[index]
    if entry["question"] not in prompt:
        raise ValueError(
            f"reasoning_gym:{dataset}, seed {seed}, index {index}: the installed package generates "
            f"another question than the prompt: {entry['question']!r:.200}. Install the version "
            "with which the run started"
        )
    answers = _ANSWER.findall(response)
    return data.score_answer(answer=answers[-1].strip() if answers else None, entry=entry)
