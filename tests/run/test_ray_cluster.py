# SPDX-License-Identifier: Apache-2.0
"""The Ray cluster that a local fleet starts is reachable from this machine alone."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax.config.schema import make_config
from tba_jax.run.errors import UserError
from tba_jax.run.ray_cluster import _ray

ray = pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")
ROOT = Path(__file__).parents[2]
START = """
import os, types
{before}
from fleets import below
from listening import beyond_loopback, listening
from tba_jax.config.schema import make_config
from tba_jax.run.ray_cluster import _ray
notes = []
display = types.SimpleNamespace(note=notes.append)
with _ray(make_config({{"placement": "fleet"}}), display):
    pids = [os.getpid(), *(pid for pid, _ in below(os.getpid()))]
    print(len(listening(pids)) > 3, bool(beyond_loopback(pids)), notes)
"""


@pytest.mark.parametrize("before", ["", pytest.param("import ray", marks=pytest.mark.slow)])
def test_ray_listens_on_loopback_or_the_run_says_that_it_does_not(before):
    """Ray reads the setting when it is imported, which a notebook may have done before."""
    folders = (ROOT, ROOT / "tests", ROOT / "tests" / "integration")
    done = subprocess.run(
        [sys.executable, "-c", START.format(before=before)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(str, folders))},
        capture_output=True, text=True, timeout=170, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    listens, is_reachable, notes = done.stdout.splitlines()[-1].split(" ", 2)
    assert listens == "True"
    if not before:
        assert (is_reachable, notes) == ("False", "[]")
    # Without a network Ray is on loopback whatever it read.
    assert ("RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER=0" in notes) == (is_reachable == "True")


@pytest.mark.parametrize(
    ("address", "advice"),
    [("local", "Its logs are in /tmp/ray/session_latest"), ("auto", "start one with `ray start")],
)
def test_a_cluster_that_does_not_start_in_time_is_one_line(address, advice, monkeypatch):
    def init(**options):
        raise Exception("The current node timed out during startup.\nThis could happen because")

    monkeypatch.setattr(ray, "init", init)
    config = make_config({"placement": "fleet", "fleet.address": address})
    with pytest.raises(UserError, match=advice) as error, _ray(config, None):
        pass
    text = str(error.value)
    assert "(The current node timed out during startup.)" in text and "\n" not in text
