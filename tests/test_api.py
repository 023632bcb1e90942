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
from tba_jax.settings import ConfigError

ROOT = Path(__file__).parents[1]
pytestmark = pytest.mark.usefixtures("compiled_once")
SMALL = {"num_steps": 6, "batch": {"num_prompts": 4}, "task": {"num_eval_prompts": 16}}


def python(code, cwd, *arguments):
    """Run a program of one string, as cells of a notebook; return what it printed."""
    done = subprocess.run(
        [sys.executable, "-c", code, *arguments], cwd=cwd, capture_output=True, text=True,
        env={**os.environ, "PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}, timeout=170,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout


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
    python(code, tmp_path)


def test_overrides_mean_what_they_mean_on_the_command_line():
    config = tba_jax.load_config(
        "math:gsm8k",
        lora={"rank": 4, "modules": ["q", "v"]},
        replay={"priority_temperature": float("inf")},
        **{"objective.beta": 0.02},
    )
    fields = (
        "lora.rank=4",
        "lora.modules=('q', 'v')",
        "replay.priority_temperature=inf",
        "objective.beta=0.02",
    )
    assert config == override(None, ["--config=math:gsm8k", *(f"--config.{x}" for x in fields)])


TRAIN = """
import json, os, signal, sys, threading, time
from pathlib import Path
import tba_jax
from tba_jax.settings import ConfigError
from tba_jax.train.losses import group_mean, regularised, summed
from tba_jax.train.objectives import Needs, objective

@objective(Needs(sampler="any"))
def my_loss(groups, beta, *, strength=1.0):
    reward = regularised(groups, groups.logp, beta)
    return -(reward - strength * group_mean(reward)) * summed(groups, groups.logp)

def brevity(completions, **columns):
    return [-float(len(text)) for text in completions]

def double(step, values):
    return {"own/double": 2 * step}

def fails(step, values):
    return {"own/loss": values["train/los"]}

def refused(kind, call, *texts):
    try:
        call()
    except kind as error:
        assert all(text in str(error) for text in texts), error
        return
    raise SystemExit(f"{texts} did not come")

config = tba_jax.load_config("math", **json.loads(sys.argv[1]))
run = lambda config=config, **own: tba_jax.run_training(config, "a", **own)
refused(ConfigError, lambda: run(reward=brevity), "in_process=True", "without a deadline")

own = {"reward": brevity, "in_process": True, "objective": my_loss}
own |= {"callbacks": [double, fails]}
before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)

def interrupt():
    metrics = Path("a/metrics.jsonl")
    while not metrics.exists() or '"step": 2' not in metrics.read_text():
        time.sleep(0.01)
    os.kill(os.getpid(), signal.SIGINT)

refused(ConfigError, lambda: run(callbacks=[lambda values: 0]), "too many", "(step, values)")
threading.Thread(target=interrupt, daemon=True).start()
refused(KeyboardInterrupt, lambda: run(**own), "the run is saved in ")
assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
assert not [t.name for t in threading.enumerate() if t.name.startswith("searcher-")]

reports = []
thread = threading.Thread(target=lambda: reports.append(run(**own)))
thread.start()
thread.join()
(report,) = reports
assert report["steps"] == 6 and report == json.loads(Path("a/report.json").read_text())
assert run(**own) == report

found = tba_jax.load_run("a")
assert found.report == report and found.config.objective.name == "notebook.py:my_loss"
assert found.column("train/loss")[0].tolist() == [1, 2, 3, 4, 5, 6]
assert found.column("own/double")[1].tolist() == [2, 4, 6, 8, 10, 12]
assert (found.column("train/reward_mean")[1] < 0).all()
assert found.plot("accuracy")._repr_png_().startswith(bytes.fromhex("89504e47"))
stored = [y for responses in found.buffer().values() for y in responses]
assert stored and all(len(y.response_tokens) and y.version_min <= 6 for y in stored)
policy = found.load_policy()
assert policy.step == 6 and policy.params["embed"].shape[0] == policy.config.vocab_size
refused(ValueError, lambda: found.column("train/los"), "train/loss")
other = tba_jax.load_config("math", num_steps=3)
refused(Exception, lambda: run(other), "a holds a run with another config")
print("all is well")
"""


@pytest.mark.slow
def test_a_run_of_own_functions_is_interrupted_continued_in_a_thread_and_read_back(tmp_path):
    told = python(TRAIN, tmp_path, json.dumps(SMALL))
    assert told.splitlines()[-1] == "all is well"
    # Said once in each of the two processes' runs.
    assert told.count("callback fails raised KeyError: 'train/los'. The run continues") == 2
    assert ", in fails" in told


def test_what_one_process_cannot_train_is_refused_in_a_sentence(tmp_path):
    code = (
        "import jax, tba_jax; jax.devices()\n"
        "try: tba_jax.run_training(tba_jax.load_config('math'), 'a')\n"
        "except Exception as error: print(error)\n"
    )
    assert python(code, tmp_path).strip() == (
        "the run divides the CPU into 2 devices, and jax runs in this process already, with 1 CPU "
        "device(s). Restart it (the kernel of a notebook) and train before anything else uses jax, "
        "or set --config.placement=shared"
    )
    with pytest.raises(ConfigError, match="needs a process per host, and this is one"):
        tba_jax.run_training(tba_jax.load_config("math", placement="hosts"), tmp_path / "a")
    fleet = tba_jax.load_config("math", placement="fleet")
    with pytest.raises(ConfigError, match="in_process=True have no effect"):
        tba_jax.run_training(fleet, "a", reward=lambda completions: [1.0], in_process=True)
