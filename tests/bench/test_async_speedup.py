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


def write(folder, times, **figures):
    """Metrics of a run whose steps end at these times."""
    folder.mkdir()
    lines = [
        {
            "step": i,
            "time_s": time_s,
            "train/loss": 1.0,
            "train/step_s": 2.0,
            "buffer/staleness_mean": float(i),
            "buffer/replay_ratio": 0.5 * i,
            **{f"search/{name}": values[i - 1] for name, values in figures.items()},
        }
        for i, time_s in enumerate(times, start=1)
    ]
    (folder / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))


def test_a_step_is_timed_from_end_to_end(tmp_path):
    times = [9.0, 14.0, 18.0, 22.0]
    write(tmp_path / "run", times, ticket_s=[8.0, 1.0, 2.0, 3.0])
    found = read(tmp_path / "run", skip=2)
    # Steps 3 and 4, from 14 s to 22 s.
    assert found == Figures(step_s=4.0, search_s=2.5, train_s=2.0, replay_ratio=2.0, staleness=3.5)
    write(tmp_path / "async", times, idle_s=[5.0, 6.0, 7.0, 9.0])
    assert read(tmp_path / "async", skip=2).search_s == 2.5
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
