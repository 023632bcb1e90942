# SPDX-License-Identifier: Apache-2.0
"""A local fleet reports each death at once, and ends when its Ray cluster is dead."""

import os
import signal
import time

import pytest
from fleets import Fleet, check

pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]


def running(pids):
    """Those of these processes that have not ended."""
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}/exe")]


@pytest.mark.parametrize(
    ("process", "why"),
    [
        ("raylet", "the Ray node of the driver (its raylet process) is dead"),
        ("gcs_server", "Ray's control service (GCS) has not answered for "),
    ],
)
def test_a_dead_cluster_ends_the_run_and_the_same_command_resumes(process, why, tmp_path):
    fleet = Fleet(tmp_path / "run", num_steps=100_000)
    fleet.until_step(5)
    pids = fleet.pids()
    (victim,) = [p for p in pids if os.path.basename(os.readlink(f"/proc/{p}/exe")) == process]
    os.kill(victim, signal.SIGKILL)
    killed_s = time.monotonic()
    assert fleet.end() == 1, fleet.told()
    assert time.monotonic() - killed_s < 59  # then Ray ends the process without an exception
    last = fleet.told().splitlines()[-1]
    assert last.startswith(f"error: config.fleet.address = 'local': {why}"), fleet.told()
    assert "The same command resumes from the newest checkpoint (step " in last
    deadline = time.monotonic() + 90  # Ray's agents look for the GCS for 60 s
    while left := running(pids):
        assert time.monotonic() < deadline, left
        time.sleep(0.5)
    step = fleet.num_steps()
    again = Fleet(tmp_path / "run", num_steps=100_000)
    again.until_step(step + 5)
    assert "resumed" in again.told()
    again.process.send_signal(signal.SIGTERM)
    assert again.end() == 128 + signal.SIGTERM, again.told()


def test_a_death_of_a_searcher_is_in_the_metrics_before_it_joins_again(tmp_path):
    fleet = Fleet(tmp_path / "run", num_steps=100_000)
    fleet.until_told(" joined", times=2)
    fleet.until_step(5)
    assert fleet.kill("SearcherProcess")
    fleet.until_told("Ray restarts it on a free machine")
    fleet.until_metric("fleet/joins", 3)
    # By the log of steps: on a busy machine a searcher joins again between two steps.
    names = ("searchers", "searchers_lost", "joins")
    steps = list(zip(*(fleet.metrics(f"fleet/{name}") for name in names), strict=False))
    assert (1, 1, 2) in steps and steps[-1] == (2, 1, 3), steps
    fleet.until_told(" joined again")
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.end() == 128 + signal.SIGTERM, fleet.told()


def test_a_trainer_that_dies_alone_is_replaced_while_searchers_live_on(tmp_path):
    fleet = Fleet(tmp_path / "run", num_steps=60)
    fleet.until_told(" joined", times=2)
    fleet.until_step(5)
    searchers = fleet.pids("ray::SearcherProcess")
    assert fleet.kill("TrainerProcess")
    fleet.until_step(10)
    assert fleet.pids("ray::SearcherProcess") == searchers
    assert fleet.told().count("the trainer died (its process ended). Restarting the trainer") == 1
    assert fleet.end() == 0, fleet.told()
    report = check(fleet.workdir, 60)
    restarts = fleet.metrics("fleet/trainer_restarts")
    assert restarts[0] == 0 and restarts[-1] == 1 == report["fleet"]["trainer_restarts"]
