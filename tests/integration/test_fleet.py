# SPDX-License-Identifier: Apache-2.0
"""A fleet on a Ray cluster of this machine, whose processes are killed while it runs."""

import collections
import json
import os
import random
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

pytest.importorskip("ray", reason="a fleet needs the extra `fleet`")
pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[2]
LIMIT_S = 1500.0


class Fleet:
    """The command in a process of its own, and the processes below it."""

    def __init__(self, workdir, **fields):
        fields = {
            "placement": "fleet",
            "sync.transport": "checkpoint",
            "search.ownership": "any",
            "num_cpu_devices": 1,
            "fleet.max_searchers": 2,
            "num_steps": 12,
            "batch.num_prompts": 4,
            "search.prompts_per_round": 4,
            "search.initial_fill": 0,
            "checkpoint.period": 2,
            "eval.period": 0,
            "task.num_eval_prompts": 16,
            **fields,
        }
        self.workdir, self.lines = workdir, []
        options = [f"--config.{name}={value}" for name, value in fields.items()]
        self.process = subprocess.Popen(
            [sys.executable, "-m", "tba_jax.main", "--config=math", *options,
             f"--workdir={workdir}"],
            cwd=ROOT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.deadline = time.monotonic() + LIMIT_S

    def until(self, words):
        """Read lines until one has these words, or the end."""
        for line in self.process.stdout:
            self.lines.append(line)
            if words and words in line:
                return line
            assert time.monotonic() < self.deadline, "".join(self.lines)
        if words:
            raise AssertionError(f"no {words!r} in:\n{''.join(self.lines)}")
        return ""

    def until_step(self, step):
        """Wait until the run has made so many steps."""
        while time.monotonic() < self.deadline:
            path = self.workdir / "metrics.jsonl"
            if (
                path.exists()
                and sum('"train/loss"' in x for x in path.read_text().split("\n")) >= step
            ):
                return
            assert self.process.poll() is None, self.told()
            time.sleep(0.2)
        raise AssertionError(f"step {step} was not reached")

    def told(self):
        """Everything that it printed, up to its end."""
        self.until("")
        return "".join(self.lines)

    def kill(self, name, which=0):
        """End the process of an actor without a word; whether there was one."""
        found = [pid for pid, words in below(self.process.pid) if words.startswith(f"ray::{name}")]
        if not found:
            return False
        os.kill(found[which % len(found)], signal.SIGKILL)
        return True

    def end(self):
        """Its exit code."""
        self.until("")
        self.process.stdout.close()
        return self.process.wait(60)


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
            found.append((child, words[child]))
            left.append(child)
    return found


def check(workdir, num_steps):
    """Every response under one heading, every ticket once, every step once."""
    report = json.loads((workdir / "report.json").read_text())
    ledger = report["ledger"]
    gone = sum(count for name, count in ledger.items() if name.startswith("evicted_"))
    gone += ledger["duplicate"] + ledger["lost"] + sum(ledger["rejected"].values())
    assert ledger["generated"] == ledger["outbox"] + ledger["stored"] + gone
    assert report["steps"] == num_steps and report["eval"]["after"]["step"] == num_steps
    events = [json.loads(line) for line in (workdir / "schedule.jsonl").read_text().splitlines()]
    rounds = [(e["searcher"], e["round"]) for e in events if e["event"] == "round"]
    assert len(set(rounds)) == len(rounds)
    steps = [e["step"] for e in events if e["event"] == "step"]
    assert steps == list(range(num_steps))
    return report


def test_a_fleet_loses_a_searcher_and_its_trainer_and_goes_on(tmp_path):
    fleet = Fleet(tmp_path)
    fleet.until_step(3)
    assert fleet.kill("SearcherProcess")
    fleet.until_step(6)
    assert fleet.kill("TrainerProcess")
    assert fleet.end() == 0, "".join(fleet.lines)
    text = "".join(fleet.lines)
    assert "it starts again where there is room" in text
    assert "it is made again and goes on from the newest checkpoint (step " in text
    report = check(tmp_path, 12)
    assert {slot["state"] for slot in report["fleet"]["by_searcher"]} == {"there"}
    assert not [words for _, words in below(os.getpid()) if "ray" in words]


def test_an_interrupted_fleet_is_resumed_by_the_same_command(tmp_path):
    fleet = Fleet(tmp_path, num_steps=8)
    fleet.until_step(2)
    fleet.process.send_signal(signal.SIGTERM)
    assert fleet.end() == 128 + signal.SIGTERM
    assert "Run the same command again to continue" in "".join(fleet.lines)
    again = Fleet(tmp_path, num_steps=8)
    assert again.end() == 0, "".join(again.lines)
    assert "resumed" in "".join(again.lines)
    check(tmp_path, 8)


def test_random_kills_leave_every_response_under_one_heading(tmp_path):
    """Five kills of random processes; `FLEET_SEED` repeats a run, `FLEET_KILLS` has more."""
    seed = int(os.environ.get("FLEET_SEED", random.randrange(10**6)))
    print(f"FLEET_SEED={seed}")
    draws = random.Random(seed)
    fleet = Fleet(tmp_path, num_steps=16, **{"fleet.max_searchers": 3})
    kills = int(os.environ.get("FLEET_KILLS", 5))
    for number in range(kills):
        fleet.until_step(1 + number * 12 // kills)
        time.sleep(draws.uniform(0.0, 5.0))
        name = draws.choice(["SearcherProcess", "SearcherProcess", "TrainerProcess"])
        fleet.kill(name, draws.randrange(3))
    assert fleet.end() == 0, "".join(fleet.lines)
    check(tmp_path, 16)
