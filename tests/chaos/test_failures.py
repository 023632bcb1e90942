# SPDX-License-Identifier: Apache-2.0
"""Real faults, signals and full disks: what the user reads, the exit code, and what was saved."""

import contextlib
import json
import os
import pty
import resource
import signal
import subprocess
import sys
import time

import pytest
from commands import ROOT, SYNC, command, environment, losses, run, start, wait_for
from fake_workdir import fake_workdir

from tba_jax.report import build, files
from tba_jax.run.checkpoint import load_host_state
from tests.chaos.killer import check_finished, kill_often

pytestmark = [pytest.mark.timeout(900), pytest.mark.slow]
DEADLINE_S = 300  # a command that takes longer waits for ever, also on a busy machine


def test_watchdog_dumps_stacks_and_exits_3(cache, tmp_path):
    reward = "import time\n\n\ndef sleeps(prompts, completions, **columns):\n    time.sleep(600)\n"
    (tmp_path / "my_rewards.py").write_text(reward)
    settings = ("task.reward=my_rewards:sleeps", "reward.timeout_s=600.0")
    limit = "log.watchdog_s=15.0"  # long enough to reach the reward on a busy machine
    given = {"cache": cache, "cwd": tmp_path, "timeout": DEADLINE_S, "code": 3}
    done = run(tmp_path / "run", *settings, limit, **given)
    text = "error: no step, ticket or evaluation ended for 15 s (config.log.watchdog_s)"
    assert done.stderr.startswith(text) and "run the same command again" in done.stderr
    assert "in grade" in done.stderr  # where the searcher hangs


def test_a_policy_that_diverges_stops_the_run_and_keeps_the_checkpoint(cache, tmp_path):
    workdir = tmp_path / "run"
    overrides = ("optimizer.learning_rate=1e9", "checkpoint.period=1")
    done = run(workdir, *overrides, *SYNC, "eval.period=0", cache=cache, code=2)
    # The first step spoils the parameters, with which the searchers then sample.
    (line,) = done.stderr.strip().splitlines()
    assert "log-probs of the policy are not finite" in line, line
    assert line.startswith("error: ") and "Lower --config.optimizer.learning_rate" in line, line
    step, host_state = load_host_state(str(workdir))
    assert step == 1 and "buffer" in host_state


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
    assert f"resumed {workdir} at step" in done.stdout
    check_finished(workdir, 16)
    assert sorted(os.listdir(workdir / "checkpoints")) == ["12", "16"]


def test_sigkill_six_times_then_resume(cache, tmp_path):
    kill_often(tmp_path / "run", "async", kills=6, num_steps=60, cache=cache)


# commands/test_entry_point.py has the parts; test_api.py interrupts a run by SIGINT.
LONG = (*SYNC, "num_steps=500", "eval.period=0", "checkpoint.period=0")
SHORT = (*SYNC, "num_steps=4", "eval.period=0", "checkpoint.period=0")


def assert_saved(workdir):
    """The newest checkpoint has every step that was logged."""
    step, _ = load_host_state(str(workdir))
    assert step >= max(losses(workdir))
    assert json.loads((workdir / "report.json").read_text())["steps"] == step


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_is_closed(cache, tmp_path, is_ignored):
    """The run saves and ends, or goes on without a terminal where it was told to ignore that."""
    workdir = tmp_path / "run"
    end, terminal = pty.openpty()
    shell = ["env", "--default-signal=HUP", "sh"]  # which may be ignored here, as under nohup
    in_shell = [*shell, "-c", ("trap '' HUP; " if is_ignored else "") + 'exec "$@"', "sh"]
    run = command(workdir, *(SHORT if is_ignored else LONG))
    streams = dict.fromkeys(("stdin", "stdout", "stderr"), terminal)
    process = subprocess.Popen(
        ["setsid", "--ctty", *in_shell, *run], env=environment(cache), cwd=ROOT, **streams
    )
    os.close(terminal)
    os.set_blocking(end, False)
    deadline = time.monotonic() + DEADLINE_S
    while len(losses(workdir)) < 2 and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # nothing to read
            os.read(end, 65536)
        time.sleep(0.02)
    os.close(end)
    code = process.wait(DEADLINE_S)
    assert code == (0 if is_ignored else 128 + signal.SIGHUP)
    assert_saved(workdir)


def test_a_report_on_a_disk_that_is_full_is_one_line(cache, tmp_path):
    fake_workdir(tmp_path, num_steps=20)
    page = build.write_report(files.load_run(tmp_path)).read_bytes()
    report = [sys.executable, "-m", "tba_jax.report", str(tmp_path)]
    limited = ["prlimit", "--fsize=10000", *report]
    with open("/dev/full", "w") as output:
        for command, stdout, message in (
            (limited, subprocess.PIPE, "cannot be used: File too large. Make room"),
            (report, output, "standard output or a file cannot be used: No space left on device"),
        ):
            pipes = {"stdout": stdout, "stderr": subprocess.PIPE, "text": True}
            done = subprocess.run(command, env=environment(cache), timeout=DEADLINE_S, **pipes)
            (line,) = done.stderr.splitlines()
            assert line.startswith("error: ") and message in line and "bug report" not in line
            assert done.returncode in (1, 2) and (tmp_path / "report.html").read_bytes() == page
