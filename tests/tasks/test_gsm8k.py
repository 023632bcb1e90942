# SPDX-License-Identifier: Apache-2.0
"""The tasks that read question-and-answer files, and the registry."""

import sys
import types

import pytest
from opened_tasks import get_task

from tba_jax.settings import ConfigError
from tba_jax.tasks.config import TaskSettings
from tba_jax.tasks.registry import TASKS


def test_registry_is_what_the_config_allows():
    assert [get_task(name).name for name in TASKS] == list(TASKS)
    with pytest.raises(ValueError, match="'gsm9k' is unknown. Choose one of arithmetic, custom,"):
        get_task("gsm9k")
    with pytest.raises(ConfigError, match="task arithmetic generates its own problems"):
        TaskSettings("arithmetic", "/data").check()


def test_rows_become_prompts_or_a_users_messages(tmp_path):
    row = r'{"problem": "{1}+1?", "solution": "$\\boxed{2}$", "level": 1}'
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text(row + "\n")
    task = get_task("math", str(tmp_path))
    ask = "{1}+1?\n\nReason step by step, and put the final answer within \\boxed{}."
    answer = {"answer": r"$\boxed{2}$"}
    assert task.problem("train", 0) == (f"Problem:\n{ask}\n\nSolution:", answer)
    assert task.response_kind(r"so \boxed{2}") == task.response_kinds[0] == "boxed"
    # As in the custom task: reward functions find the messages in the column `prompt`.
    user = [{"role": "user", "content": ask}]
    found = get_task("math", str(tmp_path), chat=True).problem("eval", 0)
    assert found == (user, {**answer, "prompt": user})
    for split in ("train", "test"):
        (tmp_path / f"{split}.jsonl").write_text('{"question": "1+1?", "answer": "2\\n#### 2"}\n')
    prompt, columns = get_task("gsm8k", str(tmp_path)).problem("eval", 0)
    assert (prompt, columns["answer"]) == ("[MATH_TASK] Problem:\n1+1?\n\nSolution:", "2\n#### 2")


def test_problems_of_math_500_are_never_trained_on(monkeypatch):
    rows = {"nlile/hendrycks-MATH-benchmark": "abc", "HuggingFaceH4/MATH-500": "bd"}

    def load_dataset(name, configuration, split):
        return [{"problem": problem, "solution": "s", "level": 1} for problem in rows[name]]

    monkeypatch.setitem(sys.modules, "datasets", types.SimpleNamespace(load_dataset=load_dataset))
    task = get_task("math", "")
    assert (task.size("train"), task.size("eval")) == (2, 2)
    first, second = (task.problem("train", i)[0] for i in range(2))
    assert "\na\n" in first and "\nc\n" in second
