# SPDX-License-Identifier: Apache-2.0
"""Benchmarks count what they say they count: work by hand, and small loads of each."""

import json

import pytest

from tba_jax.bench import (
    accelerator,
    decode,
    rl_step,
    time_to_accuracy,
    train_step,
)
from tba_jax.bench.harness import SHAPES
from tba_jax.models.transformer import TransformerConfig
from tba_jax.planning import roofline


def test_work_of_decoding_by_hand():
    sizes = {"vocab_size": 10, "hidden_size": 4, "num_layers": 1, "mlp_size": 3, "head_dim": 2}
    config = TransformerConfig(**sizes, num_heads=2, num_kv_heads=1, qkv_bias=True)
    # q 16, kv 16, o 16, gate and up 24, down 12; output 40.
    assert roofline.matrix_entries(config) == 124
    # And three norms of 4, biases of 4 (q) and 4 (k, v).
    assert roofline.step_entries(config) == 144
    work = roofline.decode_work(
        config, itemsize=4, num_steps=3, prompt_tokens=5, response_lengths=[2, 3]
    )
    # Tokens see 5 + 6 and 5 + 6 + 7 positions: 29, of 2 (k, v) x 1 head x 2 entries x 4 bytes.
    assert work.num_bytes == 3 * 144 * 4 + 29 * 16
    # Scores and sums: 2 x 2 operations for each of 2 heads x 2 entries.
    assert work.num_flops == 5 * 2 * 124 + 29 * 16
    rates = roofline.Rates(bytes_per_s=work.num_bytes / 2, flops_per_s=work.num_flops)
    assert rates.bound_s(work) == 2.0


def test_flops_of_a_train_step_by_hand():
    config = SHAPES["tiny"]
    # q and o 2 x 32 x 32, k and v 32 x 32, MLP 3 x 32 x 64, of two layers; the tied table.
    inner, table = 2 * (2048 + 1024 + 6144), 128 * 32
    assert roofline.matrix_entries(config) == inner + table
    pairs = 5 * 6 / 2  # a token sees itself and those before it
    # Scores and sums: 2 products x 2 operations, three times, for 4 heads x 8 entries, two layers.
    expected = 3 * (6 * (inner * 5 + table * 3) + 2 * 12 * 32 * pairs)
    sizes = {"num_rows": 3, "prompt_tokens": 2, "response_tokens": 3}
    assert roofline.train_flops(config, **sizes) == expected
    # Three responses to one prompt: its three pairs and two tokens count once.
    shared = roofline.train_flops(config, **sizes, responses_per_prompt=3)
    fewer = 3 * 6 * inner * 5 - 6 * inner * (2 + 3 * 3) + 2 * 12 * 32 * 3 * 2
    assert shared == pytest.approx(expected - fewer)


@pytest.mark.parametrize(("loss", "is_equal"), [(3.001, True), (3.1, False)])
def test_a_side_that_computes_something_else_is_an_error(loss, is_equal, capsys, monkeypatch):
    def run_side(side, job, folder, command, repeat):
        figures = {"step_s": 1.0, "flops_per_s": 2.0, "matmul_flops_per_s": 4.0}
        return {"loss": 3.0 if side == "tba_jax" else loss, **figures}

    monkeypatch.setattr(train_step.harness, "run_side", run_side)
    assert train_step.main(["--repeats=1"]) == int(not is_equal)
    error = capsys.readouterr().err
    assert is_equal or "first step of naive has the loss 3.1, ours 3.0" in error


def check_decode(result):
    assert result["num_slots"] == 16
    # 512 responses that end with a probability of 1/8 at each token, cut at 24: 7.7 on average.
    assert 6 < result["response_length"] < 9.5
    assert 0 < result["roofline_share"] and 0 < result["slot_share"] <= 1


def check_train_step(result):
    naive = result["naive"]
    assert result["tokens_per_s"] == pytest.approx(8 * 96 / result["step_s"])
    assert 0 < result["mfu"] < 1 and 0 < naive["mfu"] < 1
    assert result["temporary_bytes"] < naive["temporary_bytes"]
    # The same weights, batch and loss; float32.
    assert naive["loss"] == pytest.approx(result["loss"], rel=1e-4)


def check_rl_step(result):
    assert all(result[part] > 0 for part in rl_step._PARTS)
    # Few of them end before the limit: with probability of about 1/128 at each token.
    assert 4 < result["mean_response_tokens"] <= 6
    assert result["remat"] == "dots" and result["peers"] == {}


def check_time_to_accuracy(result):
    for side in (result["ours_cold"], result["ours_warm"]):
        assert side["accuracies"][-1][1] >= 0.2
        assert side["from_command_s"] == side["accuracies"][-1][2]
        assert side["from_command_s"] == side["first_step_s"] + side["after_first_step_s"]


LOADS = [
    (
        decode,
        "--shape=tiny --workload=rl --repeats=1 --num_samples=64 --prompt_tokens=8 "
        "--max_new_tokens=24 --num_slots=16",
        check_decode,
    ),
    (
        train_step,
        "--model_shape=tiny --repeats=1 --steps=2 --response_tokens=32 --micro_batch_rows=2",
        check_train_step,
    ),
    (
        rl_step,
        "--model_shape=tiny --prompts=2 --group=4 --micro_batch_rows=4 --prompt_tokens=8 "
        "--response_tokens=6 --peer_micro_batch_rows=4 --repeats=1 --steps=2 --remat=dots",
        check_rl_step,
    ),
    (
        time_to_accuracy,
        "--seeds=1 --accuracy=0.2 --num_steps=4 --eval_period=2 --num_held_out=16 --num_prompts=4",
        check_time_to_accuracy,
    ),
]


@pytest.mark.slow
@pytest.mark.parametrize(("benchmark", "flags", "check"), LOADS, ids=lambda x: str(x)[-30:])
def test_figures_of_a_small_load(benchmark, flags, check, capsys):
    assert benchmark.main([*flags.split(), "--json"]) == 0
    check(json.loads(capsys.readouterr().out.splitlines()[-1]))


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_dry_run_of_the_accelerators_command_goes_through_its_parts(tmp_path):
    names = "device,parity,train_step"
    assert accelerator.main([f"--out={tmp_path}", f"--parts={names}", "--dry_run"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert found["device"]["figures"]["hardware"]["platform"] == "cpu"
    differences = found["parity"]["figures"]["difference_over_norm"]
    assert len(differences) == 3 and max(differences.values()) < 0.05
    assert found["train_step"]["figures"]["compiled_bytes"] > 0
