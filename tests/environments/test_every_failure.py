# SPDX-License-Identifier: Apache-2.0
"""A run whose environment fails in every way: each is counted and reported by its name."""

import json
from pathlib import Path

import pytest

from tests.integration import commands

FILE = Path(__file__).with_name("environments_for_tests.py")
NAMES = {f"environment_{x}" for x in ("timeout", "crash", "error", "type", "flood", "nan")}
pytestmark = [pytest.mark.slow, pytest.mark.timeout(600)]


def test_each_failure_of_an_environment_is_counted_and_reported_and_the_run_goes_on(tmp_path):
    run = commands.run(
        tmp_path / "run",
        f"task.environment={FILE}:Misbehaving",
        "reward.timeout_s=2",
        "num_steps=3",
        "search.samples_per_prompt=4",
        "objective.group_size=4",
        "eval.period=0",
        cache=tmp_path / "cache",
        timeout=550,
    )
    assert run.returncode == 0, run.stderr
    check(run.stderr, tmp_path / "run")


def check(errors, workdir):
    for name in NAMES:
        lines = [x for x in errors.splitlines() if f"rejected as {name}" in x]
        assert lines and all(x.startswith(f"environment {FILE}:Misbehaving: ") for x in lines), name
    metrics = [json.loads(x) for x in (workdir / "metrics.jsonl").read_text().splitlines()]
    counted = {k.removeprefix("buffer/rejected_") for x in metrics for k in x if "rejected_" in k}
    assert counted >= NAMES
    ledger = json.loads((workdir / "report.json").read_text())["ledger"]
    rejected = ledger["rejected"]
    assert set(rejected) >= NAMES and ledger["generated"] > sum(rejected.values())
