# SPDX-License-Identifier: Apache-2.0
"""Real faults in real processes of the main command: what the user reads, the exit code, and
whether the work directory can be used afterwards."""

import json
import os
import resource

import pytest
from commands import SYNC, run, start, wait_for

from tba_jax.run.checkpoint import load_host_state
from tests.chaos.killer import check_finished, kill_often

# A failing command may take this long to say so; it includes starting Python and JAX.
DEADLINE_S = 60


@pytest.mark.slow
def test_watchdog_dumps_stacks_and_exits_3(cache, tmp_path):
    reward = "import time\n\n\ndef sleeps(prompts, completions, **columns):\n    time.sleep(600)\n"
    (tmp_path / "my_rewards.py").write_text(reward)
    settings = ("task.reward=my_rewards:sleeps", "reward.timeout_s=600.0")
    limit = "log.watchdog_s=15.0"  # long enough to reach the reward on a busy machine
    given = {"cache": cache, "cwd": tmp_path, "timeout": DEADLINE_S}
    done = run(tmp_path / "run", *settings, limit, **given)
    assert done.returncode == 3
    text = "error: no step, ticket or evaluation ended for 15 s (config.log.watchdog_s)"
    assert done.stderr.startswith(text) and "run the same command again" in done.stderr
    assert "in grade" in done.stderr  # where the searcher hangs


@pytest.mark.slow
def test_a_policy_that_diverges_stops_the_run_and_keeps_the_checkpoint(cache, tmp_path):
    workdir = tmp_path / "run"
    overrides = ("optimizer.learning_rate=1e9", "checkpoint.period=1")
    done = run(workdir, *overrides, *SYNC, "eval.period=0", cache=cache)
    # The first step spoils the parameters, with which the searchers then sample.
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 2 and "log-probs of the policy are not finite" in line, line
    assert line.startswith("error: ") and "Lower --config.optimizer.learning_rate" in line, line
    step, host_state = load_host_state(str(workdir))
    assert step == 1 and "buffer" in host_state


@pytest.mark.slow
def test_a_buffer_that_holds_no_batch_ends_the_run_that_would_search_for_ever(cache, tmp_path):
    """One response of each prompt would fit by its bookkeeping, and does not with its tokens."""
    done = run(tmp_path / "run", "eval.period=0", "replay.max_bytes=900", cache=cache)
    (line,) = done.stderr.strip().splitlines()
    assert done.returncode == 1 and line.startswith("error: no batch of 4 prompts can be drawn")
    assert "of 900 bytes); responses so far: {'generated': " in line


@pytest.mark.slow
def test_a_disk_that_fills_up_ends_the_run_and_it_continues_when_there_is_room(cache, tmp_path):
    workdir = tmp_path / "run"
    process = start(workdir, "num_steps=16", cache=cache)
    wait_for((workdir / "checkpoints" / "4").exists, process=process)
    # The kernel refuses to let a file grow beyond this, as it does on a full disk.
    resource.prlimit(process.pid, resource.RLIMIT_FSIZE, (200_000, 200_000))
    _, err = process.communicate(timeout=DEADLINE_S)
    # TensorStore's threads may print tracebacks of their own, before the message and after it.
    (message,) = [line for line in err.splitlines() if line.startswith("error: ")]
    assert process.returncode == 1
    assert message.startswith(f"error: writing {workdir}/checkpoints/")
    assert "File too large" in message and "Free space" in message
    kept = json.loads(message.split("Complete checkpoints: ")[1].split(". ")[0])
    assert kept and load_host_state(str(workdir))[0] == kept[-1]
    done = run(workdir, "num_steps=16", cache=cache)
    assert done.returncode == 0 and f"resumed {workdir} at step" in done.stdout, done.stderr
    check_finished(workdir, 16)
    assert sorted(os.listdir(workdir / "checkpoints")) == ["12", "16"]


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_sigkill_six_times_then_resume(cache, tmp_path):
    kill_often(tmp_path / "run", "async", kills=6, num_steps=60, cache=cache)
