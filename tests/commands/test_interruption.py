# SPDX-License-Identifier: Apache-2.0
"""Signals become a flag; outputs that fail are dropped."""

import contextlib
import os
import signal
import subprocess
import sys

import pytest

from tba_jax.commands.interruption import Interruption


def test_a_signal_is_a_flag_and_a_second_one_has_its_usual_effect():
    with contextlib.closing(Interruption((signal.SIGUSR1,))) as usr1:
        assert not usr1()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert usr1() and usr1.signal_number == signal.SIGUSR1
        assert signal.getsignal(signal.SIGUSR1) == signal.SIG_DFL


PRINTING = """
import sys
from tba_jax.report.progress import ProgressDisplay
from tba_jax.commands.interruption import surviving_closed_outputs
with surviving_closed_outputs():
    display = ProgressDisplay(9)
    for i in range(3):
        display.note(f"line {i}")
        print("x" * 100_000, flush=True)
    print("errors too", file=sys.stderr)
"""


FULL = "the output cannot be written (No space left on device)"


@pytest.mark.parametrize(("outputs", "said"), [(">/dev/full", FULL), ("2>&1 | true", "")])
def test_what_is_printed_to_a_dead_output_is_dropped(outputs, said):
    script = f'set -o pipefail; "$@" {outputs}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-c", PRINTING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    if said:
        assert done.stderr.count("cannot be written") == 1 and "errors too" in done.stderr
