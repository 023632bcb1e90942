# SPDX-License-Identifier: Apache-2.0
"""What a config asks of a fleet is refused before anything is started."""

import collections
import sys
import types

import jax
import pytest

from tba_jax.config.resolved import asked, writes_versions
from tba_jax.config.rules import validate
from tba_jax.config.schema import make_config
from tba_jax.devices.placement import divide
from tba_jax.run.errors import RunError, UserError, is_mendable
from tba_jax.run.fleet import Fleet, connected, train_fleet
from tba_jax.run.shared import open_sites

FLEET = {"placement": "fleet", "task.name": "arithmetic", "fleet.trainer": "CPU=1, spot=0.5"}


@pytest.mark.parametrize(
    "change, words",
    [
        ({"driver": "sync"}, "config.driver = 'sync': the searchers of a fleet are other"),
        ({"num_searchers": 3}, "max_searchers = 4: must be a multiple of num_searchers=3"),
        ({"fleet.searcher": "GPU"}, "config.fleet.searcher = 'GPU': must read NAME=NUMBER"),
        ({"fleet.searcher": "GPU=0"}, "config.fleet.searcher = 'GPU=0': must read NAME=NUMBER"),
    ],
)
def test_a_fleet_that_cannot_be_is_refused(change, words):
    validate(make_config(FLEET))
    with pytest.raises(ValueError, match=words):
        validate(make_config({**FLEET, **change}))


def test_without_ray_the_command_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(UserError, match=r"needs Ray.*pip install 'tba_jax\[fleet\]'"):
        train_fleet(make_config(FLEET), tmp_path, None, interrupted=lambda: False)
    assert is_mendable(RunError("died"))


def test_a_trainer_group_has_all_devices_of_its_processes():
    config = make_config({**FLEET, "fleet.trainer_hosts": 2, "mesh.fsdp": 2})
    validate(config)
    assert writes_versions(config) and writes_versions(make_config(FLEET))
    sites = open_sites(config, divide(config.placement, jax.devices()[:2], asked(config)))
    assert sites.trainer.mesh.shape == {"data": 1, "fsdp": 2, "model": 1}
    assert sites.publication.mesh == sites.trainer.mesh
    assert sites.searchers == () and sites.num_searchers == 4


class Died(Exception):
    """The process of an actor ended; Ray names it so."""


class Raised(Exception):
    """An actor raised an error; Ray keeps it as the cause."""

    cause = OSError("no weights")


class FakeRay:
    """Actors whose calls end as a test says."""

    exceptions = types.SimpleNamespace(RayTaskError=Raised, RayActorError=Died)

    def __init__(self):
        self.ended, self.calls, self.killed = {}, collections.defaultdict(list), []

    def remote(self, kind):
        def call(*arguments):
            self.calls[kind.__name__].append(object())
            return self.calls[kind.__name__][-1]

        method = types.SimpleNamespace(remote=call)
        ignored = types.SimpleNamespace(remote=lambda: "127.0.0.1:1")
        handle = types.SimpleNamespace(run=method, address=ignored, interrupt=ignored)
        actor = types.SimpleNamespace(remote=lambda: handle)
        actor.options = lambda **options: actor
        return actor

    def wait(self, calls, num_returns, timeout):
        return [call for call in calls if call in self.ended], []

    def get(self, call):
        raise self.ended.pop(call)

    def kill(self, handle, no_restart=True):
        self.killed.append(handle)


@pytest.fixture
def fleet(tmp_path):
    """A fleet of one trainer and two searchers; `fail` ends the newest process of a kind."""
    pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")
    ray, config = FakeRay(), make_config({**FLEET, "fleet.max_searchers": 2, "num_searchers": 2})
    made = Fleet(ray, config, tmp_path, types.SimpleNamespace(wait=lambda timeout_s: True))

    def fail(kind, error, times=1):
        for _ in range(times):
            ray.ended[ray.calls[kind][-1]] = error
            assert made.look(False) is None

    made.fail = fail
    made.look(False)
    return made


def test_failures_count_without_a_checkpoint_in_between(fleet, tmp_path):
    for step in range(3):  # hours of rare failures
        fleet.fail("SearcherProcess", Raised(), 5)
        fleet.fail("TrainerProcess", Died("gone"), 5 - step)
        (tmp_path / "checkpoints" / str(step)).mkdir(parents=True)
    fleet.fail("TrainerProcess", Died("gone"), 5)
    with pytest.raises(RunError, match="the trainer failed 6 times .* its process ended. Fix"):
        fleet.fail("TrainerProcess", Died("gone"))


def test_a_return_of_the_trainer_clears_the_failures_of_searchers(fleet):
    """An absence of 20 minutes: searchers fail now and then, and the trainer comes back."""
    for _ in range(4):
        fleet.fail("SearcherProcess", Raised(), 5)
        fleet.fail("TrainerProcess", Died("gone"))
    fleet.fail("SearcherProcess", Raised(), 5)
    with pytest.raises(RunError, match="searchers 0 to 1 failed 6 times .*: no weights. Fix"):
        fleet.fail("SearcherProcess", Raised())


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
