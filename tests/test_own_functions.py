# SPDX-License-Identifier: Apache-2.0
"""Reward, objective and callbacks of a notebook."""

import json

import pytest
from test_api import SMALL, python

import tba_jax
from tba_jax.report.build import build_report
from tba_jax.rewards.pool import RewardPool, start_workers
from tba_jax.settings import GIVEN, ConfigError, given_names, importable_name

# Executed without a file, as cells of a notebook are.
NOTEBOOK = """
import json, sys
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

config = tba_jax.load_config("math", **json.loads(sys.argv[1]))
try:
    tba_jax.run_training(config, "a", reward=brevity)
    raise SystemExit("a process cannot import the reward")
except ConfigError as error:
    assert "in_process=True" in str(error) and "without a deadline" in str(error), error
try:
    tba_jax.run_training(config, "a", callbacks=[lambda values: None])
    raise SystemExit("the signature is wrong")
except ConfigError as error:
    assert "the run calls <lambda> with (step, values)" in str(error), error
report = tba_jax.run_training(
    config, "a", reward=brevity, in_process=True, objective=my_loss,
    callbacks=[double, fails],
)
run = tba_jax.load_run("a")
assert run.column("own/double")[1].tolist() == [2.0, 4.0, 6.0]
assert (run.column("train/reward_mean")[1] < 0).all()
assert run.config.objective.name == "notebook.py:my_loss"
print("all is well")
"""


def test_a_notebook_gives_reward_objective_and_callbacks(tmp_path):
    settings = {
        **SMALL,
        "num_steps": 3,
    }
    done = python(NOTEBOOK, tmp_path, json.dumps(settings))
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert lines[-1] == "all is well"
    told = "\n".join(lines)
    assert "callback fails raised KeyError: 'train/los'. The run continues" in told
    assert told.count("raised KeyError") == 1 and ", in fails" in told


def test_a_reward_in_this_process_names_failures():
    def picky(completions, answer):
        if "bad" in completions:
            raise ZeroDivisionError("bad")
        return [
            None if text == "none" else float("nan" if text == "nan" else 1) for text in completions
        ]

    (name,) = given_names([picky])
    row, workers = ("1+1", {"answer": "2"}), start_workers(name, 0)
    source = RewardPool(name, timeout_s=10.0, row=row, workers=workers)
    source.check()
    texts = ["ok", "bad", "none", "ok", "ok", "ok"]
    found = source.score(["p"] * 6, texts, {"answer": ["2"] * 6})
    assert found.rewards == [1.0, None, None, 1.0, 1.0, 1.0]
    assert found.reasons[1:3] == ["reward_error", "reward_none"]
    assert "in picky" in found.first_traceback
    source.close()


def test_names_of_functions():
    assert importable_name(build_report) == "tba_jax.report.build:build_report"
    assert importable_name(lambda: None) == ""
    two = [lambda: 1, lambda: 2]
    assert [GIVEN[name]() for name in given_names(two)] == [1, 2]
    assert given_names(two) == ["notebook.py:lambda", "notebook.py:lambda_2"]


def test_in_process_rewards_need_searchers_in_this_process():
    config = tba_jax.load_config("math", placement="fleet")
    with pytest.raises(ConfigError, match="in_process=True have no effect"):
        tba_jax.run_training(config, "a", reward=lambda completions: [1.0], in_process=True)
