# SPDX-License-Identifier: Apache-2.0
"""The synchronous driver is bit-reproducible, also across a SIGKILL."""

import json
import re
import signal

import jax
import numpy as np
import pytest
from commands import SYNC, is_balanced, lines, losses, report, run, start, wait_for
from fake_models import load_folder

from tba_jax.commands import evaluate, export
from tba_jax.commands import saved as saved_run
from tba_jax.run import model_parts


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


def test_the_number_of_searchers_changes_no_loss(reference, cache, tmp_path):
    workdir = tmp_path / "run"
    done = run(workdir, *SYNC, "placement=shared", "num_searchers=2", cache=cache)
    assert done.returncode == 0, done.stderr
    assert losses(workdir) == losses(reference)
    for name in ("eval", "ledger", "staleness"):
        assert report(workdir)[name] == report(reference)[name]


def test_report_and_ledger_of_a_finished_run(reference):
    report = json.loads((reference / "report.json").read_text())
    ledger = report["ledger"]
    assert ledger["generated"] == 8 * 4 * 16 and is_balanced(ledger)
    assert report["eval"]["before"]["n"] == report["eval"]["after"]["n"] == 16
    assert report["steps"] == 8
    records = [r for r in lines(reference / "metrics.jsonl") if "train/loss" in r]
    # Sampler and trainer compute the same log-probs, up to float32 rounding over 48 tokens.
    assert all(0 <= r["train/sampler_gap"] < 1e-4 for r in records)
    page = (reference / "report.html").read_text()
    assert "pass@1" in page
    assert not re.search(r"""(src|srcset|href)\s*=\s*["']?\s*https?:|url\(|@import""", page)


def test_evaluate_and_export_agree_with_the_run(reference, tmp_path, capsys):
    after = json.loads((reference / "report.json").read_text())["eval"]["after"]
    assert evaluate.main([f"--workdir={reference}", "--json"]) == 0
    result = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (result["pass_at_1"], result["n"]) == (after["pass_at_1"], after["n"])

    assert export.main([f"--workdir={reference}", f"--out={tmp_path / 'model'}"]) == 0
    start, _, _ = load_folder(str(model_parts.START_MODEL))
    config, params, _ = load_folder(str(tmp_path / "model"))
    trained = saved_run.load_policy(str(reference))[2]
    assert config == start
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(trained))
    card = (tmp_path / "model" / "README.md").read_text()
    assert f"| pass@1 | 37.5% | {after['pass_at_1']:.1%} |" in card and "after 8 steps" in card
    capsys.readouterr()
    with pytest.raises(ValueError, match="is not empty"):
        export.main([f"--workdir={reference}", f"--out={tmp_path / 'model'}"])
