# SPDX-License-Identifier: Apache-2.0
"""launch/tpu.sh end to end: two workers of a fake slice run one pod job on loopback."""

import json
import shutil

import pytest
from commands import SMALL, lines
from launch_cloud import ROOT, Cloud

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]

# The workers find one another by JAX_COORDINATOR_ADDRESS and the like, which the fake machines have
# instead of a TPU's metadata, and train together in one work directory on the share.
JOB = "python -m tba_jax.main --config=configs/math.py --workdir=$BUCKET/run"


@pytest.fixture
def cloud(tmp_path, cache):
    """A cloud, and a checkout of the package."""
    tree = tmp_path / "tree"
    ignored = shutil.ignore_patterns("__pycache__")
    for folder in ("tba_jax", "configs", "launch"):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignored)
    for file in ("pyproject.toml", "README.md", ".gitignore"):
        shutil.copy(ROOT / file, tree / file)
    worker_env = {
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
    }
    made = Cloud(tmp_path, tree, worker_env)
    yield made
    made.close()


def job(*overrides):
    return " ".join([JOB, *(f"--config.{override}" for override in (*SMALL, *overrides))])


def steps(cloud):
    """The training steps of the run, in the order of its log."""
    log = lines(cloud.bucket / "run" / "metrics.jsonl")
    return [record["step"] for record in log if "train/loss" in record]


def test_two_workers_train_from_create_to_delete(cloud):
    cloud.settings(JOB=job("num_steps=24"), POLL_S="1")
    cloud.tpu("create")
    out = cloud.tpu("setup", timeout=300).stdout
    assert "[w-0] Python 3" in out and "[w-1] Python 3" in out
    running = cloud.start("run")
    cloud.wait_for(lambda: len(steps(cloud)) >= 6, process=running, timeout=300)
    # Stopping saves: the same command goes on from there.
    cloud.tpu("stop")
    logged = cloud.tpu("logs").stdout
    assert "[w-0] Stopped by SIGTERM at step " in logged
    assert "[w-1] Stopped by" not in logged
    out = cloud.tpu("run", timeout=300).stdout
    assert "the job is done on every worker" in out
    assert steps(cloud) == list(range(1, 25))
    report = json.loads((cloud.bucket / "run" / "report.json").read_text())
    assert report["steps"] == 24 and report["eval"]["after"]["step"] == 24
    logged = cloud.tpu("logs").stdout
    assert "[w-0] Report: " in logged and "[w-1] Report: " not in logged
    # Once more is harmless.
    cloud.tpu("run", timeout=300)
    assert "This run is finished" in cloud.tpu("logs").stdout
    cloud.tpu("delete")
    assert cloud.homes() == []
