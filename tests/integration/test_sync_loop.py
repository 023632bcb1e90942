# SPDX-License-Identifier: Apache-2.0
"""The synchronous driver is bit-reproducible, also across a SIGKILL."""

import json
import signal

import jax
import numpy as np
import pytest
from commands import SYNC, lines, losses, run, start, wait_for

from tba_jax import buffer, evaluate, export, parts, saved_run
from tba_jax.models import hf_weights


@pytest.fixture(scope="module")
def reference(tmp_path_factory, cache):
    """An uninterrupted run of 8 steps."""
    workdir = tmp_path_factory.mktemp("reference") / "run"
    done = run(workdir, *SYNC, cache=cache)
    assert done.returncode == 0, done.stderr
    return workdir


def test_losses_after_sigkill_and_resume_equal_the_uninterrupted_run(reference, cache, tmp_path):
    workdir = tmp_path / "run"
    process = start(workdir, *SYNC, cache=cache)
    wait_for(
        lambda: max(losses(workdir), default=0) >= 6 and (workdir / "checkpoints" / "4").exists(),
        process=process,
    )
    process.send_signal(signal.SIGKILL)
    process.wait(30)
    process.communicate()
    # Two runs with one seed: the killed one agrees as far as it got.
    before = losses(workdir)
    expected = losses(reference)
    assert len(expected) == 8
    assert before == {step: expected[step] for step in before}

    done = run(workdir, *SYNC, cache=cache)
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stdout and "step 4 of 8" in done.stdout
    assert losses(workdir) == expected
    final, unkilled = (json.loads((w / "report.json").read_text()) for w in (workdir, reference))
    assert final["eval"] == unkilled["eval"]
    assert final["ledger"] == unkilled["ledger"]
    assert final["staleness"] == unkilled["staleness"]


def test_report_and_ledger_of_a_finished_run(reference):
    report = json.loads((reference / "report.json").read_text())
    ledger = report["ledger"]
    evicted = sum(v for k, v in ledger.items() if k.startswith("evicted"))
    rejected = sum(ledger["rejected"].values())
    assert ledger["generated"] == 8 * 4 * 16
    assert ledger["generated"] == (
        ledger["outbox"] + ledger["stored"] + evicted + ledger["duplicate"] + rejected
    )
    assert report["eval"]["before"]["n"] == report["eval"]["after"]["n"] == 16
    assert report["steps"] == 8
    assert report["time_to_first_step_s"] < report["wall_s"]
    page = (reference / "report.html").read_text()
    assert "pass@1" in page and "http://" not in page and "https://" not in page


def test_another_config_in_the_same_directory_is_refused_with_the_difference(reference, cache):
    before = (reference / "metrics.jsonl").read_bytes()
    done = run(reference, *SYNC, "optimizer.learning_rate=0.5", cache=cache)
    assert done.returncode == 2
    assert "optimizer.learning_rate: 0.0001 -> 0.5" in done.stderr
    assert (reference / "metrics.jsonl").read_bytes() == before


@pytest.mark.slow
def test_exact_lag_makes_every_staleness_the_lag(cache, tmp_path):
    done = run(
        tmp_path / "run", *SYNC, "search.exact_lag=2", "replay.recency_prob=1.0", cache=cache
    )
    assert done.returncode == 0, done.stderr
    histograms = [
        record["buffer/staleness_histogram"]
        for record in lines(tmp_path / "run" / "metrics.jsonl")
        if "buffer/staleness_histogram" in record
    ]
    # Steps 0, 1 and 2 train on version 0; from then on the data is exactly two steps old.
    assert histograms == [[[min(step, 2), 64]] for step in range(8)]


def test_evaluate_and_export_agree_with_the_run(reference, tmp_path, capsys):
    after = json.loads((reference / "report.json").read_text())["eval"]["after"]
    assert evaluate.main([f"--workdir={reference}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["pass_at_1"], result["n"]) == (after["pass_at_1"], after["n"])

    assert export.main([f"--workdir={reference}", f"--out={tmp_path / 'model'}"]) == 0
    start, _, _ = hf_weights.load(str(parts.START_MODEL))
    config, params, _ = hf_weights.load(str(tmp_path / "model"))
    _, _, trained, _, _ = saved_run.load_policy(str(reference))
    assert config == start
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(trained))
    capsys.readouterr()
    assert export.main([f"--workdir={reference}", f"--out={tmp_path / 'model'}"]) == 1
    assert "is not empty" in capsys.readouterr().err


def test_buffer_command_shows_what_the_checkpoint_holds(reference, capsys):
    assert buffer.main([str(reference), "--json"]) == 0
    shown = json.loads(capsys.readouterr().out.splitlines()[-1])
    ledger = json.loads((reference / "report.json").read_text())["ledger"]
    assert shown["num_trajectories"] == ledger["stored"]


def test_a_finished_run_is_not_run_again(reference, cache):
    before = {p.name: p.read_bytes() for p in reference.iterdir() if p.is_file()}
    done = run(reference, *SYNC, cache=cache)
    assert done.returncode == 0 and "This run is finished" in done.stdout
    assert {p.name: p.read_bytes() for p in reference.iterdir() if p.is_file()} == before


@pytest.mark.slow
def test_search_metrics_wait_for_a_logged_step(cache, tmp_path):
    done = run(tmp_path / "run", *SYNC, "sync_period=4", "log.period=4", cache=cache)
    assert done.returncode == 0, done.stderr
    logged = [r for r in lines(tmp_path / "run" / "metrics.jsonl") if "train/loss" in r]
    assert [r["step"] for r in logged] == [4, 8]
    # One searcher, four prompts a round, 4 x 4 prompts a sync.
    assert [r["search/rounds"] for r in logged] == [4, 4]
    assert [r["sync/version"] for r in logged] == [0, 4]
