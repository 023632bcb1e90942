# SPDX-License-Identifier: Apache-2.0
"""What a config asks of a fleet is refused before anything is started."""

import collections
import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tba_jax.config.resolved import asked, writes_versions
from tba_jax.config.rules import validate
from tba_jax.config.schema import make_config
from tba_jax.devices.config import parse_resources
from tba_jax.devices.placement import divide
from tba_jax.run.errors import FleetError, UserError, is_mendable
from tba_jax.run.fleet import add_failure, connected, train_fleet
from tba_jax.run.shared import open_sites

FLEET = {"placement": "fleet", "task.name": "arithmetic"}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"driver": "sync"}, "config.driver = 'sync': the searchers of a fleet are other"),
        (
            {"num_searchers": 3},
            "config.fleet.max_searchers = 4: must be a multiple of num_searchers=3",
        ),
        ({"fleet.searcher": "GPU"}, "config.fleet.searcher = 'GPU': must read NAME=NUMBER"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(change, words):
    validate(make_config(FLEET))
    with pytest.raises(ValueError, match=words):
        validate(make_config({**FLEET, **change}))


def test_resources():
    assert parse_resources("TPU=4, spot=0.5") == {"TPU": 4.0, "spot": 0.5}
    assert parse_resources("TPU=0") is None and parse_resources("=1") is None


def test_without_ray_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"needs Ray.*pip install 'tba_jax\[fleet\]'"):
        train_fleet(make_config(FLEET), tmp_path, None, interrupted=lambda: False)
    assert is_mendable(FleetError("died"))


def test_a_trainer_group_has_all_devices_of_its_processes():
    config = make_config({**FLEET, "fleet.trainer_hosts": 2, "mesh.fsdp": 2})
    validate(config)
    assert writes_versions(config) and writes_versions(make_config(FLEET))
    sites = open_sites(config, divide(config.placement, jax.devices()[:2], asked(config)))
    assert sites.trainer.mesh.shape == {"data": 1, "fsdp": 2, "model": 1}
    assert sites.publication.mesh == sites.trainer.mesh
    assert sites.searchers == () and sites.num_searchers == 4


def test_failures_count_without_a_checkpoint_in_between():
    failures = collections.Counter()
    for step in range(3):  # hours of rare failures
        for _ in range(5):
            add_failure(failures, "a process", step, "OSError")
    with pytest.raises(FleetError, match="a process failed 6 times without .* time: OSError. Fix"):
        add_failure(failures, "a process", 2, "OSError")


START = """
import os
from fleets import below
from listening import beyond_loopback, listening
from tba_jax.config.schema import make_config
from tba_jax.run.fleet import connected
with connected(make_config({"placement": "fleet"})):
    pids = [os.getpid(), *(pid for pid, _ in below(os.getpid()))]
    print(len(listening(pids)) > 3, bool(beyond_loopback(pids)))
"""


def test_the_local_cluster_listens_on_loopback_alone():
    pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")
    root = Path(__file__).parents[2]
    folders = (root, root / "tests", root / "tests" / "integration")
    done = subprocess.run(
        [sys.executable, "-c", START],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "True False"


def test_a_cluster_that_does_not_start_in_time_is_one_line(monkeypatch):
    ray = pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")

    def init(**options):
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setattr(ray, "init", init)
    with pytest.raises(UserError, match="Start a cluster with `ray start") as error:
        with connected(make_config({"placement": "fleet"})):
            pass
    text = str(error.value)
    assert "(The current node timed out during startup.)" in text and "\n" not in text
