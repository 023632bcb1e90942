# SPDX-License-Identifier: Apache-2.0
"""A benchmark's result has its command; a side that fails, and a bad option, are one line."""

import datetime
import importlib
import json
import shlex
import sys

import pytest

from tba_jax.bench import accelerator, harness
from tba_jax.bench.accelerator import Part

# A side: its behaviour is in the job.
SIDE = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
exec(job["code"])
pathlib.Path(job["result"]).write_text(json.dumps({"side": job["side"]}))
"""


def test_a_result_has_its_command_date_and_table(capsys):
    def measure(args, folder):
        assert not list(folder.iterdir())
        other = {"run_s": 2.5, "used_bytes": 2**21}
        return {"run_s": 1.0 * args.repeats, "workload": {"size": 3}, "naive": other}

    parser = harness.make_parser("sums", "doc")
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


def test_a_side_returns_its_result_or_one_error(tmp_path, capsys, monkeypatch):
    def side(code):
        return harness.run_side("mine", {"code": code}, tmp_path, [sys.executable, "-c", SIDE])

    assert side("") == {"side": "mine"}
    with pytest.raises(ValueError, match="mine failed with exit code 1: ZeroDivisionError"):
        side("1/0")
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setattr(harness, "TIMEOUT_S", 0.5)
    with pytest.raises(ValueError, match=r"mine took more than 0.5 s"):
        side("import time; time.sleep(60)")


@pytest.mark.parametrize(
    ("benchmark", "option", "message"),
    [
        ("rl_step", "--peers=verl", "invalid choice: 'verl'"),
        ("rl_step", "--group=1", "got 1; wanted at least 2"),
        ("decode", "--max_new_tokens=4", "got 4; wanted at least 8"),
        ("accelerator", "--parts=device,nothing", "no 'nothing'; there are device, parity, dec"),
    ],
)
def test_a_bad_option_is_refused(benchmark, option, message, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"tba_jax.bench.{benchmark}").main([option])
    assert message in capsys.readouterr().err.splitlines()[-1]


def part(name, code):
    """A part of the accelerator's command that runs a line of Python."""
    return Part(name, f"What of {name}?", f"timeit -n1 -r1 {shlex.quote(code)}", dry="")


def test_a_part_that_fails_or_hangs_costs_itself_and_its_time(tmp_path, monkeypatch):
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
    results = accelerator.measure(parts[1:], tmp_path, 1.0, is_dry=True)
    assert results["good"]["status"] == "not started within 1 s (--budget_s)"
