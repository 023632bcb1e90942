# SPDX-License-Identifier: Apache-2.0
"""What the speedup of the asynchronous job is read from."""

import argparse
import json

import pytest

from tba_jax.bench import async_speedup
from tba_jax.bench.async_speedup import read
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
    write(tmp_path / "run", times)
    # Steps 3 and 4, from 14 s to 22 s; a synchronous run searches while it does not train.
    found = read(tmp_path / "run", skip=2)
    assert [found[x] for x in ("step_s", "search_s", "train_s")] == [4.0, 2.0, 2.0]
    assert (found["replay_ratio"], found["staleness"], found["over_longer_half"]) == (2, 3.5, 2)
    write(tmp_path / "async", times, idle_s=[5.0, 6.0, 7.0, 9.0])
    assert read(tmp_path / "async", skip=2)["search_s"] == 2.5
    with pytest.raises(ValueError, match="has no step after step 4"):
        read(tmp_path / "run", skip=4)


def test_the_ratio_is_of_neighbours(tmp_path, monkeypatch):
    other = {"search_s": 1.0, "train_s": 1.9, "over_longer_half": 1.5}
    made = iter([{"step_s": x, **other} for x in (3.0, 2.0, 3.0, 2.0)])
    ran = []

    def run(side, command, workdir, cores):
        assert f"--config.model.path={tmp_path / 'model'}" in command
        assert "--config.eval.period=0" in command and command[-1] == "--config.seed=1"
        ran.append((side, next(x for x in command if "num_steps" in x).partition("=")[2]))

    monkeypatch.setattr(async_speedup, "_run", run)
    monkeypatch.setattr(async_speedup, "read", lambda workdir, skip: next(made))
    monkeypatch.setattr(async_speedup.os, "sched_getaffinity", lambda pid: {0, 1})
    own = ["--config.seed=1"]
    args = argparse.Namespace(repeats=2, num_steps=9, skip=3, model="random", overrides=own)
    result = async_speedup.measure(args, tmp_path)
    assert ran == [("sync", "3"), ("async", "3"), *[("sync", "9"), ("async", "9")] * 2]
    model = tmp_path / "model"
    assert 4e6 < num_params(describe(str(model)).config) < 6e6
    tokens = "tokenizer.json"
    assert (model / tokens).read_bytes() == (START_MODEL / tokens).read_bytes()
    assert result["speedups"] == [1.5, 1.5] and result["limit"] == 1.5 and result["steps"] == 6
    args.skip = 9
    with pytest.raises(ValueError, match="--skip=9 --num_steps=9; wanted"):
        async_speedup.measure(args, tmp_path)
