# SPDX-License-Identifier: Apache-2.0
"""Runs of tasks and samplers: adapters, red-teaming, TL;DR, and responses of a server."""

import math

import jax
import numpy as np
import pytest
from commands import SYNC, evaluated, exported, lines, losses, report, run
from fake_models import load_folder
from red_team_models import write_gpt2, write_llama, write_minilm, write_roberta

from tba_jax.models import model as models
from tba_jax.run.model_parts import START_MODEL

# The limit of a command is 600 s.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]
LORA = ("lora.rank=4", "optimizer.learning_rate=0.003")


# models/test_lora.py has the parts: what is trained, and what is published.
def test_the_policy_learns_and_only_adapters_are_written_and_read(cache, tmp_path, capsys):
    reference = tmp_path / "run"
    run(reference, *SYNC, *LORA, cache=cache)
    records = [r for r in lines(reference / "metrics.jsonl") if "train/loss" in r]
    assert records[0]["train/kl_reference"] == pytest.approx(0, abs=1e-4)
    assert records[-1]["train/kl_reference"] > 0.1
    assert all(r["train/sampler_gap"] < 1e-4 for r in records)
    # 4 ranks of q, k, v and o are 3 % of the start model; a checkpoint also has two moments.
    whole = (START_MODEL / "model.safetensors").stat().st_size
    saved = (reference / "checkpoints" / "8" / "train_state").rglob("*")
    assert sum(path.stat().st_size for path in saved if path.is_file()) < 0.2 * whole

    result, after = evaluated(reference, capsys)
    assert (result["pass_at_1"], result["n"]) == (after["pass_at_1"], after["n"])
    config, params = exported(reference, tmp_path / "model")
    start_config, base, _ = load_folder(str(START_MODEL))
    assert config == start_config
    changed = {k for k, x in params["layers"].items() if not np.array_equal(x, base["layers"][k])}
    assert changed == {"q", "k", "v", "o"}
    again = models.describe(str(tmp_path / "model" / "adapter")).load_params()
    jax.tree.map(np.testing.assert_array_equal, again, params)


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
    found = report(workdir)
    for when in ("before", "after"):
        evaluation = found["eval"][when]
        assert evaluation["metric"] == "success_rate"
        assert 0 <= evaluation["success_rate"] <= 1 and 0 < evaluation["distinct_2"] <= 1
    return found


def test_the_toy_trains_and_accounts_for_every_attack(cache, tmp_path):
    options = {"cache": cache, "config": "configs/redteam.py"}
    run(tmp_path / "a", *SYNC, *TOY, "checkpoint.period=2", **options)
    found = check(tmp_path / "a")
    # 8 x 16 attacks for each of two syncs
    assert found["ledger"]["generated"] == 256
    # The gap is that of responses drawn at the policy's own temperature.
    records = lines(tmp_path / "a" / "metrics.jsonl")
    gaps = [x for r in records if (x := r.get("train/sampler_gap")) is not None]
    # float32 rounding over 12 tokens; a trainer that forgets the least length is 0.0037 off
    assert gaps and max(gaps) < 1e-3


@pytest.mark.parametrize("preset", ["gpt2", "llama"])
def test_a_preset_on_shrunken_models(preset, cache, tmp_path):
    write, judge = (write_gpt2, write_roberta) if preset == "gpt2" else (write_llama, write_llama)
    run(
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
    found = check(tmp_path / "run")
    assert math.isfinite(found["eval"]["after"]["cosine_diversity"])
    steps = [r for r in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    # Learned: 0 before the first update.
    assert steps[0]["train/log_z"] == 0.0
    assert steps[0]["train/response_length_mean"] >= 6  # at least 5 tokens, then the end
    if preset == "gpt2":
        assert steps[0]["train/reward_temperature"] == 2.0
    else:
        warmer = [1.0 + 0.2 * i / 2000 for i in range(4)]
        assert [r["train/reference_temperature"] for r in steps] == pytest.approx(warmer)


def test_the_miniature_runs_and_evaluate_agrees(cache, tmp_path, capsys):
    workdir = tmp_path / "run"
    overrides = ("driver=sync", "task.num_eval_prompts=32")
    run(workdir, *overrides, cache=cache, config="configs/tldr.py")
    again, after = evaluated(workdir, capsys)
    figures = (again.keys() & after.keys()) - {"metric"}
    assert figures >= {"win_rate", "gold_reward_mean", "perplexity_diluted", "kl_to_reference"}
    # Another process with other compiler settings: float32 rounding, the same responses.
    assert again["win_rate"] == after["win_rate"]
    for name in figures:
        assert again[name] == pytest.approx(after[name], rel=1e-4)


@pytest.mark.parametrize("trained", [LORA, SYNC], ids=["adapters", "all weights"])
def test_the_policy_learns_from_responses_of_a_server(model, tmp_path, cache, trained):
    server, workdir = f"search.engine={model.url}/v1", tmp_path / "run"
    run(workdir, server, "search.num_slots=32", *trained, cache=cache, timeout=600)
    assert [*model.queues] == ["start"] and not list((workdir / "adapters").glob("*"))
    records = [r for r in lines(workdir / "metrics.jsonl") if "train/loss" in r]
    assert len(records) == 8 and report(workdir)["ledger"]["rejected"] == {}
    # The mean log-ratio of trained responses is of either sign: older versions drew some of them.
    assert abs(records[-1]["train/kl_reference"]) > 0.1
    gaps = [r["train/sampler_gap"] for r in records if r["train/sampler_gap"] is not None]
    # As of searchers in the process with merged adapters.
    assert gaps and all(gap < 1e-4 for gap in gaps)
    assert not [name for r in records for name in r if name.startswith("search/server_")]
    # Searchers receive newer weights.
    assert max(r["sync/version"] for r in records if "sync/version" in r) > 0
