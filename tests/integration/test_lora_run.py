# SPDX-License-Identifier: Apache-2.0
"""A run that trains adapters: the main command, its checkpoints, and the commands that read it."""

import json

import jax
import numpy as np
import pytest
from commands import SYNC, lines, run
from fake_models import load_folder

from tba_jax.commands import evaluate, export
from tba_jax.commands import saved as saved_run
from tba_jax.models import model as models
from tba_jax.run.model_parts import START_MODEL

pytestmark = pytest.mark.slow
LORA = ("lora.rank=4", "optimizer.learning_rate=0.003")


# models/test_lora.py has the parts: what is trained, and what is published.
def test_the_policy_learns_and_only_adapters_are_written_and_read(cache, tmp_path, capsys):
    reference = tmp_path / "run"
    done = run(reference, *SYNC, *LORA, cache=cache)
    assert done.returncode == 0, done.stderr
    records = [r for r in lines(reference / "metrics.jsonl") if "train/loss" in r]
    assert records[0]["train/kl_reference"] == pytest.approx(0, abs=1e-4)
    assert records[-1]["train/kl_reference"] > 0.1
    assert all(r["train/sampler_gap"] < 1e-4 for r in records)
    # 4 ranks of q, k, v and o are 3 % of the start model; a checkpoint also has two moments.
    whole = (START_MODEL / "model.safetensors").stat().st_size
    saved = (reference / "checkpoints" / "8" / "train_state").rglob("*")
    assert sum(path.stat().st_size for path in saved if path.is_file()) < 0.2 * whole

    after = json.loads((reference / "report.json").read_text())["eval"]["after"]
    assert evaluate.main([f"--workdir={reference}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["pass_at_1"], result["n"]) == (after["pass_at_1"], after["n"])

    assert export.main([f"--workdir={reference}", f"--out={tmp_path / 'model'}"]) == 0
    config, params, _ = load_folder(str(tmp_path / "model"))
    start_config, base, _ = load_folder(str(START_MODEL))
    trained = saved_run.load_policy(str(reference))[2]
    assert config == start_config
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(trained))
    changed = {k for k, x in params["layers"].items() if not np.array_equal(x, base["layers"][k])}
    assert changed == {"q", "k", "v", "o"}
    again = models.describe(str(tmp_path / "model" / "adapter")).load_params()
    jax.tree.map(np.testing.assert_array_equal, again, params)
