# SPDX-License-Identifier: Apache-2.0
"""The TL;DR miniature: a policy, a reward model, a gold reward and distances to the reference."""

import json

import pytest
from commands import run

from tba_jax.commands import evaluate

METRICS = {
    "win_rate",
    "gold_reward_mean",
    "reward_mean",
    "perplexity",
    "perplexity_diluted",
    "kl_to_reference",
    "kl_from_reference",
    "n",
}


@pytest.mark.slow
def test_the_miniature_runs_and_evaluate_agrees(cache, tmp_path, capsys):
    workdir = tmp_path / "run"
    overrides = ("driver=sync", "task.num_eval_prompts=32")
    done = run(workdir, *overrides, cache=cache, config="configs/tldr.py")
    assert done.returncode == 0, done.stderr
    after = json.loads((workdir / "report.json").read_text())["eval"]["after"]
    assert set(after) >= METRICS
    assert evaluate.main([f"--workdir={workdir}", "--json"]) == 0
    again = json.loads(capsys.readouterr().out.splitlines()[-1])
    # Another process with other compiler settings: float32 rounding, the same responses.
    assert again["win_rate"] == after["win_rate"]
    for name in METRICS:
        assert again[name] == pytest.approx(after[name], rel=1e-4)
