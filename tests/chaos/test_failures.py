# SPDX-License-Identifier: Apache-2.0
"""Real faults, signals and full disks: what the user reads, the exit code, and what was saved."""

import contextlib
import json
import os
import pty
import resource
import shutil
import signal
import subprocess
import sys
import time

import pytest
from commands import ROOT, SYNC, arguments, command, environment, losses, run, start, wait_for

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


def test_a_buffer_that_holds_no_batch_ends_the_run_that_would_search_for_ever(cache, tmp_path):
    """One response of each prompt would fit by its bookkeeping, and does not with its tokens."""
    done = run(tmp_path / "run", "eval.period=0", "replay.max_bytes=900", cache=cache, code=1)
    (line,) = done.stderr.strip().splitlines()
    assert line.startswith("error: no batch of 4 prompts can be drawn")
    assert "of 900 bytes); responses so far: {'generated': " in line


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


def test_a_signal_that_would_end_the_process_saves_first(cache, tmp_path):
    workdir = tmp_path / "run"
    process = start(workdir, *LONG, cache=cache)
    wait_for(lambda: len(losses(workdir)) >= 2, process=process, timeout=DEADLINE_S)
    process.send_signal(signal.SIGHUP)
    process.send_signal(signal.SIGHUP)  # a terminal that closes sends one, and its shell another
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + signal.SIGHUP and "error" not in err, err
    assert "Stopped by SIGHUP at step " in " ".join(out.split())
    assert_saved(workdir)


@pytest.mark.parametrize("is_ignored", [False, True])
def test_a_terminal_that_is_closed(cache, tmp_path, is_ignored):
    """The run saves and ends, or goes on without a terminal where it was told to ignore that."""
    workdir = tmp_path / "run"
    end, terminal = pty.openpty()
    in_shell = ["sh", "-c", ("trap '' HUP; " if is_ignored else "") + 'exec "$@"', "sh"]
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


def run_module(module, *arguments, folder, cache, before=(), **options):
    options = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, **options}
    return subprocess.run(
        [*before, sys.executable, "-m", f"tba_jax.{module}", *arguments],
        text=True, timeout=DEADLINE_S, env=environment(cache), cwd=folder, **options,
    )  # fmt: skip


def check_one_line(done, text):
    """Check that a command failed with one line, which has this text and wants no bug report."""
    assert done.returncode in (1, 2), (done.returncode, done.stdout, done.stderr)
    (line,) = done.stderr.splitlines()
    assert line.startswith("error: ") and text in line, line
    assert "bug report" not in line and len(line) < 2000, line


@pytest.fixture(scope="module")
def finished(tmp_path_factory, cache):
    """The work directory of a run that ended."""
    workdir = tmp_path_factory.mktemp("finished") / "run"
    run(workdir, "driver=sync", cache=cache)
    return workdir


def test_a_report_on_a_disk_that_is_full_is_one_line(finished, cache):
    page = (finished / "report.html").read_bytes()
    limited = ["prlimit", "--fsize=10000"]
    done = run_module("report", ".", folder=finished, cache=cache, before=limited)
    check_one_line(done, "cannot be used: File too large. Make room")
    assert (finished / "report.html").read_bytes() == page
    with open("/dev/full", "w") as output:
        done = run_module("report", ".", folder=finished, cache=cache, stdout=output)
    check_one_line(done, "standard output or a file cannot be used: No space left on device")


@pytest.mark.skipif(os.geteuid() != 0, reason="needs the right to mount")
@pytest.mark.parametrize("module", ["report", "main"])
def test_a_read_only_run_is_one_line(module, finished, cache):
    unfinished = finished.with_name(f"unfinished-{module}")
    shutil.copytree(finished, unfinished)
    shutil.rmtree(unfinished / "checkpoints" / "8")
    (unfinished / "report.json").unlink()
    mount = f"mount --bind {unfinished} {unfinished} && "
    mount += f"mount -o remount,bind,ro {unfinished} && exec "
    before = ["unshare", "-m", "sh", "-c", mount + '"$@"', "sh"]
    flags = arguments(unfinished, "driver=sync") if module == "main" else [str(unfinished)]
    done = run_module(module, *flags, folder=finished, cache=cache, before=before)
    check_one_line(done, "Read-only file system")
