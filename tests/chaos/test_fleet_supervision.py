# SPDX-License-Identifier: Apache-2.0
"""Searchers of a local fleet outlive their trainer, which is replaced."""

import pytest
from fleets import Fleet, check

pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1600)]


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
