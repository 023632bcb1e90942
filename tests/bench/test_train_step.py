# SPDX-License-Identifier: Apache-2.0
"""The train-step benchmark counts what it says, and notices sides that compute something else."""

import json

import pytest

from tba_jax.bench import train_step
from tba_jax.bench.harness import SHAPES
from tba_jax.planning import roofline


def test_flops_by_hand():
    config = SHAPES["tiny"]
    # q and o 2 x 32 x 32, k and v 32 x 32, MLP 3 x 32 x 64, of two layers; the tied table.
    inner, table = 2 * (2048 + 1024 + 6144), 128 * 32
    assert roofline.matrix_entries(config) == inner + table
    pairs = 5 * 6 / 2  # a token sees itself and those before it
    # Scores and sums: 2 products x 2 operations, three times, for 4 heads x 8 entries, two layers.
    expected = 3 * (6 * (inner * 5 + table * 3) + 2 * 12 * 32 * pairs)
    got = roofline.train_flops(config, num_rows=3, prompt_tokens=2, response_tokens=3)
    assert got == expected
    # Three responses to one prompt: its three pairs and two tokens count once.
    shared = roofline.train_flops(
        config, num_rows=3, prompt_tokens=2, response_tokens=3, responses_per_prompt=3
    )
    fewer = 3 * 6 * inner * 5 - 6 * inner * (2 + 3 * 3) + 2 * 12 * 32 * 3 * 2
    assert shared == pytest.approx(expected - fewer)


@pytest.mark.slow
def test_figures_of_a_small_load(capsys):
    argv = ["--model_shape=tiny", "--repeats=1", "--steps=2", "--json"]
    assert train_step.main([*argv, "--response_tokens=32", "--micro_batch_rows=2"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    naive = result["naive"]
    assert result["tokens_per_s"] == pytest.approx(8 * 96 / result["step_s"])
    assert naive["ratio"] == pytest.approx(naive["step_s"] / result["step_s"])
    assert 0 < result["mfu"] < 1 and 0 < naive["mfu"] < 1
    assert result["temporary_bytes"] < naive["temporary_bytes"]
    # The same weights, batch and loss; float32.
    assert naive["loss"] == pytest.approx(result["loss"], rel=1e-4)


@pytest.mark.parametrize(("loss", "is_equal"), [(3.001, True), (3.1, False)])
def test_a_side_that_computes_something_else_is_an_error(loss, is_equal, capsys, monkeypatch):
    def run_side(side, job, folder, command, repeat):
        figures = {"step_s": 1.0, "flops_per_s": 2.0, "matmul_flops_per_s": 4.0}
        return {"loss": 3.0 if side == "tba_jax" else loss, **figures}

    monkeypatch.setattr(train_step.harness, "run_side", run_side)
    assert train_step.main(["--repeats=1"]) == int(not is_equal)
    error = capsys.readouterr().err
    assert is_equal or "first step of naive has the loss 3.1, ours 3.0" in error
