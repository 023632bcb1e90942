# SPDX-License-Identifier: Apache-2.0
"""The asynchronous driver: real threads, interruption and resume."""

import pytest
from commands import ROOT, assert_every_ticket_once, is_balanced, lines, losses, report, run

import tba_jax

IN_AN_ENVIRONMENT = (
    "task.environment=tba_jax.tasks.calculator:Calculator",
    "search.stop_strings=:",
    "search.max_new_tokens=24",
    "search.max_turns=4",
)
# An agent writes its episodes over HTTP.
WITH_AN_AGENT = (
    f"task.environment={ROOT / 'tests/serving/agents_for_tests.py'}:arithmetic",
    "search.max_new_tokens=40",
)
SHARED_BY_ALL = (
    "JAX_NUM_CPU_DEVICES=8",
    "placement=shared",
    "mesh.fsdp=2",
    "search.num_devices=2",
    "num_searchers=2",
    "sync_period=2",
    "objective.importance=none",
)


def slow(name, *overrides):
    return pytest.param(overrides, marks=pytest.mark.slow, id=name)


@pytest.mark.parametrize(
    "overrides",
    [
        slow("one device", "num_searchers=2", "sync_period=2"),
        slow("environment", "num_searchers=2", *IN_AN_ENVIRONMENT),
        slow("agent", "num_searchers=2", *WITH_AN_AGENT),
        slow("two devices each", *SHARED_BY_ALL),
        pytest.param(("JAX_NUM_CPU_DEVICES=2", "placement=split"), id="split"),
    ],
)
def test_async_run_trains_on_searcher_data(overrides, cache, tmp_path):
    workdir = tmp_path / "run"
    done = run(workdir, *overrides, cache=cache, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(losses(workdir)) == list(range(1, 9))
    assert is_balanced(report(workdir)["ledger"])
    assert_every_ticket_once(workdir)
    # A response never carries a version that was not published before it was trained on.
    trained = [r for r in lines(workdir / "metrics.jsonl") if "train/loss" in r]
    for record in trained:
        for staleness, _ in record["buffer/staleness_histogram"]:
            assert 0 <= staleness < record["step"]
    stored = [y for group in tba_jax.load_run(workdir).buffer().values() for y in group]
    assert {y.searcher for y in stored} == set(range(1 + ("num_searchers=2" in overrides)))
