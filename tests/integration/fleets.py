# SPDX-License-Identifier: Apache-2.0
"""The main command with a fleet, in a process of its own, whose processes can be killed."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time

import psutil

from tests.integration.commands import ROOT, assert_every_ticket_once, is_balanced, losses, report

LIMIT_S = 1500.0
SMALL = {
    "placement": "fleet",
    "fleet.max_searchers": 2,
    "num_steps": 12,
    "batch.num_prompts": 4,
    "search.initial_fill": 0,
    "checkpoint.period": 2,
    "eval.period": 0,
    "task.num_eval_prompts": 16,
}


class Fleet:
    """The command, and the processes below it; it is killed after LIMIT_S.

    Args:
        workdir: of the run; its output lies beside it.
        fields: over those of `SMALL`.
    """

    def __init__(self, workdir, **fields):
        self.workdir = workdir
        self._output = workdir.with_name(f"{workdir.name}-{time.monotonic_ns()}.txt")
        options = [f"--config.{name}={value}" for name, value in {**SMALL, **fields}.items()]
        main = [sys.executable, "-m", "tba_jax.main", "--config=math", f"--workdir={workdir}"]
        with self._output.open("w") as out:
            self.process = subprocess.Popen(
                [*main, *options], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self._deadline = time.monotonic() + LIMIT_S

    def told(self):
        """What it has printed."""
        return self._output.read_text()

    def until_step(self, step):
        """Wait until the run has made so many steps; a resumed one counts on."""
        while len(losses(self.workdir)) < step:
            assert self.process.poll() is None, self.told()
            self._wait()

    def end(self):
        """Wait for the end of the command; return its exit code."""
        while self.process.poll() is None:
            self._wait()
        return self.process.returncode

    def _wait(self):
        if time.monotonic() > self._deadline:
            self.process.kill()
            raise AssertionError(f"the command runs for {LIMIT_S:.0f} s:\n{self.told()}")
        time.sleep(0.1)

    def kill(self, name, which=0):
        """Kill the process of an actor; return whether there was one."""
        found = [pid for pid, words in below(self.process.pid) if words.startswith(f"ray::{name}")]
        if found:
            os.kill(found[which % len(found)], signal.SIGKILL)
        return bool(found)


def below(pid):
    """(process, command line) of all descendants."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            found.append((process.pid, " ".join(process.cmdline())))
    return found


def check(workdir, num_steps):
    """Every response under one heading, every ticket once, every step once; the report."""
    made = report(workdir)
    assert is_balanced(made["ledger"]), made["ledger"]
    assert made["steps"] == num_steps and made["eval"]["after"]["step"] == num_steps, made
    assert_every_ticket_once(workdir)
    log = (workdir / "metrics.jsonl").read_text().splitlines()
    steps = [x["step"] for x in map(json.loads, log) if "train/loss" in x]
    assert steps == list(range(1, num_steps + 1)), steps
    return made
