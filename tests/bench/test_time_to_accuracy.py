# SPDX-License-Identifier: Apache-2.0
"""The time to an accuracy is that of the evaluation that reached it; our side only."""

import json
import math
import sys

import pytest

from tba_jax.bench import time_to_accuracy, trl_peer

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
    assert reached["steps"] == 3
    assert [x[:2] for x in reached["accuracies"]] == [(2, 0.5), (3, 0.9)]
    times = [reached["first_step_s"], *(x[2] for x in reached["accuracies"])]
    # Its own pauses at least; a machine may be slow, never early.
    assert times[0] > 0.25 and times[1] > times[0] + 0.3 and times[2] > times[1] + 0.3
    assert reached["from_command_s"] == times[2]
    assert reached["after_first_step_s"] == times[2] - times[0]


def test_a_process_that_ends_below_it_has_no_time(tmp_path):
    reached = watch(tmp_path, 0.5, stop_at=0.9)
    assert math.isinf(reached["from_command_s"]) and math.isinf(reached["steps"])
    assert [x[:2] for x in reached["accuracies"]] == [(2, 0.5)]


def test_a_process_that_fails_is_an_error_with_its_last_line(tmp_path, capsys):
    with pytest.raises(ValueError, match="side failed with exit code 1: ZeroDivisionError"):
        watch(tmp_path, stop_at=0.9, code="1/0")
    assert "Traceback" in capsys.readouterr().err


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
        assert side["from_command_s"] == pytest.approx(
            side["first_step_s"] + side["after_first_step_s"]
        )
        assert side["accuracies"][-1][1] >= 0.2
        assert side["from_command_s"] == side["accuracies"][-1][2]
    assert "ours_warm: " in err
