# SPDX-License-Identifier: Apache-2.0
"""The main command with its work directory in an object store: killed, continued, read."""

import hashlib
import json
import os
import random
import subprocess
import sys

import commands
import pytest

from tba_jax.storage.mirror import _complete

ADDRESS = "s3://bucket/runs/a"
QUICK = (*commands.SYNC, "eval.period=0", "num_steps=40", "checkpoint.period=2")


@pytest.fixture
def store(tmp_path, monkeypatch):
    """Environment of commands that see one; names of its objects."""
    paths = ("tests/chaos/object_store", "tests", "")
    path = os.pathsep.join(str(commands.ROOT / name) for name in paths)
    real = commands.environment
    extra = {"PYTHONPATH": path, "FAKE_STORE": str(tmp_path / "store")}
    extra["XDG_CACHE_HOME"] = str(tmp_path / "cache")
    monkeypatch.setattr(commands, "environment", lambda cache: {**real(cache), **extra})

    def names():
        found = os.listdir(tmp_path / "store") if (tmp_path / "store").exists() else []
        whole = (bytes.fromhex(name).decode() for name in found if "." not in name)
        return sorted(name.removeprefix("bucket/runs/a/") for name in whole)

    return names


def local(tmp_path):
    """The folder that the run works in."""
    return tmp_path / "cache/tba_jax/buckets" / hashlib.sha256(ADDRESS.encode()).hexdigest()[:16]


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_run_in_a_bucket_that_is_killed_continues_from_it_on_another_machine(
    store, cache, tmp_path
):
    assert commands.run(tmp_path / "plain", *QUICK, cache=cache, timeout=600).returncode == 0
    rng = random.Random(0)
    for machine in range(2):
        # However far the one before came until somebody looked.
        before = max(_complete("checkpoints", store()), default=0)
        process = commands.start(ADDRESS, *QUICK, cache=cache)
        commands.wait_for(
            lambda before=before: max(_complete("checkpoints", store()), default=0) > before,
            process=process,
            timeout=600,
        )
        commands.kill_after(process, local(tmp_path), before, 1, rng)
        (tmp_path / "cache").rename(tmp_path / f"cache of machine {machine}")
    done = commands.run(ADDRESS, *QUICK, cache=cache, timeout=600)
    assert done.returncode == 0, done.stderr
    assert "resumed" in done.stdout and f"Report: {ADDRESS}/report.html" in done.stdout
    assert {"config.json", "report.json", "report.html"} <= set(store())
    assert sorted(_complete("checkpoints", store())) == [38, 40]
    logs = {name.partition("-")[0] for name in store() if name.startswith("logs/metrics")}
    assert len(logs) == 1  # of the last process alone
    # The same bits as a run in a folder, and no line lost or twice.
    assert commands.losses(local(tmp_path)) == commands.losses(tmp_path / "plain")
    again = commands.run(ADDRESS, *QUICK, cache=cache, timeout=600)
    assert again.returncode == 0 and "This run is finished." in again.stdout
    shown = subprocess.run(
        [sys.executable, "-m", "tba_jax.buffer", ADDRESS, "--json"],
        env=commands.environment(cache),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert shown.returncode == 0 and json.loads(shown.stdout.splitlines()[-1])["step"] == 40
