# SPDX-License-Identifier: Apache-2.0
"""A process of a pod is killed: the others end by themselves, say why, and the run resumes."""

import re
import signal
import subprocess
import time

import pytest
from commands import child, losses, start_pod, wait_for

from tba_jax.run.checkpoint import load_host_state

# What the project promises: every process has ended this long after one was killed.
PROMISED_S = 45


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_a_killed_process_ends_the_pod_and_the_same_command_continues(victim, cache, tmp_path):
    workdir = tmp_path / "run"
    overrides = ("JAX_NUM_CPU_DEVICES=2", "num_steps=400", "eval.period=0", "checkpoint.period=4")
    pod = start_pod(2, workdir, *overrides, cache=cache)
    wait_for(
        lambda: max(losses(workdir), default=0) >= 7 and (workdir / "checkpoints" / "4").exists(),
        process=pod,
    )
    killed_at = time.monotonic()
    subprocess.run(["kill", f"-{signal.SIGKILL}", str(child(pod, victim))], check=True)
    out, err = pod.communicate(timeout=PROMISED_S + 20)
    lasted = time.monotonic() - killed_at
    print(f"process {victim} killed: the last process ended after {lasted:.1f} s")
    assert pod.returncode == 128 + signal.SIGKILL
    assert lasted < PROMISED_S
    assert f"process {victim} was killed by SIGKILL, the first of 2 to fail" in err
    assert "did not end by itself" not in err and "Run the same command again" in err
    last = max(losses(workdir))
    saved = max(int(p.name) for p in (workdir / "checkpoints").iterdir() if p.name.isdigit())

    pod = start_pod(2, workdir, *overrides, cache=cache)
    wait_for(lambda: max(losses(workdir), default=0) > last, process=pod)
    # All save together when one of them is to end, and the pod exits with status 0.
    subprocess.run(["kill", "-TERM", str(child(pod, 1))], check=True)
    out, err = pod.communicate(timeout=60)
    assert pod.returncode == 0, err
    stopped_at = int(re.search(r"Stopped by .* at step (\d+) of", out)[1])
    assert stopped_at > last and load_host_state(str(workdir))[0] == stopped_at
    assert f"resumed {workdir} at step {saved} of 400" in out or f"at step {saved - 4} of" in out
    made = sorted(losses(workdir))
    assert made == list(range(1, made[-1] + 1))
