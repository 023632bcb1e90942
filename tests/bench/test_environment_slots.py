# SPDX-License-Identifier: Apache-2.0
"""Slots stay in use while environments respond in 0.1 to 10 seconds of simulated time."""

import json

from tba_jax.bench.environment_slots import main, simulate


def test_two_episodes_a_slot_keep_slots_in_use_and_one_does_not():
    slow, instant = simulate(300, 128), simulate(300, 64, is_instant=True)
    # The last episodes of so few leave slots empty for longer than in a run.
    assert slow["slot_use"] >= 0.85
    assert simulate(300, 64)["slot_use"] < 0.65
    assert slow["per_minute"] > 0.85 * instant["per_minute"]
    assert slow["mean_age_s"] < 2.5 * instant["mean_age_s"]


def test_the_command_prints_one_line_a_case(capsys):
    assert main(["--episodes=20", "--json"]) == 0
    *lines, last = capsys.readouterr().out.splitlines()
    assert len(json.loads(last)["rows"]) == 5 and any("instant" in line for line in lines)
    assert main(["--episodes=0"]) == 1
    assert "wanted at least 1" in capsys.readouterr().err
