# SPDX-License-Identifier: Apache-2.0
"""The main command with a fleet, in a process of its own, whose processes can be killed."""

import contextlib
import ipaddress
import os
import subprocess
import sys
import time

import psutil

from tba_jax.run.fleet import OWNER
from tba_jax.storage.whole_files import read_json
from tests.integration.commands import ROOT, assert_trained, losses, report

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
    """The command, and the processes below it; it is killed after `limit_s` seconds.

    Args:
        workdir: of the run; its output lies beside it.
        fields: over those of `SMALL`.
    """

    def __init__(self, workdir, limit_s=LIMIT_S, **fields):
        self.workdir = workdir
        self._output = workdir.with_name(f"{workdir.name}-{time.monotonic_ns()}.txt")
        options = [f"--config.{name}={value}" for name, value in {**SMALL, **fields}.items()]
        main = [sys.executable, "-m", "tba_jax.main", "--config=math", f"--workdir={workdir}"]
        with self._output.open("w") as out:
            self.process = subprocess.Popen(
                [*main, *options], cwd=ROOT, stdout=out, stderr=subprocess.STDOUT,
                env={**os.environ, "PYTHONUNBUFFERED": "1"},
            )  # fmt: skip
        self._limit_s, self._deadline = limit_s, time.monotonic() + limit_s

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
            raise AssertionError(f"the command runs for {self._limit_s:.0f} s:\n{self.told()}")
        time.sleep(0.1)

    def processes(self, role):
        """The processes of a role: searcher, owner (it listens where `OWNER` says), trainer."""
        kind = "ray::SearcherProcess" if role == "searcher" else "ray::TrainerProcess"
        named = [pid for pid, words in below(os.getpid()) if words.startswith(kind)]
        port = read_json(self.workdir / OWNER)["address"].rpartition(":")[2]
        own = [pid for pid in named if any(x.endswith(f":{port}") for x in listening([pid]))]
        return [psutil.Process(pid) for pid in named if (pid in own) == (role == "owner")]


def below(pid):
    """(process, command line) of all descendants."""
    found = []
    for process in psutil.Process(pid).children(recursive=True):
        with contextlib.suppress(psutil.Error):  # it has ended
            found.append((process.pid, " ".join(process.cmdline())))
    return found


def listening(pids):
    """HOST:PORT of every listening socket of these processes, and the owner's command line."""
    found = {}
    for pid in pids:
        with contextlib.suppress(psutil.Error):  # the process has ended
            process = psutil.Process(pid)
            for socket in process.net_connections("tcp"):
                if socket.status == psutil.CONN_LISTEN:
                    address = f"{socket.laddr.ip}:{socket.laddr.port}"
                    found[address] = " ".join(process.cmdline())
    return found


def beyond_loopback(pids):
    """`listening`, less the sockets that only this machine can reach."""
    found = {}
    for address, name in listening(pids).items():
        host = ipaddress.ip_address(address.rpartition(":")[0])
        if not (getattr(host, "ipv4_mapped", None) or host).is_loopback:
            found[address] = name
    return found


def check(workdir, num_steps):
    """As `assert_trained`, with an evaluation of the last step; return the report."""
    assert_trained(workdir, num_steps)
    made = report(workdir)
    assert made["steps"] == num_steps and made["eval"]["after"]["step"] == num_steps, made
    return made
