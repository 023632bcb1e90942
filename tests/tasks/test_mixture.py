# SPDX-License-Identifier: Apache-2.0
"""Several data sets as one task."""

import collections
import json
import math
from typing import Any

import numpy as np
import pytest

from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.scores import Grader, Scores
from tba_jax.tasks.mixture import Mixture, data_sets
from tba_jax.tasks.registry import get_task


def write(tmp_path, name, rows):
    path = tmp_path / name
    path.write_text("\n".join(map(json.dumps, rows)))
    return str(path)


@pytest.fixture
def both(tmp_path):
    a = write(tmp_path, "a.jsonl", [{"prompt": f"a{i}", "answer": str(i)} for i in range(40)])
    b = write(tmp_path, "b.jsonl", [{"prompt": f"b{i}", "hint": "h"} for i in range(10)])
    return a, b


def test_weights_are_shares_of_a_pass_that_has_every_row(both):
    a, b = both
    task = get_task("custom", f"{a}:0.5, {b}:0.5", 4)
    problems = [task.problem("train", i) for i in range(task.size("train"))]
    counts = collections.Counter(columns["data_set"] for _, columns in problems)
    assert counts == {"a": 38, "b": 38}
    assert len({str(prompt) for prompt, _ in problems}) == 38 + 8
    held_out = [task.problem("eval", i) for i in range(task.size("eval"))]
    assert [columns["data_set"] for _, columns in held_out] == ["a", "b", "a", "b"]
    assert not {str(p) for p, _ in held_out} & {str(p) for p, _ in problems}
    # Functions see the columns of all sets.
    assert all(set(columns) == {"answer", "hint", "data_set"} for _, columns in problems)
    assert isinstance(task, Mixture) and task.most_held_out(0.2) == 4
    # Without weights, every row occurs once.
    assert get_task("custom", ",".join(both), 2).size("train") == 39 + 9


def test_rewards_are_reported_for_each_set():
    class Rewards:
        async def score(self, completions):
            return Scores([1.0, None, 3.0], [None, "reward_none", None], "", {})

    rewards: Any = Rewards()
    grader = Grader(rewards, lambda rows: ["x"] * len(rows), lambda text: None, "", ("a", "b"))
    ids = np.zeros(1, np.int32)
    prompts = [Prompt(i, "p", ids, {"data_set": name}) for i, name in enumerate("aab")]
    parts = grader.grade(prompts, [ids] * 3, [True] * 3).parts
    assert parts["a"][0] == 1.0 and parts["b"][2] == 3.0
    assert all(map(math.isnan, [*parts["a"][1:], *parts["b"][:2]]))


def test_weights_names_and_forms_of_sets_must_agree(both, tmp_path):
    with pytest.raises(ValueError, match="some data sets have a weight and some have none"):
        data_sets("a.jsonl:0.5,b.jsonl")
    assert data_sets("hf://name:main") == [("hf://name:main", 0.0)]
    (tmp_path / "other").mkdir()
    same = write(tmp_path / "other", "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    with pytest.raises(ValueError, match="two have the same name"):
        get_task("custom", f"{both[0]},{same}", 2)
    chats = [{"prompt": [{"role": "user", "content": f"c{i}"}]} for i in range(4)]
    chat = write(tmp_path, "c.jsonl", chats)
    with pytest.raises(ValueError, match="prompts of a are texts and those of c are chat"):
        get_task("custom", f"{both[0]},{chat}", 2).problem("train", 0)
