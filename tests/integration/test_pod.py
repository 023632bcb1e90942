# SPDX-License-Identifier: Apache-2.0
"""Several hosts: real processes on loopback with the CPU's gloo collectives."""

import contextlib
import shutil
from types import SimpleNamespace

import numpy as np
import pytest
from commands import SYNC, assert_trained, losses, report, run, run_pod

from tba_jax.config.schema import make_config
from tba_jax.run.errors import UserError
from tba_jax.run.run import _claim_together
from tba_jax.storage.whole_files import read_json, write_json

# A run whose batches do not depend on how many hosts draw them: all slots are fresh, all responses
# of a prompt are in its group, and at this temperature hardly any comes twice.
SAME = (
    *SYNC,
    "replay.recency_prob=1.0",
    "num_searchers=2",
    "mesh.data=2",
    "objective.group_size=2",
    "search.samples_per_prompt=2",
    "search.sampling_temperature=2.0",
    "task.reward=my_rewards:length",
)


@pytest.fixture
def folder(tmp_path):
    """A user's folder with a reward that tells responses apart."""
    reward = "def length(completions, **columns):\n    return [len(x) / 20 for x in completions]\n"
    (tmp_path / "my_rewards.py").write_text(reward)
    return tmp_path


@pytest.mark.slow
def test_two_processes_train_and_search_together(cache, tmp_path):
    workdir = tmp_path / "run"
    overrides = ("num_steps=3", "checkpoint.period=0", "JAX_NUM_CPU_DEVICES=2", "num_searchers=2")
    code, out, err = run_pod(2, workdir, *overrides, cache=cache)
    assert code == 0, err
    assert out.count("Report: ") == 1
    assert_trained(workdir, 3)
    final = report(workdir)
    assert final["processes"] == 2 and len(final["idle_s"]["searchers"]) == 2


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_hosts_make_losses_ledger_and_evaluations_of_one(cache, folder):
    whole = (*SAME, "placement=hosts", "JAX_NUM_CPU_DEVICES=1")
    code, _, err = run_pod(4, folder / "pod", *whole, cache=cache, cwd=folder)
    assert code == 0, err
    one = (*SAME, "JAX_NUM_CPU_DEVICES=4", "placement=split")
    run(folder / "one", *one, cache=cache, cwd=folder)
    expected, found = losses(folder / "one"), losses(folder / "pod")
    assert len(expected) == 8
    # The gradient is summed over devices in another order: float32 rounding (6e-8) of each of a few
    # thousand summands, and what Adam makes of it over 8 steps.
    np.testing.assert_allclose(list(found.values()), list(expected.values()), rtol=2e-4)
    for name in ("ledger", "eval"):
        assert report(folder / "pod")[name] == report(folder / "one")[name]


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_pods_of_two_and_four_make_the_losses_of_one_and_four_resume_on_fewer(cache, folder):
    fields = (
        *SAME,
        "num_searchers=4",
        "mesh.data=4",
        "eval.period=0",
        "num_steps=20",
        "checkpoint.period=10",
    )
    found = {}
    for number in (1, 2, 4):
        workdir, devices = folder / f"of{number}", f"JAX_NUM_CPU_DEVICES={8 // number}"
        code, _, err = run_pod(number, workdir, *fields, devices, cache=cache, cwd=folder)
        assert code == 0, err
        found[number] = losses(workdir)
    assert len(found[1]) == 20
    for number in (2, 4):
        assert_close(found[number], found[1])
    for number in (1, 2):
        workdir = folder / f"resumed{number}"
        shutil.copytree(folder / "of4", workdir)
        saved = read_json(workdir / "config.json")
        saved["config"]["num_steps"] = 24
        write_json(workdir / "config.json", saved)
        more = ("num_steps=24", f"JAX_NUM_CPU_DEVICES={8 // number}")
        code, out, err = run_pod(number, workdir, *fields, *more, cache=cache, cwd=folder)
        assert code == 0, err
        assert "at step 20 of 24" in out
        assert_trained(workdir, 24)
        found[f"resumed{number}"] = losses(workdir)
    assert_close(found["resumed1"], found["resumed2"])


def assert_close(found, expected):
    """A loss is a mean of squares: 2 sqrt(loss) times the rounding of a residual.

    A residual is a float32 sum of log-probs and log Z of up to 8 nats, whose spacing is 4.8e-7.
    """
    found, expected = ([*each.values()] for each in (found, expected))
    np.testing.assert_allclose(found, expected, rtol=0, atol=2 * 4.8e-7 * max(expected) ** 0.5)


def test_another_version_on_one_host_is_refused(tmp_path):
    def gather(value):
        """As a second process with other code would answer."""
        return [value, value | {"code": "x"} if isinstance(value, dict) else value]

    pod, config = SimpleNamespace(number=0, gather_json=gather, close=str), make_config()
    wanted = "process 1 was started with another command than process 0: code: 'tba_jax .*'x'. St"
    with contextlib.ExitStack() as held, pytest.raises(UserError, match=wanted):
        _claim_together(pod, config, tmp_path / "run", 0, held)
    assert not any(tmp_path.iterdir())
