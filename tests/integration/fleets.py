# SPDX-License-Identifier: Apache-2.0
"""The main command with a fleet, in a process of its own, whose processes can be killed."""

import collections
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.integration.commands import assert_every_ticket_once, is_balanced

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500.0
NUM_LINES = 40
"""Lines of the command's output that a failed wait shows."""
_POLL_S = 0.1
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
    """The command, and the processes below it.

    Args:
        workdir: of the run; beside it lies what the command says.
        root: process below which all actors are; None: the command, with a cluster of its own.
        limit_s: it is killed when it takes longer.
        fields: over those of `SMALL`.
    """

    def __init__(self, workdir, root=None, limit_s=LIMIT_S, **fields):
        self.workdir = Path(workdir)
        self._said = self.workdir.with_name(f"{self.workdir.name}.txt")
        with self._said.open("a") as out:
            self._before = out.tell()
            self.process = subprocess.Popen(
                command(workdir, **fields),
                cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self._root = self.process.pid if root is None else root
        self._limit_s = limit_s
        self._deadline = time.monotonic() + limit_s

    def told(self):
        """What it has printed."""
        with self._said.open() as file:
            file.seek(self._before)
            return file.read()

    def until(self, condition, what):
        """Wait until `condition()`; the command must not end before.

        Args:
            what: the condition in words, for the message of a wait that fails.
        """
        while not condition():
            if self.process.poll() is not None:
                raise AssertionError(
                    self._failure(f"the command ended with {self.process.returncode} before {what}")
                )
            self._wait(what)

    def until_told(self, words, times=1):
        """Wait until the command has printed the words that often."""
        self.until(lambda: self.told().count(words) >= times, f"{words!r} in the output, {times} x")

    def until_step(self, step):
        """Wait until the run has made so many steps; a resumed one counts on."""
        self.until(lambda: self.num_steps() >= step, f"step {step}")

    def until_metric(self, name, value):
        """Wait until a metric has the value in the newest step."""
        self.until(lambda: self.metrics(name)[-1] == value, f"{name} = {value}")

    def num_steps(self):
        """Steps that are logged."""
        path = self.workdir / "metrics.jsonl"
        return path.read_text().count('"train/loss"') if path.exists() else 0

    def kill(self, name, which=0, number=signal.SIGKILL):
        """Send a signal to the process of an actor; whether there was one."""
        found = self.pids(f"ray::{name}")
        if not found:
            return False
        os.kill(found[which % len(found)], number)
        return True

    def pids(self, beginning=""):
        """Processes of the run whose command line begins so; without one, all below the command."""
        return [pid for pid, words in below(self._root) if words.startswith(beginning)]

    def metrics(self, name):
        """Values of a metric at each step that is logged."""
        lines = (self.workdir / "metrics.jsonl").read_text().splitlines(keepends=True)
        records = [json.loads(line) for line in lines if line.endswith("\n")]
        return [record[name] for record in records if "train/loss" in record]

    def end(self):
        """Its exit code."""
        while self.process.poll() is None:
            self._wait("the end of the command")
        return self.process.returncode

    def _wait(self, what):
        if time.monotonic() > self._deadline:
            self.process.kill()
            raise AssertionError(
                self._failure(f"the command runs for {self._limit_s:.0f} s, without {what}")
            )
        time.sleep(_POLL_S)

    def _failure(self, problem):
        newest = self.told().splitlines()[-NUM_LINES:]
        steps = f"{self.num_steps()} steps logged"
        return "\n".join([f"{problem}; {steps}. Its last lines:", *newest])


def command(workdir, *flags, **fields):
    """argv of the main command with the fields over those of `SMALL`."""
    options = [f"--config.{name}={value}" for name, value in {**SMALL, **fields}.items()]
    main = [sys.executable, "-m", "tba_jax.main", "--config=math"]
    return [*main, *options, f"--workdir={workdir}", *flags]


def below(pid):
    """(process, command line) of all descendants."""
    parents, words = collections.defaultdict(list), {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            stat = (folder / "stat").read_text().rsplit(")", 1)[1].split()
            words[int(folder.name)] = (folder / "cmdline").read_text().replace("\0", " ")
        except OSError:
            continue
        parents[int(stat[1])].append(int(folder.name))
    found, left = [], [pid]
    while left:
        for child in parents[left.pop()]:
            found.append((child, words.get(child, "")))
            left.append(child)
    return found


def check(workdir, num_steps):
    """Every response under one heading, every ticket once, every step once; the report."""
    report = json.loads((workdir / "report.json").read_text())
    assert is_balanced(report["ledger"]), report["ledger"]
    assert report["steps"] == num_steps and report["eval"]["after"]["step"] == num_steps, report
    assert_every_ticket_once(workdir)
    metrics = [json.loads(line) for line in (workdir / "metrics.jsonl").read_text().splitlines()]
    steps = [x["step"] for x in metrics if "train/loss" in x]
    assert steps == list(range(1, num_steps + 1)), steps
    return report
