# SPDX-License-Identifier: Apache-2.0
"""What more searchers are worth, on a machine that is too small for them."""

import argparse
import json

import pytest

from tba_jax.bench import searchers, slow_searchers
from tba_jax.bench.time_to_accuracy import Reached

ARGS = {"searchers": "1,4", "chunk_ms": 10.0, "seeds": 2, "accuracy": 0.9, "num_steps": 50}


def test_a_chunk_takes_its_time_and_doing_nothing_takes_none(monkeypatch):
    slept = []
    monkeypatch.setattr(slow_searchers.time, "sleep", slept.append)
    step = slow_searchers.slowed(lambda word: word == "work", 1000.0)
    assert step("work") and not step("nothing")
    assert len(slept) == 1 and 900.0 < slept[0] < 1000.0


def test_runs_that_reach_the_accuracy_count(tmp_path, monkeypatch):
    made = []

    def watch(side, command, env, log, told, stop_at):
        made.append((side, [x for x in command if "num_searchers" in x or "seed" in x]))
        assert told({"eval/pass_at_1": 0.5}) == 0.5 and stop_at == 0.9
        log.parent.mkdir()
        lines = [
            {"step": i, "train/loss": 1.0, "train/step_s": 0.5, "train/wait_batch_s": 0.25,
             "buffer/staleness_mean": 2.0}
            for i in range(1, 6)
        ]  # fmt: skip
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        if side == "1 searchers" and len(made) == 3:
            return Reached(None, 2.0, None, [])
        return Reached(12.0 if side == "1 searchers" else 5.0, 2.0, 25, [])

    monkeypatch.setattr(searchers, "watch", watch)
    result = searchers.measure(argparse.Namespace(**ARGS, eval_period=5), tmp_path)
    assert [row["after_first_step_s"] for row in result["rows"]] == [10.0, 3.0]
    assert [row["reached"] for row in result["rows"]] == [1, 2] and len(made) == 6
    assert made[1] == ("1 searchers", ["--config.num_searchers=1", "--config.seed=0"])
    assert result["rows"][1]["wait_s"] == 0.25
    assert list(searchers.table(result))[-1].split()[:2] == ["4", "3.0"]
    bad = argparse.Namespace(**{**ARGS, "searchers": "0"}, eval_period=5)
    with pytest.raises(ValueError, match="--searchers=0 .* wanted at least one"):
        searchers.measure(bad, tmp_path)
