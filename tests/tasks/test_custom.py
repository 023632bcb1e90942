# SPDX-License-Identifier: Apache-2.0
"""Data of the user: columns, chats, the held-out split, mixtures, and rows that cannot be used."""

import collections
import json
import math
from typing import Any

import numpy as np
import pytest
from opened_tasks import get_task

from tba_jax.flow.trajectory import Prompt
from tba_jax.rewards.scores import Grader, Score
from tba_jax.tasks.config import template_options
from tba_jax.tasks.custom import data_sets


def write(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def problems(task):
    splits = ("train", "eval")
    return tuple([task.problem(split, i) for i in range(task.size(split))] for split in splits)


def test_folder_with_both_splits(tmp_path):
    write(tmp_path / "train.jsonl", [{"prompt": "p", "gold": [1, {"k": None}], "completion": "c"}])
    write(tmp_path / "test.jsonl", [{"prompt": "q", "gold": 2.5}])
    train, held_out = problems(get_task("custom", str(tmp_path)))
    # `completion` is dropped: TRL does not pass it on either.
    assert (train, held_out) == ([("p", {"gold": [1, {"k": None}]})], [("q", {"gold": 2.5})])
    write(tmp_path / "test.jsonl", [{"prompt": "q"}])
    with pytest.raises(ValueError, match=r"test.jsonl, line 1: no column 'gold', which .*train"):
        get_task("custom", str(tmp_path)).size("train")


def test_rows_are_held_out_by_their_prompts_alone(tmp_path):
    rows = [{"prompt": f"p{i % 80}", "i": i} for i in range(100)]  # twenty prompts occur twice
    train, held_out = problems(get_task("custom", write(tmp_path / "a.jsonl", rows), 10))
    assert len(train) + len(held_out) == 100 and 10 <= len(held_out) <= 11
    assert not {p for p, _ in train} & {p for p, _ in held_out}
    assert [c["i"] for _, c in train] == sorted(c["i"] for _, c in train)
    # Another order of the file: the same prompts.
    path = write(tmp_path / "b.jsonl", rows[::-1])
    assert {p for p, _ in problems(get_task("custom", path, 10))[1]} == {p for p, _ in held_out}
    path = write(tmp_path / "c.jsonl", rows[:3])
    for num in (0, 3):
        with pytest.raises(ValueError, match=f"prompts={num}: .* has 3 rows and no test split"):
            get_task("custom", path, num).size("train")


CHAT = [{"role": "user", "content": "1+1?"}]


def test_texts_become_a_users_messages_and_chats_stay_as_they_are(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "i": i} for i in range(30)])
    (text, columns), *_ = problems(get_task("custom", path, 10))[1]
    (messages, more), *_ = problems(get_task("custom", path, 10, chat=True))[1]
    # The same rows are held out, and a prompt differs in its form alone.
    assert messages == [{"role": "user", "content": text}]
    assert more == {**columns, "prompt": messages}
    path = write(tmp_path / "b.jsonl", [{"prompt": [*CHAT, *CHAT]}, {"prompt": "1+1?"}])
    assert problems(get_task("custom", path, 1, chat=True)) == problems(get_task("custom", path, 1))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "q", "gold": "1"}, "line 2: no column 'prompt'; got gold, .*columns="),
        ({"prompt": "q"}, "line 2: no column 'gold', which .*line 1 has. Write null"),
        ({"prompt": [{"role": "user"}], "gold": "1"}, r"line 2: 'prompt' is \[{'role': 'us"),
        ({"prompt": "q", "gold": float("nan")}, "line 2: column 'gold' holds nan, a float; wanted"),
        ({"prompt": "q", "gold": "1", "prompts": 1}, "line 2: column 'prompts' has the name of"),
    ],
)
def test_a_row_that_cannot_be_used_is_named(tmp_path, row, message):
    path = write(tmp_path / "a.jsonl", [{"prompt": "p", "gold": "1"}, row])
    with pytest.raises(ValueError, match=message):
        get_task("custom", path, 1).size("train")


def test_columns_can_have_other_names(tmp_path):
    rows = [{"question": f"q{i}", "answer": str(i), "hint": "h"} for i in range(4)]
    path = write(tmp_path / "a.jsonl", rows)
    task = get_task("custom", path, 1, columns="prompt=question, solution=answer")
    prompt, columns = task.problem("train", 0)
    assert prompt.startswith("q") and columns == {"solution": prompt[1:], "hint": "h"}
    with pytest.raises(ValueError, match="no column 'text', which task.columns names; got answer"):
        get_task("custom", path, 1, columns="prompt=text").size("train")
    # Messages are a prompt without their last answer.
    answer = {"role": "assistant", "content": "a"}
    path = write(
        tmp_path / "b.jsonl",
        [{"messages": [*CHAT, answer]}] * 3 + [{"messages": [*CHAT, *CHAT, answer]}],
    )
    messages, columns = get_task("custom", path, 1).problem("train", 0)
    assert messages in (CHAT, [*CHAT, *CHAT])
    assert columns == {"prompt": messages, "reference_answer": "a"}


@pytest.fixture
def both(tmp_path):
    a = write(tmp_path / "a.jsonl", [{"prompt": f"a{i}", "answer": str(i)} for i in range(40)])
    b = write(tmp_path / "b.jsonl", [{"prompt": f"b{i}", "hint": "h"} for i in range(10)])
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
    where = task.place(
        "train", problems.index(("b7", {"answer": None, "hint": "h", "data_set": "b"}))
    )
    assert where == f"{b}, line 8"
    # Functions see the columns of all sets.
    assert all(set(columns) == {"answer", "hint", "data_set"} for _, columns in problems)
    # Without weights, every row occurs once.
    assert get_task("custom", ",".join(both), 2).size("train") == 39 + 9


def test_options_of_the_chat_template():
    found = template_options("thinks=false, effort=low, n=[1, 'a, b']")
    assert found == {"thinks": False, "effort": "low", "n": [1, "a, b"]}
    assert template_options(True) == template_options("True") == {}
    for text in ("yes", "a", "a=", "a=1)+f(b=2", "1, a=2", "a=f()"):
        with pytest.raises(ValueError, match="--chat = .*: must be True, False, or options"):
            template_options(text, "--chat")


def test_rewards_are_reported_for_each_set():
    class Rewards:
        async def score(self, completions):
            return [Score(1.0), Score(None, "reward_none"), Score(3.0)]

    rewards: Any = Rewards()
    grader = Grader(rewards, lambda rows: ["x"] * len(rows), lambda text: None, "", ("a", "b"))
    ids = np.zeros(1, np.int32)
    prompts = [Prompt(i, "p", ids, {"data_set": name}) for i, name in enumerate("aab")]
    first, second, third = [grade.parts for grade in grader.grade(prompts, [ids] * 3, [True] * 3)]
    assert first["a"] == 1.0 and third["b"] == 3.0
    assert all(map(math.isnan, [first["b"], *second.values(), third["a"]]))


def test_weights_names_and_forms_of_sets_must_agree(both, tmp_path):
    with pytest.raises(ValueError, match="some data sets have a weight and some have none"):
        data_sets("a.jsonl:0.5,b.jsonl")
    assert data_sets("hf://name:main") == {"hf://name:main": 0.0}
    (tmp_path / "other").mkdir()
    same = write(tmp_path / "other" / "a.jsonl", [{"prompt": "x"}, {"prompt": "y"}])
    with pytest.raises(ValueError, match="two have the same name"):
        get_task("custom", f"{both[0]},{same}", 2)
    chat = write(tmp_path / "c.jsonl", [{"prompt": CHAT}, {"prompt": [*CHAT, *CHAT]}])
    assert get_task("custom", f"{both[0]},{chat}", 2).problem("train", 0)[0][0]["role"] == "user"
