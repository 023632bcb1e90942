# SPDX-License-Identifier: Apache-2.0
"""A run that trains adapters: the main command, its checkpoints, and the commands that read it."""

import json
import shutil

import jax
import numpy as np
import pytest
from commands import SYNC, lines, run, run_pod
from fake_models import load_folder

from tba_jax.commands import evaluate, export
from tba_jax.commands import saved as saved_run
from tba_jax.run.model_parts import START_MODEL

pytestmark = pytest.mark.slow
LORA = ("lora.rank=4", "optimizer.learning_rate=0.003")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The start model in a folder that a test may change."""
    return shutil.copytree(START_MODEL, tmp_path_factory.mktemp("model") / "start")


@pytest.fixture(scope="module")
def reference(tmp_path_factory, cache, model):
    """An uninterrupted run of 8 steps."""
    workdir = tmp_path_factory.mktemp("lora") / "run"
    done = run(workdir, *SYNC, *LORA, f"model.path={model}", cache=cache)
    assert done.returncode == 0, done.stderr
    return workdir


def size(folder):
    return sum(p.stat().st_size for p in folder.rglob("*") if p.is_file())


# models/test_lora.py has the parts: what is trained, and what is published.
def test_the_policy_learns_and_only_adapters_are_written(reference, model):
    records = [r for r in lines(reference / "metrics.jsonl") if "train/loss" in r]
    assert records[0]["train/kl_reference"] == pytest.approx(0, abs=1e-4)
    assert records[-1]["train/kl_reference"] > 0.1
    assert all(r["train/sampler_gap"] < 1e-4 for r in records)
    # 4 ranks of q, k, v and o are 3 % of the start model; a checkpoint also has two moments.
    whole = (model / "model.safetensors").stat().st_size
    assert size(reference / "checkpoints" / "8" / "train_state") < 0.2 * whole


def test_evaluate_and_export_agree_with_the_run(reference, model, tmp_path, capsys):
    after = json.loads((reference / "report.json").read_text())["eval"]["after"]
    assert evaluate.main([f"--workdir={reference}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["pass_at_1"], result["n"]) == (after["pass_at_1"], after["n"])

    assert export.main([f"--workdir={reference}", f"--out={tmp_path / 'model'}"]) == 0
    config, params, _ = load_folder(str(tmp_path / "model"))
    start_config, base, _ = load_folder(str(model))
    _, _, trained, _, _ = saved_run.load_policy(str(reference))
    assert config == start_config
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(trained))
    changed = {k for k, x in params["layers"].items() if not np.array_equal(x, base["layers"][k])}
    assert changed == {"q", "k", "v", "o"}


def test_hosts_that_divide_the_base_publish_adapters_to_their_own_searchers(cache, tmp_path):
    overrides = (
        "JAX_NUM_CPU_DEVICES=2",
        "mesh.fsdp=2",
        "num_searchers=2",
    )
    code, _, err = run_pod(2, tmp_path / "run", *SYNC, *LORA, *overrides, cache=cache)
    assert code == 0, err
    records = [r for r in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    assert records[0]["train/kl_reference"] == pytest.approx(0, abs=1e-4)
    assert records[-1]["train/kl_reference"] > 0.1
    gaps = [r["train/sampler_gap"] for r in records if r["train/sampler_gap"] is not None]
    assert gaps and max(gaps) < 1e-4
    assert evaluate.main([f"--workdir={tmp_path / 'run'}"]) == 0
