# SPDX-License-Identifier: Apache-2.0
"""A user's own task through the real command: chat data, TRL's reward functions, bad input."""

import json
import os
import shutil
import subprocess
import sys

import pytest
from commands import ROOT, environment, lines, losses, run

START_MODEL = ROOT / "tba_jax" / "assets" / "start_model"
TEMPLATE = (
    "{{ bos_token }}{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)

# As published for TRL: message lists in and out, columns as keywords, None where it does not apply.
REWARDS = """
import re

def accuracy_reward(completions, target, **kwargs):
    contents = [completion[0]["content"] for completion in completions]
    return [1.0 if t in c else 0.0 for c, t in zip(contents, target)]

def format_reward(prompts, completions, kind, log_metric=None, **kwargs):
    assert all(p[0]["role"] == "system" and p[-1]["role"] == "user" for p in prompts), prompts
    scores = [len(set(c[0]["content"])) / 20 for c in completions]
    return [None if k == "any" else s for s, k in zip(scores, kind)]

def length_penalty(completion_ids, **kwargs):
    return [-float(len(ids)) for ids in completion_ids]
"""


@pytest.fixture(scope="module")
def chat_model(tmp_path_factory):
    """The start model with a chat template of its own."""
    folder = tmp_path_factory.mktemp("chat") / "model"
    shutil.copytree(START_MODEL, folder)
    (folder / "chat_template.jinja").write_text(TEMPLATE)
    return folder


def write_rows(path, rows):
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


def custom(tmp_path, reward="rewards.py:accuracy_reward", data="data.jsonl", **more):
    return (
        "task.name=custom",
        f"task.data_path={tmp_path / data}",
        f"task.reward={reward}",
        "task.max_prompt_tokens=64",
        "num_steps=3",
        "eval.period=0",
        "checkpoint.period=0",
        *(f"{field}={value}" for field, value in more.items()),
    )


def test_a_chat_data_set_trains_with_trl_rewards_from_elsewhere(cache, tmp_path, chat_model):
    rows = [
        {
            "prompt": [
                {"role": "system", "content": "Add up."},
                {"role": "user", "content": f"{a}+{b}"},
            ],
            "target": str(a + b),
            "kind": "any" if b == 0 else "sum",
        }
        for a in range(10)
        for b in range(5)
    ]
    write_rows(tmp_path / "data.jsonl", rows)
    elsewhere = tmp_path / "elsewhere"
    elsewhere.mkdir()
    (elsewhere / "rewards.py").write_text(REWARDS)
    names = ("accuracy_reward", "format_reward", "length_penalty")
    workdir = tmp_path / "run"
    done = run(
        workdir,
        *custom(tmp_path, ",".join(f"{elsewhere}/rewards.py:{name}" for name in names)),
        "task.reward_weights=1.0,0.5,0.01",
        "task.num_eval_prompts=8",
        f"model.path={chat_model}",
        cache=cache,
        cwd=tmp_path,
    )
    assert done.returncode == 0, done.stderr
    assert "custom: 42 prompts, 8 held out" in done.stdout
    assert sorted(losses(workdir)) == [1, 2, 3]

    report = json.loads((workdir / "report.json").read_text())
    for when in ("before", "after"):
        values = report["eval"][when]
        assert (values["metric"], values["n"], values["num_failed"]) == ("reward_mean", 8, 0)
        parts = [values[f"reward_part_{name}"] for name in names]
        assert 0 <= parts[0] <= 1 and 0 < parts[1] < 1 and parts[2] <= -1
    assert report["ledger"]["rejected"] == {}
    prompt = report["samples"][0]["prompt"]
    assert prompt.startswith("<bos><system>Add up.<user>") and prompt.endswith("<assistant>")

    records = lines(workdir / "metrics.jsonl")
    step = next(r for r in records if "train/loss" in r)
    weighted = [
        step[f"search/reward_part_{n}"] * w for n, w in zip(names, (1, 0.5, 0.01), strict=True)
    ]
    # Not quite the mean reward: format_reward's mean leaves out what it does not apply to.
    assert step["search/reward_mean"] == pytest.approx(sum(weighted), abs=0.25)


def gsm8k_rows():
    """Rows in the format of GSM8K."""
    return [
        {"question": f"Tom has {a} pens and buys {b}. How many?", "answer": f"{a}+{b} #### {a + b}"}
        for a in range(10)
        for b in range(5)
    ]


def chat_rows():
    return [{"messages": [{"role": "user", "content": f"Add {n} and 1."}]} for n in range(50)]


OWN_REWARDS = """
def number(completions, answer, **kwargs):
    return [float(a.split("#### ")[-1] in c) + len(c) / 100 for a, c in zip(answer, completions)]

def polite(completions, **kwargs):
    return [len(message[0]["content"]) / 16 for message in completions]
"""


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("reward", ["number", "polite"])
def test_own_model_data_and_reward_are_one_command_with_three_settings(
    reward, cache, tmp_path, chat_model
):
    """Questions and answers; a chat model with messages."""
    (tmp_path / "rewards.py").write_text(OWN_REWARDS)
    model, data = START_MODEL, tmp_path / "data.jsonl"
    if reward == "number":
        write_rows(data, gsm8k_rows())
    else:
        write_rows(data, chat_rows())
        model = chat_model
    workdir = tmp_path / "run"
    settings = {
        "model.path": model,
        "task.data_path": data,
        "task.reward": f"{tmp_path}/rewards.py:{reward}",
        "num_steps": 2,  # besides the three, for a short test
    }
    flags = [f"--config.{name}={value}" for name, value in settings.items()]
    done = subprocess.run(
        [sys.executable, "-m", "tba_jax.main", "--config=custom", f"--workdir={workdir}", *flags],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=1400,
        env=environment(cache),
    )
    assert done.returncode == 0, done.stderr
    assert done.stderr == "" and "chosen: task.max_prompt_tokens=" in done.stdout
    assert sorted(losses(workdir)) == [1, 2] and (workdir / "report.html").exists()


def slow(*values):
    return pytest.param(*values, marks=pytest.mark.slow)


ROW = {"prompt": "1+1", "target": "2"}
PLAIN = """
def accuracy_reward(completions, target, **kwargs):
    return [float(t in c) for c, t in zip(completions, target)]

def wrong_length(completions, **kwargs):
    return [1.0]

def needs_level(completions, level):
    return [1.0] * len(completions)
"""


@pytest.mark.parametrize(
    ("changes", "text", "message"),
    [
        ({}, '{"text": "1+1", "target": "2"}', "data.jsonl, line 41: no column 'prompt'; got"),
        # The same from further places; their messages are tested without a process as well.
        slow(
            {"reward": "rewards.py:needs_level"}, "", "needs the argument 'level', but the data has"
        ),
        slow(
            {"reward": "rewards.py:wrong_length"},
            "",
            "rewards.py:wrong_length returned 1 rewards for 16 completions; want a list",
        ),
    ],
)
def test_bad_input_is_one_line_that_names_its_place(cache, tmp_path, changes, text, message):
    write_rows(tmp_path / "data.jsonl", [{**ROW, "prompt": f"{i}+1"} for i in range(40)])
    with open(tmp_path / "data.jsonl", "a") as file:
        file.write(text)
    (tmp_path / "rewards.py").write_text(PLAIN)
    overrides = custom(tmp_path, **changes, **{"task.num_eval_prompts": 1})
    done = run(tmp_path / "run", *overrides, cache=cache, cwd=tmp_path)
    assert done.returncode in (1, 2), done.stderr
    errors = [line for line in done.stderr.splitlines() if line.startswith("error: ")]
    assert len(errors) == 1 and message in errors[0], done.stderr
    assert "Traceback" not in done.stderr
    assert not os.path.exists(tmp_path / "run" / "report.json")
