# SPDX-License-Identifier: Apache-2.0
"""Tasks that generate their problems: arithmetic, reasoning-gym, and the miniature of TL;DR."""

import asyncio
import json
import re
import sys

import pytest
from opened_tasks import get_task

from tba_jax.rewards.functions import RewardPool
from tba_jax.rewards.scores import Completion
from tba_jax.tasks import arithmetic, tldr_toy

TASK = arithmetic.Arithmetic()


def test_problems_are_the_published_ones():
    # Made by this module when the start model was pretrained. They may never change: the start
    # model and every published figure belong to these problems.
    assert arithmetic.problem(0, "train") == ("8+7-8+4-4+7", 14)
    assert arithmetic.problem(10**9, "train") == ("4-2+4-3+8+1", 12)
    assert TASK.problem("eval", 0) == ("5+9+2-7-9+9", {"answer": "9"})


def test_problems_have_right_answers_and_held_out_ones_are_never_trained_on():
    held_out = {TASK.problem("eval", i)[0] for i in range(TASK.size("eval"))}
    assert len(held_out) == TASK.size("eval") == 1024
    train = dict(arithmetic.problem(i, "train") for i in range(5000))
    assert not held_out & set(train)
    for expression, answer in train.items():
        totals = [eval(expression[: 2 * n + 1]) for n in range(1, 6)]
        assert re.fullmatch("[1-9]([+-][1-9]){5}", expression) and answer == totals[-1]
        assert all(0 <= t <= 20 for t in totals)


def test_response_kind():
    worked, wrong, hasty = ":12,9,17,11,13", ":1,1,1,1,1", "=-3"  # the kind is the form
    kinds = [TASK.response_kind(text) for text in (worked, wrong, hasty, ":12,9,17,11", "=13 ")]
    assert kinds == ["worked", "worked", "hasty", None, None]
    assert TASK.response_kinds == ("worked", "hasty")


def test_data_sets_that_cannot_be_used(chain_sum, monkeypatch):
    for name, message in (
        ("no_such", "cannot generate 1,000 problems (.*no_such.*). Choose .*chain_sum"),
        ("list_functions", "generates different problems for the same seed"),
    ):
        with pytest.raises(ValueError, match=message):
            get_task(f"reasoning_gym:{name}", "")
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
    result = asyncio.run(pool.score([Completion(prompt, text, columns) for text in texts]))
    first, second, third = (score.reward for score in result)
    assert first == 1.0 > second and third == 0.0, result
    # Another question than the one asked is never graded.
    (score,) = asyncio.run(pool.score([Completion("1 + 1 =", texts[0], columns)]))
    assert score.reason == "reward_error" and "generates another question" in score.text
    pool.close()


def test_rows_of_the_data_set_are_prompts_with_a_human_reference(tmp_path):
    row = {"prompt": "SUBREDDIT: r/x\n\nPOST: long\n\nTL;DR:", "completion": " short"}
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(json.dumps(row) + "\n")
    task = get_task("tldr", str(tmp_path))
    assert task.problem("train", 0) == (row["prompt"], {"answer": " short"})
    assert task.response_kind(" one\ntwo") == "several_paragraphs"
    (message,), columns = get_task("tldr", str(tmp_path), chat=True).problem("train", 0)
    assert message["content"].endswith("one short paragraph.\n\nSUBREDDIT: r/x\n\nPOST: long")
    assert columns == {"answer": " short", "prompt": [message]}
    (tmp_path / "train.jsonl").write_text('{"prompt": "x"}\n')
    with pytest.raises(ValueError, match="train.jsonl, line 1: .* text in column 'completion'"):
        get_task("tldr", str(tmp_path)).size("train")


def test_posts_are_the_same_on_every_machine():
    # Written down when the task was made: Python's random() never changes for a seed.
    assert tldr_toy.problem(0, "eval") == ("bmhmbmlhbbihibhhhmhhmihi", "hbhmgi")
    assert tldr_toy.problem(1, "train") == ("piiipcpcibbpiccpipaiaaii", "iocp")
    posts = {tldr_toy.problem(i, s)[0] for s in ("train", "eval") for i in range(500)}
    assert len(posts) == 1000 and {*map(len, posts)} == {tldr_toy.POST_CHARS}
