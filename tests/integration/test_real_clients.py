# SPDX-License-Identifier: Apache-2.0
"""Real clients, each in the venv of an interpreter that a variable of the environment names.

The variables are TBA_JAX_TRL, TBA_JAX_VERIFIERS and TBA_JAX_OPENENV (docs/guide/serve.md).
"""

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
from commands import lines, report, run
from fake_models import START_MODEL_LOGIT, logprob_bound, scored_tokens

from tests.serving.served_model import TEMPLATE, folder_with_template

SCRIPT = Path(__file__).with_name("real_clients.py")
pytestmark = pytest.mark.slow


def python_of(name):
    python = os.environ.get(f"TBA_JAX_{name.upper()}")
    return python or pytest.skip(f"TBA_JAX_{name.upper()} names no interpreter")


@pytest.mark.parametrize(("name", "num", "path"), [("trl", 8, ""), ("openenv", 2, "/v1")])
def test_training_clients_get_the_tokens_and_log_probs_of_the_model(name, num, path, model):
    command = [python_of(name), "-P", SCRIPT, name, model.url + path, model.folder]
    env = os.environ | {"PYTHONPATH": ""}
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, env=env)
    assert done.returncode == 0, done.stderr
    rows = json.loads(done.stdout.splitlines()[-1])
    assert len(rows) == num
    for ids, is_sampled, logprobs in rows:
        tokens, mask = np.array(ids, np.int32), np.array(is_sampled, bool)
        assert mask.any()
        scored = scored_tokens(model.config, model.params, tokens[:1], tokens[1:])[mask[1:]]
        bound = logprob_bound(model.config, len(ids), START_MODEL_LOGIT)
        np.testing.assert_allclose(np.array(logprobs)[mask], scored, rtol=0, atol=bound)


@pytest.mark.timeout(900)
def test_a_taskset_of_verifiers_is_data_and_environment_of_a_run(cache, tmp_path, monkeypatch):
    """Episodes of two paths: the harness drops its history after a turn."""
    python, workdir = tmp_path / "python", tmp_path / "run"
    path = f"PYTHONPATH={SCRIPT.parent} exec {python_of('verifiers')}"
    python.write_text(f'#!/bin/sh\n{path} "$@"\n')
    python.chmod(0o700)
    monkeypatch.setenv("TBA_JAX_VERIFIERS", str(python))
    # The prompts of chats begin with the token of the beginning.
    folder = folder_with_template(tmp_path / "model", "{{ bos_token }}" + TEMPLATE)
    task = f"task.environment=verifiers:real_clients model.path={folder} eval.period=0 "
    task += "task.num_eval_prompts=1 driver=sync "
    task += "num_steps=1 batch.num_prompts=1 objective.group_size=2 reward.timeout_s=300 "
    task += "search.samples_per_prompt=2 search.num_slots=2 search.max_new_tokens=60"
    run(workdir, *task.split(), cache=cache, timeout=800)
    ledger = report(workdir)["ledger"]
    assert ledger["rejected"] == {} and ledger["generated"] == 2
    (record,) = (r for r in lines(workdir / "metrics.jsonl") if "train/loss" in r)
    assert record["search/episode_paths"] == 2 and record["search/reward_mean"] == 2.5
    # Forked episodes: as of agents whose paths are scored (test_agents).
    assert record["train/sampler_gap"] < 1e-4
