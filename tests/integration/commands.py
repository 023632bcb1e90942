# SPDX-License-Identifier: Apache-2.0
"""The main command on the embedded start model, shrunk to seconds, in a process of its own."""

import collections
import itertools
import json
import os
import subprocess
import sys
import time
from pathlib import Path

import jax
import numpy as np

from tba_jax.commands import evaluate, export
from tba_jax.commands.saved import load_policy
from tba_jax.models import model as models
from tba_jax.remote.messages import decode
from tba_jax.replay.records import from_snapshot
from tba_jax.run.checkpoint import load_host_state

ROOT = Path(__file__).parents[2]

SMALL = (
    "num_steps=8",
    "batch.num_prompts=4",
    "task.num_eval_prompts=16",
    "eval.period=4",
    "checkpoint.period=4",
)
SYNC = ("driver=sync",)


def settings(overrides):
    """Overrides without those of the environment, NAME=VALUE."""
    return [override for override in overrides if not override.startswith("JAX_")]


def arguments(workdir, *overrides, config="configs/math.py"):
    """Flags of a small run."""
    return [
        f"--config={ROOT / config}",
        f"--workdir={workdir}",
        *(f"--config.{override}" for override in (*SMALL, *settings(overrides))),
    ]


def command(workdir, *overrides, config="configs/math.py", flags=()):
    """argv of a small run."""
    main = [sys.executable, "-m", "tba_jax.main"]
    return [*main, *arguments(workdir, *overrides, config=config), *flags]


def environment(cache, overrides=()):
    """Environment with a compilation cache that the runs of a test share."""
    return {
        **os.environ,
        **dict(each.split("=") for each in overrides if each.startswith("JAX_")),
        "JAX_PLATFORMS": "cpu",
        "HF_HUB_OFFLINE": "1",
        "PYTHONPATH": str(ROOT),  # for tests that run elsewhere
        "JAX_COMPILATION_CACHE_DIR": str(cache),
        "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": "0",
        # Another process writes this program at the moment; JAX compiles it again.
        "PYTHONWARNINGS": "ignore:Error reading persistent compilation cache entry",
    }


def options(cache, overrides, cwd):
    """How a command is started."""
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    return {**pipes, "env": environment(cache, overrides), "cwd": cwd or ROOT}


def run(workdir, *overrides, cache, timeout=150, cwd=None, code=0, **kwargs):
    """Run to the end, with this exit code; returns the completed process."""
    argv = command(workdir, *overrides, **kwargs)
    done = subprocess.run(argv, timeout=timeout, **options(cache, overrides, cwd))
    assert done.returncode == code, done.stderr
    return done


def start(workdir, *overrides, cache, cwd=None, **kwargs):
    """Start without waiting."""
    argv = command(workdir, *overrides, **kwargs)
    return subprocess.Popen(argv, **options(cache, overrides, cwd))


def lines(path):
    """Complete JSON lines of a file, [] when it is not there yet."""
    if not Path(path).exists():
        return []
    text = Path(path).read_text()
    return [json.loads(line) for line in text[: text.rfind("\n") + 1].splitlines()]


def losses(workdir):
    """step -> loss of every training line."""
    return {
        record["step"]: record["train/loss"]
        for record in lines(Path(workdir) / "metrics.jsonl")
        if "train/loss" in record
    }


def report(workdir):
    """report.json of a run."""
    return json.loads((Path(workdir) / "report.json").read_text())


def wait_for(condition, *, process, timeout=120.0):
    """Poll until `condition()`; fails when the process ends or the time is over."""
    end = time.monotonic() + timeout
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end, "timed out"
        time.sleep(0.02)


def start_pod(num_processes, workdir, *overrides, cache, cwd=None):
    """The launcher, without waiting."""
    launcher = [sys.executable, "-m", "tba_jax", "launch_processes"]
    argv = [*launcher, f"--num_processes={num_processes}", "--", *arguments(workdir, *overrides)]
    return subprocess.Popen(argv, **options(cache, overrides, cwd))


def run_pod(num_processes, workdir, *overrides, cache, cwd=None, timeout=240):
    """(exit code, standard output, standard error) of a run of several processes."""
    process = start_pod(num_processes, workdir, *overrides, cache=cache, cwd=cwd)
    try:
        out, err = process.communicate(timeout=timeout)
    finally:
        process.kill()
    return process.returncode, out, err


def child(pod, process_id):
    """Process id of one process of a pod."""
    command = ["pgrep", "-P", str(pod.pid), "-f", f"process_id={process_id}"]
    return int(subprocess.check_output(command, text=True).split()[0])


def assert_trained(workdir, num_steps):
    """A run made each step once, on responses of published versions, and lost none."""
    records = [r for r in lines(workdir / "metrics.jsonl") if "train/loss" in r]
    assert [r["step"] for r in records] == list(range(1, num_steps + 1))
    # Every response that was generated is under one heading.
    ledger = report(workdir)["ledger"]
    gone = sum(count for name, count in ledger.items() if name.startswith("evicted"))
    gone += sum(ledger["rejected"].values()) + ledger.get("lost", 0)
    assert ledger["generated"] == ledger["waiting"] + ledger["stored"] + gone > 0
    assert_every_ticket_once(workdir)
    # A response never carries a version that was not published before it was trained on.
    for record in records:
        assert all(0 <= age < record["step"] for age, _ in record["buffer/staleness_histogram"])


def assert_every_ticket_once(workdir):
    """Every ticket of the newest checkpoint is open, or has one result, which is merged once."""
    config = json.loads((workdir / "config.json").read_text())["config"]
    size = config["search.samples_per_prompt"]
    _, host_state = load_host_state(str(workdir))
    arrays, meta = host_state["owner"]
    waiting = [result.number for result in decode(arrays["results"].tobytes())]
    done = set(range(meta["_next"])) - set(meta["open"])
    _, packed, packer = from_snapshot(*host_state["buffer"])
    stored = map(packer.unpack, itertools.chain.from_iterable(packed))
    merged = collections.Counter(y.ticket for y in stored)
    assert merged and max(merged.values()) <= size
    assert len(set(waiting)) == len(waiting) and not set(merged) & set(waiting)
    assert set(merged) | set(waiting) <= done
    assert meta["_num_generated"] == (len(done) - meta["num_skipped"]) * size


def evaluated(workdir, capsys):
    """Figures of the command `evaluate`, and of the last evaluation of the run."""
    assert evaluate.main([f"--workdir={workdir}", "--json"]) == 0
    return json.loads(capsys.readouterr().out.splitlines()[-1]), report(workdir)["eval"]["after"]


def exported(workdir, out):
    """(architecture, parameters) of the run's policy in a folder, read again."""
    assert export.main([f"--workdir={workdir}", f"--out={out}"]) == 0
    found = models.describe(str(out))
    params = found.load_params()
    trained = load_policy(str(workdir))[2]
    jax.tree.map(np.testing.assert_array_equal, params, jax.device_get(trained))
    return found.config, params
