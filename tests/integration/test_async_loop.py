# SPDX-License-Identifier: Apache-2.0
"""The asynchronous driver: real threads, interruption and resume."""

import pytest
from commands import (
    IN_AN_ENVIRONMENT,
    WITH_AN_AGENT,
    assert_every_ticket_once,
    is_balanced,
    lines,
    losses,
    report,
    run,
)

import tba_jax


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("num_searchers=2", "sync_period=2"), marks=pytest.mark.slow),
        pytest.param(("num_searchers=2", *IN_AN_ENVIRONMENT), marks=pytest.mark.slow),
        pytest.param(("num_searchers=2", *WITH_AN_AGENT), marks=pytest.mark.slow),
        ("JAX_NUM_CPU_DEVICES=2", "placement=split"),
    ],
    ids=["shared", "environment", "agent", "split"],
)
def test_async_run_trains_on_searcher_data(overrides, cache, tmp_path):
    workdir = tmp_path / "run"
    done = run(workdir, *overrides, cache=cache)
    assert done.returncode == 0, done.stderr
    assert sorted(losses(workdir)) == list(range(1, 9))
    assert is_balanced(report(workdir)["ledger"])
    assert_every_ticket_once(workdir)
    # A response never carries a version that was not published before it was trained on.
    trained = [r for r in lines(workdir / "metrics.jsonl") if "train/loss" in r]
    for record in trained:
        for staleness, _ in record["buffer/staleness_histogram"]:
            assert 0 <= staleness < record["step"]


@pytest.mark.slow
def test_searchers_and_trainer_of_two_devices_each_share_them(cache, tmp_path):
    workdir = tmp_path / "run"
    overrides = (
        "JAX_NUM_CPU_DEVICES=8",
        "placement=shared",
        "mesh.fsdp=2",
        "search.num_devices=2",
        "num_searchers=2",
        "sync_period=2",
        "objective.importance=none",
        "log.watchdog_s=120",
    )
    done = run(workdir, *overrides, cache=cache, timeout=240)
    assert done.returncode == 0, done.stderr
    assert sorted(losses(workdir)) == list(range(1, 9))
    assert is_balanced(report(workdir)["ledger"])
    stored = [y for group in tba_jax.load_run(workdir).buffer().values() for y in group]
    assert {y.searcher for y in stored} == {0, 1}
