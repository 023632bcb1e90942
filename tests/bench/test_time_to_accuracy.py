# SPDX-License-Identifier: Apache-2.0
"""The time to an accuracy is that of the evaluation that reached it; our side only."""

import json
import sys

import numpy as np
import pytest

from tba_jax.bench import time_to_accuracy, trl_peer
from tba_jax.bench.time_to_accuracy import Reached

# Writes a log with pauses; the accuracies are its arguments.
SIDE = """
import json, pathlib, sys, time
log = pathlib.Path(sys.argv[1])
time.sleep(0.2)
with log.open("w") as out:
    for step, accuracy in enumerate([None, *map(float, sys.argv[2:])], start=1):
        key = {} if accuracy is None else {"accuracy": accuracy}
        text = json.dumps({"step": step, **key}) + "\\n"
        out.write(text[:5]); out.flush(); time.sleep(0.05); out.write(text[5:]); out.flush()
        time.sleep(0.3)
time.sleep(60 if len(sys.argv) > 3 else 0)
"""


def watch(tmp_path, *accuracies, stop_at, code=SIDE):
    (tmp_path / "side").mkdir()
    log = tmp_path / "side" / "log.jsonl"
    command = [sys.executable, "-c", code, str(log), *map(str, accuracies)]
    return time_to_accuracy.watch("side", command, {}, log, "accuracy", stop_at)


def test_a_process_is_ended_where_it_has_reached_the_accuracy(tmp_path):
    reached = watch(tmp_path, 0.5, 0.9, 1.0, stop_at=0.9)
    assert reached.step == 3
    assert [x[:2] for x in reached.accuracies] == [(2, 0.5), (3, 0.9)]
    times = [reached.first_step_s, *(x[2] for x in reached.accuracies)]
    # Its own pauses at least; a machine may be slow, never early.
    assert times[0] > 0.25 and times[1] > times[0] + 0.3 and times[2] > times[1] + 0.3
    assert reached.from_command_s == times[2]


def test_a_process_that_ends_below_it_has_no_time(tmp_path):
    reached = watch(tmp_path, 0.5, stop_at=0.9)
    assert np.isnan(reached.from_command_s) and reached.step is None
    assert [x[:2] for x in reached.accuracies] == [(2, 0.5)]


def test_a_process_that_fails_is_an_error_with_its_last_line(tmp_path, capsys):
    with pytest.raises(ValueError, match="side failed with exit code 1: ZeroDivisionError"):
        watch(tmp_path, stop_at=0.9, code="1/0")
    assert "Traceback" in capsys.readouterr().err


def test_figures_are_medians_and_ratios_are_within_a_seed():
    ours = [Reached(t, 1.0, 40, []) for t in (3.0, 5.0, 4.0)]
    theirs = [Reached(t, 2.0, 30, []) for t in (6.0, 20.0, 16.0)]
    figures = time_to_accuracy.figures_of("ours", ours, 0.95)
    names = ("from_command_s", "first_step_s", "after_first_step_s", "steps", "reached")
    assert [figures[name] for name in names] == [4.0, 1.0, 3.0, 40, "3 of 3"]
    # 1/2, 1/4, 1/4 from command; 2/4, 4/18, 3/14 after the first step.
    ratios = time_to_accuracy.ratios(ours, theirs)
    assert ratios == {"from_command": 0.25, "after_first_step": pytest.approx(4 / 18)}
    missed = [Reached(np.nan, 1.0, None, [(10, 0.5, 2.0)])]
    assert time_to_accuracy.figures_of("ours", [*ours, *missed], 0.95)["reached"] == "3 of 4"
    with pytest.raises(ValueError, match="trl never reached an accuracy of 0.95, 0.5 at most"):
        time_to_accuracy.figures_of("trl", missed, 0.95)


def test_the_peer_grades_as_the_task_does():
    from tba_jax.rewards.numeric import arithmetic_reward

    texts = [":12,9,17,11,13", "=13", "=-13", "13.", "", "no number", "=14", "13,1"]
    answer = ["13"] * len(texts)
    ours = arithmetic_reward([""] * len(texts), texts, answer)
    assert trl_peer.reward(completions=texts, answer=answer) == ours
    assert ours == [1, 1, 0, 1, 0, 0, 0, 0]


@pytest.mark.slow
def test_a_small_load(capsys):
    argv = ["--seeds=1", "--accuracy=0.2", "--num_steps=4", "--eval_period=2", "--json"]
    assert time_to_accuracy.main([*argv, "--num_held_out=16", "--num_prompts=4"]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out.splitlines()[-1])
    cold, warm = result["ours_cold"], result["ours_warm"]
    assert result["peers"] == {} and "over_trl" not in cold
    for side in (cold, warm):
        (only,) = side["runs"]
        assert side["from_command_s"] == pytest.approx(
            side["first_step_s"] + side["after_first_step_s"]
        )
        assert only["accuracies"][-1][1] >= 0.2
        assert side["from_command_s"] == only["accuracies"][-1][2]
    assert "ours_warm-0: " in err
