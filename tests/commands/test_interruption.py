# SPDX-License-Identifier: Apache-2.0
"""Outputs that fail are dropped. Signals: test_api.py and chaos/test_signals.py."""

import os
import subprocess
import sys

import pytest

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
