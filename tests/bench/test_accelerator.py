# SPDX-License-Identifier: Apache-2.0
"""The command for the day an accelerator is there: parts apart, limits, partial results."""

import json
import shlex

import pytest

from tba_jax.bench import accelerator
from tba_jax.bench.accelerator import Part


def part(name, code):
    """A part that runs a line of Python."""
    return Part(name, f"What of {name}?", f"timeit -n1 -r1 {shlex.quote(code)}", dry="")


def test_a_part_that_fails_or_hangs_costs_itself_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(accelerator, "LIMIT_S", 0.2)
    parts = [
        part("bad", "1/0"),
        part("slow", "import time; time.sleep(60)"),
        part("good", "import json; print(json.dumps({'rate': 1.5, 'of': {'chip': 'x'}}))"),
    ]
    results = accelerator.measure(parts, tmp_path, 60.0, is_dry=True)
    statuses = [r["status"] for r in results.values()]
    assert "bad failed with exit code 1: ZeroDivisionError" in statuses[0]
    assert "slow took more than 2 s" in statuses[1] and statuses[2] == "done"
    assert results["good"]["figures"] == {"rate": 1.5, "of": {"chip": "x"}}
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["dry_run"] and written["parts"] == results


def test_what_has_no_time_left_is_not_begun(tmp_path):
    parts = [part("first", "import time; time.sleep(2)"), part("second", "1")]
    results = accelerator.measure(parts, tmp_path, 1.0, is_dry=True)
    assert "first took more than" in results["first"]["status"]
    assert results["second"]["status"] == "not started within 1 s (--budget_s)"


def test_a_part_that_does_not_exist_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit):
        accelerator.main([f"--out={tmp_path}", "--parts=device,nothing"])
    assert "no 'nothing'; there are device, parity, decode" in capsys.readouterr().err


@pytest.mark.slow
def test_parity_names_what_is_too_far(monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "_TOLERANCE", {"float32": 0.0, "bfloat16": 0.0})
    assert accelerator.main(["--probe=parity", "--dry_run"]) == 1
    assert "grad_norm.bfloat16" in capsys.readouterr().err


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_dry_run_goes_through_the_parts(tmp_path):
    names = "device,parity,train_step"
    assert accelerator.main([f"--out={tmp_path}", f"--parts={names}", "--dry_run"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert found["device"]["figures"]["hardware"]["platform"] == "cpu"
    differences = found["parity"]["figures"]["difference_over_norm"]
    assert len(differences) == 3 and max(differences.values()) < 0.05
    step = found["train_step"]["figures"]
    assert step["compiled_bytes"] > 0 and step["device_peak_bytes"] is None
