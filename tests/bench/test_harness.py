# SPDX-License-Identifier: Apache-2.0
"""A benchmark's result has its command; a side that fails, and a bad option, are one line."""

import datetime
import importlib
import json
import sys

import pytest

from tba_jax.bench import harness, rl_step

# A side: its behaviour is in the job.
SIDE = """
import json, pathlib, sys
job = json.loads(pathlib.Path(sys.argv[1]).read_text())
exec(job["code"])
pathlib.Path(job["result"]).write_text(json.dumps({"side": job["side"]}))
"""


def run_side(tmp_path, code):
    command = [sys.executable, "-c", SIDE]
    return harness.run_side("mine", {"code": code}, tmp_path, command)


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
    age = datetime.datetime.now(datetime.UTC) - datetime.datetime.fromisoformat(result["date"])
    assert abs(age.total_seconds()) < 60
    assert "workload.size: 3" in lines
    table = [line.split() for line in lines[-4:-1]]
    assert table == [["run_s", "used_bytes"], ["tba_jax", "4"], ["naive", "2.5", "2", "MiB"]]


def test_a_side_returns_its_result_or_one_error(tmp_path, capsys, monkeypatch):
    assert run_side(tmp_path, "") == {"side": "mine"}
    with pytest.raises(ValueError, match="mine failed with exit code 1: ZeroDivisionError"):
        run_side(tmp_path, "1/0")
    assert "Traceback" in capsys.readouterr().err
    monkeypatch.setattr(harness, "TIMEOUT_S", 0.5)
    with pytest.raises(ValueError, match=r"mine took more than 0.5 s"):
        run_side(tmp_path, "import time; time.sleep(60)")


def test_figures_are_medians_of_the_repeats_and_sides_alternate(capsys):
    ran = []

    def side(name, seconds):
        def run(repeat):
            ran.append(name)
            return {"run_s": seconds[repeat], "num": repeat, "about": {"seed": repeat}}

        return run

    sides = {"ours": side("ours", (9.0, 6.0, 7.0)), "naive": side("naive", (1.0, 2.0, 3.0))}
    found = harness.repeated(sides, 3, "run_s")
    about = {"num": 2, "about": {"seed": 0}}
    assert found["ours"] == {"run_s": 7.0, "run_s_of_repeats": [9.0, 6.0, 7.0], **about}
    assert found["naive"]["run_s"] == 2.0 and ran == ["ours", "naive"] * 3
    assert capsys.readouterr().err.startswith("ours: run_s 9\nnaive: run_s 1\n")


OPTIONS = [
    ("rl_step", "--peers=verl", "invalid choice: 'verl'"),
    ("rl_step", "--group=1", "got 1; wanted at least 2"),
    ("time_to_accuracy", "--seeds=0", "got 0; wanted at least 1"),
    ("train_step", "--group_size=1", "got 1; wanted at least 2"),
    ("decode", "--max_new_tokens=4", "got 4; wanted at least 8"),
]


@pytest.mark.parametrize(("benchmark", "option", "message"), OPTIONS)
def test_a_bad_option_is_refused(benchmark, option, message, capsys):
    with pytest.raises(SystemExit):
        importlib.import_module(f"tba_jax.bench.{benchmark}").main([option])
    assert message in capsys.readouterr().err.splitlines()[-1]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--micro_batch_rows=12"], "does not divide the 128 rows of a step"),
        (["--peers=trl", "--peer_python=/no/python"], "/no/python: [Errno 2] No such file"),
        (
            ["--peers=trl"],
            "No package metadata was found for no_such_package",
        ),
    ],
)
def test_what_cannot_be_measured_is_one_line(options, message, capsys, monkeypatch):
    monkeypatch.setattr("tba_jax.bench.trl_peer.PACKAGES", ("jax", "no_such_package"))
    assert rl_step.main(options) == 1
    error = capsys.readouterr().err
    assert message in error and len(error.splitlines()) == 1
