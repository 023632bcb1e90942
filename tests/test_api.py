# SPDX-License-Identifier: Apache-2.0
"""The Python API: configs by name, training in a process that goes on, runs read back."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import tba_jax
from tba_jax.config.command_line import override
from tba_jax.config.schema import ConfigError

ROOT = Path(__file__).parents[1]
pytestmark = [
    pytest.mark.usefixtures("compiled_once"),
]

SMALL = {
    "num_steps": 6,
    "batch": {"num_prompts": 4},
    "task": {"num_eval_prompts": 16},
}


def python(code, cwd, *arguments):
    """Run a program of one string; returns the completed process."""
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        cwd=cwd,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=170,
    )


def test_the_package_and_a_preset_load_no_jax(tmp_path):
    code = (
        "import sys, tba_jax\n"
        "early = {'jax', 'numpy', 'absl'} & {*sys.modules}\n"
        "assert early == set(), early\n"
        "assert {'load_config', 'run_training', 'load_run'} <= {*dir(tba_jax)}\n"
        "tba_jax.run_training, tba_jax.load_run\n"
        "from tba_jax.config.presets import load\n"
        "assert load('math:gsm8k').num_steps == 700\n"
        "assert 'jax' not in sys.modules\n"
        "assert tba_jax.load_config('math:gsm8k').num_steps == 700\n"
        "from absl import flags\n"
        "assert 'config' not in flags.FLAGS and 'workdir' not in flags.FLAGS\n"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr


def test_overrides_mean_what_they_mean_on_the_command_line(tmp_path):
    config = tba_jax.load_config(
        "math:gsm8k",
        num_steps=20,
        search={"top_p": 0.9},
        lora={"rank": 4, "modules": ["q", "v"]},
        replay={"priority_temperature": float("inf")},
        log={"tracker": "tensorboard"},
        task={"data_path": str(tmp_path)},
        **{"objective.beta": 0.02},
    )
    assert config == override(
        None,
        [
            "--config=math:gsm8k",
            "--config.num_steps=20",
            "--config.search.top_p=0.9",
            "--config.lora.rank=4",
            "--config.lora.modules=('q', 'v')",
            "--config.replay.priority_temperature=inf",
            "--config.log.tracker=tensorboard",
            f"--config.task.data_path={tmp_path}",
            "--config.objective.beta=0.02",
        ],
    )
    assert (config.search.top_p, config.lora.modules) == (0.9, ("q", "v"))
    assert tba_jax.load_config(str(ROOT / "configs/math.py")) == tba_jax.load_config("math")


TRAIN = """
import json, os, signal, sys, threading, time
from pathlib import Path
import tba_jax

config = tba_jax.load_config("math", **json.loads(sys.argv[1]))
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

def interrupt():
    metrics = Path("a/metrics.jsonl")
    while not metrics.exists() or '"step": 2' not in metrics.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

threading.Thread(target=interrupt, daemon=True).start()
try:
    tba_jax.run_training(config, "a")
    raise SystemExit("was not interrupted")
except KeyboardInterrupt as stop:
    assert "the run is saved in " in str(stop), stop
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
assert not [t.name for t in threading.enumerate() if t.name.startswith("searcher-")]

reports = []
thread = threading.Thread(target=lambda: reports.append(tba_jax.run_training(config, Path("a"))))
thread.start()
thread.join()
(report,) = reports
on_disk = json.loads(Path("a/report.json").read_text())
assert report["steps"] == 6 and report == on_disk
changed = os.stat("a/report.json").st_mtime_ns
assert tba_jax.run_training(config, "a") == report
assert os.stat("a/report.json").st_mtime_ns == changed
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before

run = tba_jax.load_run("a")
assert run.config == config and run.report == report
assert [r["step"] for r in run.metrics if "train/loss" in r] == [1, 2, 3, 4, 5, 6]
steps, losses = run.column("train/loss")
assert steps.tolist() == [1, 2, 3, 4, 5, 6]
assert losses.tolist() == [r["train/loss"] for r in run.metrics if "train/loss" in r]
assert run.plot("accuracy")._repr_png_().startswith(bytes.fromhex("89504e47"))
assert repr(run).startswith("a: pass@1 ")
stored = [y for responses in run.buffer().values() for y in responses]
assert stored and all(len(y.response_tokens) and y.version_min <= 6 for y in stored)
policy = run.load_policy()
assert policy.step == 6 and policy.params["embed"].shape[0] == policy.config.vocab_size
for wrong, ask in (("train/los", run.column), ("accurcy", run.plot)):
    try:
        ask(wrong)
        raise SystemExit(f"{wrong} was accepted")
    except ValueError as error:
        assert "train/loss" in str(error) or "accuracy" in str(error), error
try:
    tba_jax.run_training(tba_jax.load_config("math", num_steps=3), "a")
    raise SystemExit("another config was accepted")
except Exception as error:
    assert "a holds a run with another config" in str(error), error
print("all is well")
"""


def test_a_run_is_interrupted_continued_in_a_thread_asked_for_again_and_read_back(tmp_path):
    done = python(TRAIN, tmp_path, json.dumps(SMALL))
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "all is well"


def test_jax_that_runs_already_on_fewer_devices_is_refused_in_a_sentence(tmp_path):
    code = (
        "import jax, tba_jax; jax.devices()\n"
        "try: tba_jax.run_training(tba_jax.load_config('math'), 'a')\n"
        "except Exception as error: print(error)\n"
    )
    done = python(code, tmp_path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == (
        "the run divides the CPU into 2 devices, and jax runs in this process already, with 1 CPU "
        "device(s). Restart it (the kernel of a notebook) and train before anything else uses jax, "
        "or set --config.placement=shared"
    )


def test_hosts_are_not_trained_from_one_process(tmp_path):
    config = tba_jax.load_config("math", placement="hosts")
    with pytest.raises(ConfigError, match="needs a process per host, and this is one"):
        tba_jax.run_training(config, tmp_path / "a")
