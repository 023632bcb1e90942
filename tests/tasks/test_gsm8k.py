# SPDX-License-Identifier: Apache-2.0
"""The tasks that read question-and-answer files, and the registry."""

import os
import sys
import types

import pytest

from tba_jax.tasks.registry import TASKS, get_task

GSM8K = os.path.join(os.path.dirname(__file__), "..", "..", "..", "shared", "data", "gsm8k")
needs_gsm8k = pytest.mark.skipif(not os.path.isdir(GSM8K), reason="../shared/data/gsm8k is absent")


def write(folder, split, *lines):
    (folder / f"{split}.jsonl").write_text("\n".join(lines) + "\n")


def test_registry_is_what_the_config_allows():
    sources = {"custom": "rows.jsonl"}
    names = [get_task(name, sources.get(name, "")).name for name in TASKS]
    assert names == list(TASKS)
    with pytest.raises(
        ValueError, match="'gsm9k' is unknown. Choose one of arithmetic, custom, gsm8k"
    ):
        get_task("gsm9k", "")
    with pytest.raises(ValueError, match="task arithmetic generates its own problems"):
        get_task("arithmetic", "/data")


@needs_gsm8k
def test_gsm8k_is_the_published_data():
    task = get_task("gsm8k", GSM8K)
    assert (task.size("train"), task.size("eval")) == (7473, 1319)
    prompt, columns = task.problem("train", 0)
    assert prompt == (
        "[MATH_TASK] Problem:\nNatalia sold clips to 48 of her friends in April, and then she sold "
        "half as many clips in May. How many clips did Natalia sell altogether in April and May?"
        "\n\nSolution:"
    )
    assert columns["answer"].endswith("in April and May.\n#### 72")
    prompt, columns = task.problem("eval", 1318)
    assert prompt.startswith("[MATH_TASK] Problem:\nHenry and 3 of his friends order 7 pizzas")
    assert columns["answer"].endswith("#### 14")


def test_math_rows(tmp_path):
    write(tmp_path, "train", r'{"problem": "1+1?", "solution": "$\\boxed{2}$", "level": 1}')
    task = get_task("math", str(tmp_path))
    assert task.size("train") == 1
    prompt, columns = task.problem("train", 0)
    assert prompt == (
        "Problem:\n1+1?\n\nReason step by step, and put the final answer within \\boxed{}.\n\n"
        "Solution:"
    )
    assert columns == {"answer": r"$\boxed{2}$"}
    assert task.response_kind(r"so \boxed{2}") == task.response_kinds[0] == "boxed"
    assert task.response_kind("so 2") == "unboxed"


def user(text):
    return [{"role": "user", "content": text}]


def test_questions_as_a_users_messages(tmp_path):
    write(tmp_path, "train", '{"question": "{1}+1?", "answer": "so 2\\n#### 2"}')
    prompt, columns = get_task("gsm8k", str(tmp_path), chat=True).problem("train", 0)
    assert prompt == user(
        "{1}+1?\n\nReason step by step, and write the final answer on a line of its own, as "
        "#### NUMBER."
    )
    # As in the custom task: reward functions find the messages in the column `prompt`.
    assert columns == {"answer": "so 2\n#### 2", "prompt": prompt}
    write(tmp_path, "test", r'{"problem": "1+1?", "solution": "$\\boxed{2}$"}')
    prompt, columns = get_task("math", str(tmp_path), chat=True).problem("eval", 0)
    assert prompt == user("1+1?\n\nReason step by step, and put the final answer within \\boxed{}.")
    assert columns["prompt"] == prompt


def test_problems_of_math_500_are_never_trained_on(monkeypatch):
    rows = {
        "nlile/hendrycks-MATH-benchmark": ["a", "b", "c"],
        "HuggingFaceH4/MATH-500": ["b", "d"],
    }

    def load_dataset(name, configuration, split):
        return [{"problem": problem, "solution": "s", "level": 1} for problem in rows[name]]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    task = get_task("math", "")
    assert (task.size("train"), task.size("eval")) == (2, 2)
    first, second = (task.problem("train", i)[0] for i in range(2))
    assert "\na\n" in first and "\nc\n" in second


def test_bad_row_is_named(tmp_path):
    good = '{"question": "q", "answer": "#### 1"}'
    write(tmp_path, "train", good, "", '{"question": "q", "answer": 1}')
    with pytest.raises(ValueError, match="line 3: answer = 1, of question, answer; wanted"):
        get_task("gsm8k", str(tmp_path)).size("train")
