# SPDX-License-Identifier: Apache-2.0
"""The publication benchmark: shares by hand, and that its large model is what it says."""

import json

import pytest

from tba_jax.bench import weight_sync
from tba_jax.models.transformer import num_params


def test_the_large_tree_has_more_than_a_gigabyte():
    _, model, shape = weight_sync._load("large", "memory")
    assert model is None and 1e9 < 4 * num_params(shape) < 1.2e9


@pytest.mark.parametrize("transport", ["memory", "checkpoint"])
def test_shares_are_of_the_loop_that_publishes(transport, tmp_path):
    job = {"model": "tiny", "transport": transport, "steps": 3, "workdir": str(tmp_path)}
    figures = weight_sync.measure_case(job)
    assert figures["num_published"] == 4 and 1 <= figures["num_delivered"] <= 4
    assert 0 < figures["pause_share"] < 1
    # step_s is of the loop without its pauses, so both give the loop's time.
    pauses = figures["pause_share"] * 3 * figures["step_s"] / (1 - figures["pause_share"])
    assert pauses <= 3 * figures["max_pause_s"] * 1.0001
    assert figures["num_bytes"] == 4 * num_params(weight_sync.SHAPES["tiny"])


def test_the_worst_model_counts(monkeypatch, capsys):
    shares = iter([0.004, 0.03, 0.02, 0.06])

    def run_side(side, job, folder, env=None, *, command):
        about = {"first_pause_s": 1.0, "platform": "cpu", "device": "cpu", "num_bytes": 1}
        about |= {"pause_s": 0.1, "step_s": 1.0, "delivery_s": 0.1, "cost_share": 0.0}
        return {"pause_share": next(shares), "num_published": 2, "num_delivered": 2, **about}

    monkeypatch.setattr(weight_sync.processes, "run_side", run_side)
    assert weight_sync.main(["--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert result["pause_share"] == {"memory": 0.02, "checkpoint": 0.06}
    assert not result["within_aims"]
    assert list(result["cases"]) == [
        *("embedded_memory", "embedded_checkpoint"),
        *("large_memory", "large_checkpoint"),
    ]
