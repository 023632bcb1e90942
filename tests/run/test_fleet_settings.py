# SPDX-License-Identifier: Apache-2.0
"""What a config asks of a fleet is refused before anything is started."""

import sys

import jax
import pytest

from tba_jax.config.devices import validate_devices
from tba_jax.config.resolved import writes_versions
from tba_jax.config.rules import validate
from tba_jax.config.schema import make_config
from tba_jax.devices.config import parse_resources
from tba_jax.run.errors import FleetError, UserError, is_mendable
from tba_jax.run.ray_cluster import train_fleet
from tba_jax.run.shared import open_sites, place_run

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
        train_fleet(make_config(FLEET), tmp_path, None, interrupted=lambda: False, display=None)
    assert is_mendable(FleetError("died"))


def test_a_trainer_group_has_all_devices_of_its_processes():
    config = make_config({**FLEET, "fleet.trainer_hosts": 2, "mesh.fsdp": 2})
    validate(config)
    assert writes_versions(config) and writes_versions(make_config(FLEET))
    validate_devices(config, 1, 2)
    with pytest.raises(ValueError, match=r"mesh = '1 x 2 x 1': the 2 processes .* 2 devices each"):
        validate_devices(config, 2, 2)
    sites = open_sites(config, place_run(config, jax.devices()[:2]))
    assert sites.trainer.mesh.shape == {"data": 1, "fsdp": 2, "model": 1}
    assert sites.publication.mesh == sites.trainer.mesh
    assert sites.searchers == () and sites.num_searchers == 4
