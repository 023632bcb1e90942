# SPDX-License-Identifier: Apache-2.0
"""A fleet on a Ray cluster of this machine, whose processes are killed while it runs."""

import os
import signal
import subprocess
import sys

import pytest
from commands import ROOT
from fleets import Fleet, below, beyond_loopback, check, listening

pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")
# Beside other work, a fleet of this machine takes minutes to compile.
pytestmark = [pytest.mark.timeout(1600), pytest.mark.usefixtures("compiled_once")]


def test_a_fleet_trains_on_responses_of_its_searchers_and_listens_on_loopback_alone(tmp_path):
    fleet = Fleet(tmp_path / "run", num_steps=3, **{"fleet.max_searchers": 1})
    fleet.until_step(1)
    pids = [fleet.process.pid, *(pid for pid, _ in below(fleet.process.pid))]
    assert len(listening(pids)) > 3 and not beyond_loopback(pids)
    assert fleet.end() == 0, fleet.told()
    assert check(fleet.workdir, 3)["fleet"]["searchers"] == 1


@pytest.mark.slow
def test_a_fleet_loses_searchers_members_of_its_trainer_and_a_node_and_learns(tmp_path):
    """A trainer group that loses a member, or the owner of the buffer, begins again as a whole."""
    killer = [sys.executable, "-m", "tests.chaos.killer", "--fleet=2,1,1,1", f"--out={tmp_path}"]
    done = subprocess.run(killer, cwd=ROOT, capture_output=True, text=True, timeout=1500)
    assert done.returncode == 0 and "nothing lost or wrong" in done.stdout, done.stderr
    assert not [words for _, words in below(os.getpid()) if "ray" in words]


@pytest.mark.slow
def test_a_searcher_that_waits_does_not_take_the_place_of_a_trainer_that_restarts(
    tmp_path, monkeypatch
):
    from ray.cluster_utils import Cluster

    monkeypatch.setenv("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER", "0")  # as `connected` does
    handler = signal.getsignal(signal.SIGTERM)  # which a cluster replaces
    # Each process takes one of two CPUs, so that one of two searchers waits.
    cluster = Cluster(True, head_node_args={"num_cpus": 2, "object_store_memory": 2**27})
    own = {"num_searchers": 1, "fleet.trainer": "CPU=1", "fleet.searcher": "CPU=1"}
    try:
        address = {"fleet.address": cluster.address}
        fleet = Fleet(tmp_path / "run", num_steps=8, **own, **address)
        fleet.until_step(3)
        (owner,) = fleet.processes("owner")
        owner.kill()
        assert fleet.end() == 0, fleet.told()
    finally:
        cluster.shutdown()
        signal.signal(signal.SIGTERM, handler)
    assert ". Restarting the trainer from " in fleet.told()
    assert check(fleet.workdir, 8)["fleet"]["searchers"] == 1


@pytest.mark.slow
def test_an_interrupted_fleet_is_resumed_by_the_same_command(tmp_path):
    fleet = Fleet(tmp_path / "run", num_steps=8)
    fleet.until_step(2)
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.end() == 128 + signal.SIGTERM
    assert "Run the same command again to continue" in fleet.told()
    again = Fleet(tmp_path / "run", num_steps=8)
    assert again.end() == 0, again.told()
    assert "resumed" in again.told()
    check(again.workdir, 8)
