# SPDX-License-Identifier: Apache-2.0
"""All problems of config, data, model and reward are listed at once, before weights are read."""

import json
import subprocess
import sys

import pytest

from tba_jax.config.command_line import override
from tba_jax.run.shared import problems

REWARDS = """
def score(completions, answer, **kwargs):
    return [float(a in c) for a, c in zip(answer, completions)]

def wants_target(completions, target):
    return [0.0 for _ in completions]

def raises(completions, **kwargs):
    return [undefined for _ in completions]

def too_short(completions, **kwargs):
    return []
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("custom")
    rows = [{"question": f"{a} + 1 =", "answer": str(a + 1)} for a in range(40)]
    (folder / "train.jsonl").write_text("\n".join(map(json.dumps, rows)))
    (folder / "bad.jsonl").write_text('{"question": "1"}\n{"question": }\n')
    (folder / "rewards.py").write_text(REWARDS)
    return folder


def command(folder, **fields):
    """A custom command on the start model, with some settings changed or left out (None)."""
    settings = {
        "task.data_path": f"{folder}/train.jsonl",
        "task.columns": "prompt=question",
        "task.reward": f"{folder}/rewards.py:score",
    }
    settings |= {name.replace("__", "."): value for name, value in fields.items()}
    given = (f"--config.{n}={v}" for n, v in settings.items() if v is not None)
    return ["main", "--config=custom", *(text.replace("{}", str(folder)) for text in given)]


BROKEN = {
    "a server that is not there": (
        {
            "search__engine": "openai",
            "search__server": "http://127.0.0.1:9/v1",
            "lora__rank": 4,
            "task__reward": "{}/rewards.py:raises",
        },
        ["config.search.server = 'http://127.0.0.1:9/v1': not reachable", "undefined"],
    ),
    "no data, no reward": (
        {"task__data_path": None, "task__reward": None},
        ["task.data_path = '': task custom needs data", "task.reward = '': task custom has no"],
    ),
    "a misspelt function, a missing model": (
        {"task__reward": "{}/rewards.py:scroe", "model__path": "{}/model"},
        ["there is no 'scroe' in", "/model' is not a folder"],
    ),
    "a missing reward file, a wrong column": (
        {"task__reward": "{}/reward.py:score", "task__columns": "prompt=query"},
        ["no file", "no column 'query', which task.columns names; got answer, question"],
    ),
    "a damaged row, a value out of range": (
        {"task__data_path": "{}/bad.jsonl", "batch__num_prompts": 0},
        ["bad.jsonl, line 2", "batch.num_prompts = 0: must be at least 1"],
    ),
    "a function without its column, groups that cannot be": (
        {"task__reward": "{}/rewards.py:wants_target", "objective__group_size": 16},
        [
            "needs the argument 'target'",
            "samples_per_prompt = 8: a group needs objective.group_size=16",
        ],
    ),
    "two functions that fail, a weight too many": (
        {
            "task__reward": "{}/rewards.py:too_short,{}/rewards.py:nothing",
            "task__reward_weights": (1.0, 1.0, 1.0),
        },
        ["returned 0 rewards for 1", "there is no 'nothing' in", "names 2 functions"],
    ),
    "several rules of one section and of one check": (
        {
            "task__reward": "{}/rewards.py:scroe",
            "search__top_p": 0.5,
            "search__samples_per_prompt": 300,
            "objective__group_size": 301,
        },
        [
            "there is no 'scroe' in",
            "search.top_p = 0.5: objective.name=tb reads ratios",
            "samples_per_prompt = 300: a group",
            "replay.capacity_per_prompt = 100: must hold",
        ],
    ),
    "lengths above the context, no device for searchers": (
        {
            "task__max_prompt_tokens": 5000,
            "task__num_eval_prompts": 8,
            "placement": "split",
            "mesh__data": 64,
        },
        ["was made for", "sees"],
    ),
}


@pytest.mark.parametrize("name", BROKEN)
def test_all_problems_of_a_command_are_listed(folder, name):
    fields, expected = BROKEN[name]
    found = problems(override(None, command(folder, **fields)[1:]))
    missing = [text for text in expected if not any(text in line for line in found)]
    assert not missing and len(found) == len(expected), found


def test_a_sound_command_has_no_problems(folder):
    assert problems(override(None, command(folder)[1:])) == []


QUICK = "a misspelt function, a missing model"


def test_the_command_prints_them_and_ends_before_weights_are_read(folder, tmp_path):
    fields, expected = BROKEN[QUICK]
    done = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", *command(folder, **fields)[1:]],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 2
    first, *lines = done.stderr.rstrip().splitlines()
    assert first == f"error: {len(expected)} problems:"
    # The other lines are tracebacks of the user's functions.
    found = [line for line in lines if line.startswith("- ")]
    assert len(found) == len(expected), lines
    assert all(any(text in line for line in found) for text in expected), found
    assert not any("tba_jax/" in line for line in lines if line.startswith("  File"))
    assert "loading the model" not in done.stdout and not (tmp_path / "runs").exists()
