# SPDX-License-Identifier: Apache-2.0
"""Benchmarks count what they say; a result has its command, and a failed side is one line."""

import datetime
import importlib
import json
import shlex

import pytest

from tba_jax.bench import accelerator, harness
from tba_jax.bench.harness import SHAPES
from tba_jax.commands.entry_point import make_parser
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


def test_a_result_has_its_command_date_and_table(capsys):
    def measure(args, folder):
        assert not list(folder.iterdir())
        other = {"run_s": 2.5, "used_bytes": 2**21}
        return {"run_s": 1.0 * args.repeats, "workload": {"size": 3}, "naive": other}

    parser = make_parser("bench.sums", "doc")
    harness.add_integers(parser, {"repeats": 3})
    code = harness.run(
        parser,
        ["--repeats=4", "--json"],
        measure,
        columns=("run_s", "used_bytes"),
        rows=lambda result: {"tba_jax": result, "naive": result["naive"]},
    )
    lines = capsys.readouterr().out.splitlines()
    result = json.loads(lines[-1])
    assert (code, result["run_s"]) == (0, 4.0)
    assert result["command"] == "python -m tba_jax.bench.sums --repeats=4 --json"
    assert datetime.datetime.fromisoformat(result["date"]).tzinfo
    assert "workload.size: 3" in lines
    table = [line.split() for line in lines[-4:-1]]
    assert table == [["run_s", "used_bytes"], ["tba_jax", "4"], ["naive", "2.5", "2", "MiB"]]


LOADS = {
    "decode": (
        "--shape=tiny --workload=rl --repeats=1 --num_samples=64 --prompt_tokens=8 "
        "--max_new_tokens=24 --num_slots=16",
        # 512 responses that end with a probability of 1/8 at each token, cut at 24: 7.7 on average.
        lambda x: 6 < x["response_length"] < 9.5 and 0 < x["slot_share"] <= 1,
    ),
    "train_step": (
        "--model_shape=tiny --repeats=1 --steps=2 --response_tokens=32 --micro_batch_rows=2",
        # The same weights, batch and loss; float32.
        lambda x: x["naive"]["loss"] == pytest.approx(x["loss"], rel=1e-4) and 0 < x["mfu"] < 1,
    ),
    "rl_step": (
        "--model_shape=tiny --prompts=2 --group=4 --micro_batch_rows=4 --prompt_tokens=8 "
        "--response_tokens=6 --peer_micro_batch_rows=4 --repeats=1 --steps=2 --remat=dots",
        # Few of them end before the limit: with probability of about 1/128 at each token.
        lambda x: 4 < x["mean_response_tokens"] <= 6 and x["peers"] == {},
    ),
    "time_to_accuracy": (
        "--seeds=1 --accuracy=0.2 --num_steps=4 --eval_period=2 --num_held_out=64",
        lambda x: all(x[y]["accuracies"][-1][1] >= 0.2 for y in ("ours_cold", "ours_warm")),
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", LOADS)
def test_figures_of_a_small_load(name, capsys):
    flags, holds = LOADS[name]
    benchmark = importlib.import_module(f"tba_jax.bench.{name}")
    assert benchmark.main([*flags.split(), "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert holds(result), result


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


def test_a_part_of_the_accelerators_command_that_fails_or_hangs_costs_itself(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "LIMIT_S", 0.2)
    good = "import json; print(json.dumps({'rate': 1.5, 'of': {'chip': 'x'}}))"
    codes = {"bad": "1/0", "slow": "import time; time.sleep(60)", "good": good}
    parts = {x: ("", f"timeit -n1 -r1 {shlex.quote(code)}", "") for x, code in codes.items()}
    results = accelerator.measure(parts, tmp_path, 60.0, is_dry=True)
    statuses = [r["status"] for r in results.values()]
    assert "bad failed with exit code 1: ZeroDivisionError" in statuses[0]
    assert "slow took more than 2 s" in statuses[1] and statuses[2] == "done"
    assert results["good"]["figures"] == {"rate": 1.5, "of": {"chip": "x"}}
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["dry_run"] and written["parts"] == results
    results = accelerator.measure(parts, tmp_path, 0.0, is_dry=True)
    assert results["good"]["status"] == "not started within 0 s (--budget_s)"
