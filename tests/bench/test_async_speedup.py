# SPDX-License-Identifier: Apache-2.0
"""What the speedup of the asynchronous job is read from."""

import argparse
import json

import pytest

from tba_jax.bench import async_speedup
from tba_jax.bench.async_speedup import Figures, read, table
from tba_jax.models.model import describe
from tba_jax.models.transformer import num_params
from tba_jax.run.model_parts import START_MODEL


def write(folder, rounds, steps):
    """Logs of a run: (start, end, generated) of tickets; (start, end) of steps."""
    folder.mkdir()
    events = [
        {"event": "round", "start_s": a, "end_s": b, "generated": n} for a, b, n in rounds
    ] + [{"event": "step", "step": i, "start_s": a, "end_s": b} for i, (a, b) in enumerate(steps)]
    (folder / "schedule.jsonl").write_text("".join(json.dumps(e) + "\n" for e in events))
    lines = [
        {
            "step": i,
            "train/loss": 1.0,
            "buffer/staleness_mean": float(i),
            "buffer/staleness_histogram": [[0, 6], [2, 2]],
        }
        for i in range(1, len(steps) + 1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def test_a_step_is_timed_from_end_to_end_and_tickets_that_overlap_count_once(tmp_path):
    steps = [(0.0, 9.0), (12.0, 14.0), (16.0, 18.0), (20.0, 22.0)]
    rounds = [(0.0, 8.0, 8), (14.0, 15.0, 4), (14.5, 16.0, 4), (18.0, 21.0, 8), (21.5, 23.0, 8)]
    write(tmp_path / "run", rounds, steps)
    found = read(tmp_path / "run", skip=2)
    # Steps 3 and 4, from 14 s to 22 s; the last ticket ends after them.
    assert found == Figures(step_s=4.0, search_s=2.5, train_s=2.0, generated=1.0, staleness=3.5)
    with pytest.raises(ValueError, match="has 1 steps after --skip=4; wanted two"):
        read(tmp_path / "run", skip=4)


def test_the_ratio_is_of_neighbours_and_the_limit_of_the_longer_half(tmp_path, monkeypatch):
    made = iter([Figures(3.0, 1.0, 1.9, 1.0, 0.0), Figures(2.0, 1.0, 1.9, 1.0, 1.0)] * 2)
    ran = []

    def run(side, args, fields, workdir, cores, num_steps):
        assert fields["model.path"] == str(tmp_path / "model") and fields["eval.period"] == 0
        ran.append((side, num_steps))

    monkeypatch.setattr(async_speedup, "_run", run)
    monkeypatch.setattr(async_speedup, "read", lambda workdir, skip: next(made))
    monkeypatch.setattr(async_speedup.os, "sched_getaffinity", lambda pid: {0, 1})
    args = argparse.Namespace(repeats=2, num_steps=9, skip=3, model="random", overrides=[])
    result = async_speedup.measure(args, tmp_path)
    assert ran == [("sync", 3), ("async", 3), *[("sync", 9), ("async", 9)] * 2]
    model = tmp_path / "model"
    assert 4e6 < num_params(describe(str(model)).config) < 6e6
    tokens = "tokenizer.json"
    assert (model / tokens).read_bytes() == (START_MODEL / tokens).read_bytes()
    assert result["speedups"] == [1.5, 1.5] and result["limit"] == 1.5 and result["steps"] == 6
    assert list(table(result))[-1].startswith("speedup 1.50 (1.50 to 1.50)")
    args.skip = 9
    with pytest.raises(ValueError, match="--skip=9 --num_steps=9; wanted"):
        async_speedup.measure(args, tmp_path)
