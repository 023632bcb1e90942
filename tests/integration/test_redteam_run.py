# SPDX-License-Identifier: Apache-2.0
"""Task redteam end to end: the toy, and every real preset on models of its classes, shrunken."""

import json
import math

import pytest
from commands import SYNC, lines, losses, run
from red_team_models import write_gpt2, write_llama, write_minilm, write_roberta

TOY = (
    "num_steps=4",
    "sync_period=2",
    "batch.num_prompts=4",
    "task.num_eval_prompts=1",
    "eval.num_samples=32",
    "eval.period=0",
)

# The size of everything but the path of the code. Five of the golden models have 48 tokens, 16
# channels, and positions for 128 tokens (encoders: 24).
SHRUNKEN = (
    "num_steps=4",
    "sync_period=2",
    "num_searchers=1",
    "placement=shared",
    "batch.num_prompts=2",
    "objective.group_size=4",
    "search.samples_per_prompt=8",
    "search.max_new_tokens=10",
    "search.initial_fill=16",
    *(f"model.{name}_dtype=float32" for name in ("param", "compute")),
    "eval.num_samples=16",
    "eval.period=0",
)


def check(workdir, num_steps=4):
    found = losses(workdir)
    assert sorted(found) == list(range(1, num_steps + 1))
    assert all(math.isfinite(loss) for loss in found.values())
    report = json.loads((workdir / "report.json").read_text())
    for when in ("before", "after"):
        evaluation = report["eval"][when]
        assert evaluation["metric"] == "success_rate"
        assert 0 <= evaluation["success_rate"] <= 1 and 0 < evaluation["distinct_2"] <= 1
    return report


@pytest.mark.slow
def test_the_toy_trains_and_accounts_for_every_attack(cache, tmp_path):
    options = {"cache": cache, "config": "configs/redteam.py"}
    done = run(tmp_path / "a", *SYNC, *TOY, "checkpoint.period=2", **options)
    assert done.returncode == 0, done.stderr
    report = check(tmp_path / "a")
    # 8 x 16 attacks for each of two syncs
    assert report["ledger"]["generated"] == 256
    # The gap is that of responses drawn at the policy's own temperature.
    records = lines(tmp_path / "a" / "metrics.jsonl")
    gaps = [x for r in records if (x := r.get("train/sampler_gap")) is not None]
    # float32 rounding over 12 tokens; a trainer that forgets the least length is 0.0037 off
    assert gaps and max(gaps) < 1e-3


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_a_preset_on_shrunken_models(preset, cache, tmp_path):
    write, judge = (write_gpt2, write_roberta) if preset == "gpt2" else (write_llama, write_llama)
    done = run(
        tmp_path / "run",
        *SHRUNKEN,
        f"model.path={write(tmp_path / 'attacker')}",
        f"victim.path={write(tmp_path / 'victim')}",
        *(["victim.template=do {attack}: "] if preset == "gpt2" else []),
        f"classifier.path={judge(tmp_path / 'judge')}",
        f"eval.embedding_path={write_minilm(tmp_path / 'minilm')}",
        cache=cache,
        config=f"configs/redteam.py:{preset}",
    )
    assert done.returncode == 0, done.stderr
    report = check(tmp_path / "run")
    assert math.isfinite(report["eval"]["after"]["cosine_diversity"])
    steps = [r for r in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    # Learned: 0 before the first update.
    assert steps[0]["train/log_z"] == 0.0
    assert steps[0]["train/response_length_mean"] >= 6  # at least 5 tokens, then the end
    if preset == "gpt2":
        assert steps[0]["train/reward_temperature"] == 2.0
    else:
        warmer = [1.0 + 0.2 * i / 2000 for i in range(4)]
        assert [r["train/reference_temperature"] for r in steps] == pytest.approx(warmer)
