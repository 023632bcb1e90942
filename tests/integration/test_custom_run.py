# SPDX-License-Identifier: Apache-2.0
"""A user's own task through the real command: chat data, TRL's reward functions, bad input."""

import json
import shutil

import pytest
from commands import ROOT, lines, losses, run

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


def test_a_chat_data_set_trains_with_trl_rewards_from_elsewhere(cache, tmp_path):
    model = shutil.copytree(ROOT / "tba_jax" / "assets" / "start_model", tmp_path / "model")
    (model / "chat_template.jinja").write_text(TEMPLATE)
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
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    rewards = tmp_path / "elsewhere" / "rewards.py"
    rewards.parent.mkdir()
    rewards.write_text(REWARDS)
    names = ("accuracy_reward", "format_reward", "length_penalty")
    workdir = tmp_path / "run"
    done = run(
        workdir,
        "task.name=custom",
        f"task.data_path={data}",
        f"task.reward={','.join(f'{rewards}:{name}' for name in names)}",
        "task.reward_weights=1.0,0.5,0.01",
        "task.max_prompt_tokens=64",
        "task.num_eval_prompts=8",
        f"model.path={model}",
        "num_steps=3",
        "eval.period=0",
        "checkpoint.period=0",
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
