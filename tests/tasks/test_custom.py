# SPDX-License-Identifier: Apache-2.0
"""The custom task: columns, chats, the held-out split, and rows that cannot be used."""

import json

import pytest

from tba_jax.tasks.registry import get_task


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
    # Another order of the file, and more held out: the same prompts, and others.
    path = write(tmp_path / "b.jsonl", rows[::-1])
    assert {p for p, _ in problems(get_task("custom", path, 10))[1]} == {p for p, _ in held_out}
    assert {p for p, _ in problems(get_task("custom", path, 30))[1]} > {p for p, _ in held_out}
    path = write(tmp_path / "c.jsonl", rows[:3])
    for num, message in ((0, "has no test split"), (3, "has 3 rows and no test split, so no row")):
        with pytest.raises(ValueError, match=f"task.num_eval_prompts={num}: .* {message}"):
            get_task("custom", path, num).size("train")


CHAT = [{"role": "user", "content": "1+1?"}]


def test_texts_become_a_users_messages_and_chats_stay_as_they_are(tmp_path):
    path = write(tmp_path / "a.jsonl", [{"prompt": f"p{i}", "i": i} for i in range(30)])
    (text, columns), *_ = problems(get_task("custom", path, 10))[1]
    (messages, more), *_ = problems(get_task("custom", path, 10, chat=True))[1]
    # The same rows are held out, and a prompt differs in its form alone.
    assert messages == [{"role": "user", "content": text}]
    assert more == {**columns, "prompt": messages}
    path = write(tmp_path / "b.jsonl", [{"prompt": [*CHAT, *CHAT]}, {"prompt": CHAT}])
    assert problems(get_task("custom", path, 1, chat=True)) == problems(get_task("custom", path, 1))


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"title": "q", "gold": "1"}, "line 2: no column 'prompt'; got gold, .*columns="),
        ({"prompt": "q"}, "line 2: no column 'gold', which .*line 1 has. Write null"),
        ({"prompt": "", "gold": "1"}, "line 2: 'prompt' is ''; wanted text, or a list"),
        ({"prompt": CHAT, "gold": "1"}, "line 2: the prompt is of kind 'chat .*line 1 it is 'text"),
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


def test_messages_are_a_prompt_without_their_last_answer(tmp_path):
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "u"}]
    answer = {"role": "assistant", "content": "a"}
    other = [{"role": "user", "content": "v"}]
    rows = [{"messages": [*messages, answer]} for messages in (asked, other)]
    task = get_task("custom", write(tmp_path / "a.jsonl", rows), 1)
    for messages, columns in (task.problem("train", 0), task.problem("eval", 0)):
        assert messages in (asked, other)
        assert columns == {"prompt": messages, "reference_answer": "a"}
