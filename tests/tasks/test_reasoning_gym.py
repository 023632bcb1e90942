# SPDX-License-Identifier: Apache-2.0
"""The procedural tasks of reasoning-gym and their reward (extra `reasoning-gym`)."""

import asyncio
import sys

import pytest

from tba_jax.rewards.functions import RewardPool
from tba_jax.rewards.scores import Completions
from tba_jax.tasks.registry import get_task


def test_a_missing_package_names_the_extra(monkeypatch):
    monkeypatch.setitem(sys.modules, "reasoning_gym", None)
    with pytest.raises(ValueError, match=r"pip install 'tba_jax\[reasoning-gym\]'"):
        get_task("reasoning_gym:chain_sum", "")


@pytest.fixture(scope="module")
def chain_sum():
    pytest.importorskip("reasoning_gym")
    return get_task("reasoning_gym:chain_sum", "")


def test_problems_depend_on_split_and_index_alone(chain_sum):
    again = get_task("reasoning_gym:chain_sum", "")
    assert again.problem("train", 9999) == chain_sum.problem("train", 9999)
    prompt, columns = chain_sum.problem("eval", 0)
    assert columns["dataset"] == "chain_sum" and prompt != chain_sum.problem("train", 0)[0]
    assert prompt.endswith("write the final answer between <answer> and </answer>.\n\n")
    assert (chain_sum.size("train"), chain_sum.size("eval")) == (10_000, 1_000)


def test_answers_are_scored_by_the_data_set(chain_sum):
    pool = RewardPool(chain_sum.reward, timeout_s=10.0)
    prompt, columns = chain_sum.problem("eval", 3)
    right = columns["answer"]
    texts = [f"so <answer>0</answer>, no: <answer> {right} </answer>", "<answer>x</answer>", right]
    repeated = {name: [value] * 3 for name, value in columns.items()}
    result = asyncio.run(pool.score(Completions([prompt] * 3, texts, repeated)))
    assert result.reasons == [None] * 3, result.text
    assert result.rewards[0] == 1.0 > result.rewards[1] and result.rewards[2] == 0.0
    # Another question than the one asked is never graded.
    other = Completions(["1 + 1 ="], texts[:1], {k: v[:1] for k, v in repeated.items()})
    result = asyncio.run(pool.score(other))
    assert result.reasons == ["reward_error"]
    assert "generates another question" in result.text
    pool.close()


def test_data_sets_that_cannot_be_used(chain_sum):
    for name, message in (
        ("no_such", "reasoning_gym:no_such: reasoning-gym has no such data set. .*chain_sum"),
        ("composite", "composite: reasoning-gym failed to generate 1,000 problems .Must specify"),
        ("list_functions", "generates different problems for the same seed"),
    ):
        with pytest.raises(ValueError, match=message):
            get_task(f"reasoning_gym:{name}", "")
