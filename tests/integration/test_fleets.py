# SPDX-License-Identifier: Apache-2.0
"""A wait of `Fleet` that fails says what it waited for, and shows the end of the output."""

import sys

import fleets
import pytest

PRINTING = "import time; [print('line', i, flush=True) for i in range(60)]; time.sleep({sleep})"


@pytest.mark.parametrize(
    ("sleep", "problem"),
    [
        (60, "the command runs for 2 s, without 'joined' in the output, 1 x; 0 steps logged."),
        (0, "the command ended with 0 before 'joined' in the output, 1 x; 0 steps logged."),
    ],
)
def test_a_wait_that_fails_says_for_what(sleep, problem, monkeypatch, tmp_path):
    argv = [sys.executable, "-c", PRINTING.format(sleep=sleep)]
    monkeypatch.setattr(fleets, "command", lambda workdir, **fields: argv)
    fleet = fleets.Fleet(tmp_path / "run", limit_s=2.0)
    with pytest.raises(AssertionError) as error:
        fleet.until_told("joined")
    fleet.process.wait(10)
    first, *shown = str(error.value).splitlines()
    assert first == f"{problem} Its last lines:"
    assert shown == [f"line {i}" for i in range(20, 60)]
