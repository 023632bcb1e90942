# SPDX-License-Identifier: Apache-2.0
"""Signals and closed outputs: a run saves before it ends, and does not end for want of a reader."""

import contextlib
import json
import os
import pty
import signal
import subprocess
import time

import pytest
from commands import ROOT, SYNC, command, environment, losses, start, wait_for

from tba_jax.run.checkpoint import load_host_state

# commands/test_interruption.py has the parts; test_api.py interrupts a run by SIGINT.
pytestmark = pytest.mark.slow
LONG = (*SYNC, "num_steps=500", "eval.period=0", "checkpoint.period=0")
SHORT = (*SYNC, "num_steps=4", "eval.period=0", "checkpoint.period=0")
DEADLINE_S = 600


def assert_saved(workdir):
    """The newest checkpoint has every step that was logged."""
    step, _ = load_host_state(str(workdir))
    assert step >= max(losses(workdir))
    assert json.loads((workdir / "report.json").read_text())["steps"] == step


@pytest.mark.parametrize("number", [signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_that_would_end_the_process_saves_first(cache, tmp_path, number):
    workdir = tmp_path / "run"
    process = start(workdir, *LONG, cache=cache)
    wait_for(lambda: len(losses(workdir)) >= 2, process=process, timeout=DEADLINE_S)
    process.send_signal(number)
    if number == signal.SIGHUP:
        process.send_signal(number)  # a terminal that closes sends one, and its shell another
    out, err = process.communicate(timeout=DEADLINE_S)
    assert process.returncode == 128 + number and "error" not in err, err
    assert f"Stopped by {number.name} at step " in " ".join(out.split())
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
