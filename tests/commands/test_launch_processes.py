# SPDX-License-Identifier: Apache-2.0
"""The local launcher: real processes, one of which fails, hangs or is interrupted."""

import os
import signal
import sys
import textwrap
import threading
import time

from tba_jax.commands.launch_processes import launch

CHILD = """
import os, signal, sys, time
who = int(sys.argv[-1].split("=")[1])
print("began", who, sys.argv[-2], flush=True)
{body}
"""


def run(body, capfd, **options):
    command = [sys.executable, "-c", CHILD.format(body=textwrap.dedent(body))]
    return launch(2, ["--mine=1"], command=command, **options), *capfd.readouterr()


def test_output_carries_the_process_and_success_is_0(capfd):
    code, out, err = run("sys.stdout.write('no newline')", capfd)
    assert (code, err) == (0, "")
    wanted = [[f"[{i}] began {i} --num_processes=2", f"[{i}] no newline"] for i in (0, 1)]
    assert sorted(out.splitlines()) == sum(wanted, [])


def test_the_first_failure_is_named_and_the_others_do_not_outlive_it(capfd):
    body = "if who == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    got, _, err = run(body, capfd, grace_s=0.5)
    assert got == 137 and "process 1 was killed by SIGKILL, the first of 2 to fail" in err
    assert "Run the same command again" in err
    assert "process 0 did not end by itself: killed" in err


def test_an_interruption_reaches_every_process(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("READY", str(tmp_path))
    body = """
    def stop(*_):
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGINT, stop)
    open(os.path.join(os.environ["READY"], str(who)), "w").close()
    time.sleep(60)
    """

    def interrupt():
        while len(os.listdir(tmp_path)) < 2:  # earlier, a process has no handler yet
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    code, out, _ = run(body, capfd)
    assert code == 0 and "[0] saved" in out and "[1] saved" in out
