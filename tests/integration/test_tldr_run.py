# SPDX-License-Identifier: Apache-2.0
"""TL;DR runs: the Pythia presets on shrunken random models of their classes, and the miniature."""

import json
import math
import shutil

import numpy as np
import pytest
from commands import ROOT, lines, losses, run
from fake_models import load_folder, random_params, write_word_tokenizer

from tba_jax.commands import evaluate
from tba_jax.models.hf import config_json, folders, hf_weights

GOLDEN = ROOT / "tests" / "golden"
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


def write_models(folder):
    """A GPT-NeoX policy, a reward model and a gold one of its vocabulary; pad is not eos."""
    sources = {"policy": "gpt_neox", "reward": "gpt_neox_reward", "gold": "gpt_neox_reward"}
    for name, source in sources.items():
        shutil.copytree(GOLDEN / source, folder / name)
        size = folders.load_config(folder / name)["vocab_size"]
        write_word_tokenizer(folder / name, size, eos=1, pad=0)
    config, _, hf_config = load_folder(folder / "gold")
    assert config.family == "gpt_neox" and config.num_labels == 1
    hf_weights.save(folder / "gold", config, random_params(config, seed=5), hf_config)
    assert config_json.transformer_config(hf_config) == config
    return size


def write_data(folder, size):
    """Posts of one to nine words with a human summary of two."""
    rng = np.random.default_rng(0)
    folder.mkdir()
    for split, count in (("train", 24), ("test", 8)):
        rows = []
        for _ in range(count):
            words = [f"<{i}>" for i in rng.integers(2, size, rng.integers(3, 12))]
            rows.append({"prompt": " ".join(words[:-2]), "completion": " ".join(words[-2:])})
        text = "".join(json.dumps(row) + "\n" for row in rows)
        (folder / f"{split}.jsonl").write_text(text)


@pytest.mark.slow
def test_a_pythia_preset_trains_on_shrunken_models(cache, tmp_path):
    """Policy, reward model and judge each divided over two devices, where all take turns."""
    write_data(tmp_path / "data", write_models(tmp_path))
    overrides = (
        f"task.data_path={tmp_path / 'data'}",
        f"model.path={tmp_path / 'policy'}",
        f"reward.model_path={tmp_path / 'reward'}",
        f"eval.gold={tmp_path / 'gold'}",
        # Posts of more than six tokens are skipped, as long ones are in the real data.
        "task.max_prompt_tokens=6",
        "task.num_eval_prompts=0",
        "placement=shared",
        "num_steps=4",
        "sync_period=2",
        "batch.num_prompts=2",
        "objective.group_size=4",
        "search.samples_per_prompt=4",
        "search.num_slots=32",
        "search.initial_fill=16",
        "search.max_new_tokens=8",
        "eval.period=0",
        "optimizer.learning_rate=1e-2",  # so that four steps are seen
        "JAX_NUM_CPU_DEVICES=2",
        "mesh.fsdp=2",
        "search.num_devices=2",
    )
    workdir = tmp_path / "run"
    done = run(workdir, *overrides, cache=cache, config="configs/tldr.py:pythia410m", timeout=300)
    assert done.returncode == 0, done.stderr
    found = losses(workdir)
    assert sorted(found) == [1, 2, 3, 4] and all(math.isfinite(x) for x in found.values())
    # The schedule is the paper's: beta falls from 1 towards 0.05 by 0.95 / 128 a step.
    betas = [r["train/beta"] for r in lines(workdir / "metrics.jsonl") if "train/beta" in r]
    np.testing.assert_allclose(betas, [1 - 0.95 * step / 128 for step in range(4)], rtol=1e-5)
    report = json.loads((workdir / "report.json").read_text())
    before, after = (report["eval"][when] for when in ("before", "after"))
    assert set(before) >= METRICS and before["metric"] == "win_rate"
    assert before["kl_to_reference"] == pytest.approx(0.0, abs=1e-5)
    assert before["num_skipped"] == report["skipped_prompts"]["eval"] > 0
    assert 1 < before["perplexity_diluted"] < before["perplexity"]
    assert after["kl_to_reference"] > 0
    # Hardly a random response ends by itself within 8 of 48 words: most rewards are the penalty.
    records = lines(workdir / "metrics.jsonl")
    searched = [r["search/reward_mean"] for r in records if "search/reward_mean" in r]
    assert searched and searched[0] < -0.5
    samples = [s for s in report["samples"] if s["after_reward"] is not None]
    assert samples and all(math.isfinite(s["after_reward"]) for s in samples)
    assert "win rate" in (workdir / "report.html").read_text()


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
