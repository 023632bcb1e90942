# SPDX-License-Identifier: Apache-2.0
"""The command for the day an accelerator is there: parts apart, limits, partial results, a page."""

import json
import shlex

import pytest

from tba_jax.bench import accelerator
from tba_jax.bench.accelerator import Part


def part(name, code, limit_s=30.0):
    """A part that runs a line of Python."""
    return Part(name, f"What of {name}?", limit_s, f"timeit -n1 -r1 {shlex.quote(code)}", dry="")


def test_a_part_that_fails_or_hangs_costs_itself_alone(tmp_path):
    parts = [
        part("bad", "raise SystemExit(3)"),
        part("slow", "import time; time.sleep(60)", limit_s=0.2),
        part("good", "import json; print(json.dumps({'rate': 1.5, 'of': {'chip': 'x'}}))"),
    ]
    results = accelerator.measure(parts, tmp_path, 60.0, is_dry=True)
    assert [r["status"] for r in results.values()] == [
        "failed with exit code 1",
        "ended after its 2 s",
        "done",
    ]
    assert results["good"]["figures"] == {"rate": 1.5, "of": {"chip": "x"}}
    written = json.loads((tmp_path / "results.json").read_text())
    assert written["dry_run"] and written["parts"] == results
    page = (tmp_path / "page.md").read_text()
    assert "Nothing here was measured on an accelerator" in page
    assert "## good: done" in page and "| of.chip | x |" in page and "| rate | 1.5 |" in page


def test_what_has_no_time_left_is_not_begun(tmp_path):
    parts = [part("first", "import time; time.sleep(2)"), part("second", "1")]
    results = accelerator.measure(parts, tmp_path, 1.0, is_dry=True)
    assert results["first"]["status"] == "ended after its 1 s"
    assert results["second"]["status"] == "not started within 1 s (--budget_s)"


def test_a_part_that_does_not_exist_is_refused(tmp_path, capsys):
    assert accelerator.main([f"--out={tmp_path}", "--parts=device,nothing"]) == 2
    assert "no 'nothing'; there are device, parity, memory, decode" in capsys.readouterr().err


@pytest.mark.slow
def test_parity_names_what_is_too_far(monkeypatch, capsys):
    monkeypatch.setattr(accelerator, "_TOLERANCE", {"float32": 0.0, "bfloat16": 0.0})
    assert accelerator.main(["--probe=parity", "--dry_run"]) == 1
    assert "grad_norm.bfloat16" in capsys.readouterr().err


@pytest.mark.slow  # the tests above have what the command does with a part
@pytest.mark.timeout(900)
def test_the_dry_run_goes_through_every_probe(tmp_path):
    names = "device,parity,memory"
    assert accelerator.main([f"--out={tmp_path}", f"--parts={names}", "--dry_run"]) == 0
    found = json.loads((tmp_path / "results.json").read_text())["parts"]
    assert found["device"]["figures"]["platform"] == "cpu"
    differences = found["parity"]["figures"]["difference_over_norm"]
    assert len(differences) == 3 and max(differences.values()) < 0.05
    step = found["memory"]["figures"]["programs"]["train_step"]
    assert step["compiled_bytes"] > 0 and step["measured_bytes"] is None
