# SPDX-License-Identifier: Apache-2.0
"""Runs whose responses a server samples: the policy learns, and an error of the server is found."""

import json

import pytest
from commands import SYNC, lines, run

from tba_jax.run.model_parts import START_MODEL
from tests.serving.served_model import FaultyServer

# The limit of a command is 600 s. serving/test_vllm.py has the parts.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(700)]
LORA = ("lora.rank=4", "optimizer.learning_rate=0.003")


@pytest.fixture(scope="module")
def model():
    with FaultyServer(START_MODEL).running() as found:
        yield found


def run_with(model, workdir, *overrides, cache):
    server = (f"search.engine={model.url}/v1", "search.num_slots=32")
    done = run(workdir, *LORA, *server, *overrides, cache=cache, timeout=600)
    assert done.returncode == 0, done.stderr
    # Every adapter was unloaded, and its folder removed.
    assert not model.loaded and not list((workdir / "adapters").glob("*"))
    records = [r for r in lines(workdir / "metrics.jsonl") if "train/loss" in r]
    ledger = json.loads((workdir / "report.json").read_text())["ledger"]
    return records, ledger, done.stderr


def test_the_policy_learns_from_responses_of_a_server(model, tmp_path, cache):
    records, ledger, _ = run_with(model, tmp_path / "run", cache=cache)
    assert len(records) == 8 and ledger["rejected"] == {}
    # The mean log-ratio of trained responses is of either sign: older versions drew some of them.
    assert abs(records[-1]["train/kl_reference"]) > 0.1
    gaps = [r["train/sampler_gap"] for r in records if r["train/sampler_gap"] is not None]
    # As of searchers in the process with merged adapters (test_lora_run).
    assert gaps and all(gap < 1e-4 for gap in gaps)
    assert not [name for r in records for name in r if name.startswith("search/server_")]
    # Searchers receive newer weights.
    assert max(r["sync/version"] for r in records if "sync/version" in r) > 0


def test_a_known_error_of_log_probs_is_found_and_failures_lose_nothing(model, tmp_path, cache):
    # The first request asks for one token, before the run.
    model.faults, model.always = ["", 500, "no token ids", "forgotten", 429], "shifted"
    try:
        records, ledger, error = run_with(model, tmp_path / "run", *SYNC, cache=cache)
    finally:
        model.faults, model.always = [], ""
    # 0.05 was added to every log-prob.
    assert [r["train/sampler_gap"] for r in records] == pytest.approx([0.05] * 8, abs=1e-4)
    assert ledger["generated"] == 8 * 4 * 16 and ledger["rejected"] == {}
    names = ("down", "nonsense", "no_model")
    counts = {name: records[0].get(f"search/server_{name}", 0) for name in names}
    assert all(counts.values()), counts
    assert all(f"request(s) failed as server_{name}" in error for name in names)
