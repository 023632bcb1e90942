# SPDX-License-Identifier: Apache-2.0
"""Reward of the `reasoning_gym` tasks: the data set's own scorer, on the last <answer>.

Only reward processes import this module. The data of a problem is generated again from data set,
seed and index. Invariant: a response is scored for the question that the model received.
"""

import functools
import re

from tba_jax.rewards.numeric import each, optional

_package = optional("reasoning_gym", "the reward of reasoning_gym:DATASET", "reasoning-gym")
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
