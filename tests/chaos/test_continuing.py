# SPDX-License-Identifier: Apache-2.0
"""What a run may be continued from: real commands on directories that something happened to."""

import json
import shutil

import numpy as np
import pytest
import safetensors.numpy
from commands import ROOT, SYNC, lines, losses, run, start, wait_for

from tba_jax.run.checkpoint import load_host_state

QUICK = (*SYNC, "eval.period=0")


def unfinish(workdir):
    """As if it was killed before it wrote its report."""
    (workdir / "report.json").unlink()


# run/test_checkpoint.py has the parts.
@pytest.mark.slow
def test_a_flipped_bit_costs_a_checkpoint_and_not_the_run(cache, tmp_path):
    workdir = tmp_path / "run"
    assert run(workdir, *QUICK, cache=cache).returncode == 0
    before = losses(workdir)
    unfinish(workdir)
    files = (workdir / "checkpoints" / "8" / "train_state").rglob("d/*")
    weights = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 16
    weights.write_bytes(data)
    done = run(workdir, *QUICK, cache=cache)
    assert done.returncode == 0, done.stderr
    # The display breaks lines where the terminal ends.
    said = " ".join(done.stdout.split())
    assert "checkpoint 8 is damaged (train_state/" in said and "resumed" in said, done.stdout
    assert (workdir / "damaged_checkpoints" / "8" / "train_state").is_dir()
    # The steps after 4 were made again, the same bits.
    assert losses(workdir) == before and load_host_state(str(workdir))[0] == 8


@pytest.mark.slow
def test_another_runs_checkpoint_that_was_copied_in_is_refused(cache, tmp_path):
    overrides = (*QUICK, "num_steps=2", "checkpoint.period=1")
    workdir, other = tmp_path / "run", tmp_path / "other"
    for each in (workdir, other):
        assert run(each, *overrides, cache=cache).returncode == 0
    unfinish(other)
    shutil.rmtree(other / "checkpoints" / "2")
    shutil.copytree(workdir / "checkpoints" / "2", other / "checkpoints" / "2")
    done = run(other, *overrides, cache=cache)
    assert done.returncode == 2
    assert "checkpoints/2 is a checkpoint of run " in done.stderr and "Move it away" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr


@pytest.mark.slow
def test_a_model_that_changed_meanwhile_is_noticed_and_can_be_accepted(cache, tmp_path):
    model, workdir = tmp_path / "model", tmp_path / "run"
    shutil.copytree(ROOT / "tba_jax/assets/start_model", model)
    overrides = (*QUICK, "num_steps=4", "checkpoint.period=2", f"model.path={model}")
    assert run(workdir, *overrides, cache=cache).returncode == 0
    unfinish(workdir)
    weights = safetensors.numpy.load_file(model / "model.safetensors")
    safetensors.numpy.save_file(
        {name: np.asarray(x * 1.5, x.dtype) for name, x in weights.items()},
        model / "model.safetensors",
        metadata={"format": "pt"},
    )
    done = run(workdir, *overrides, cache=cache)
    assert done.returncode == 2 and "error: model changed since checkpoint 4" in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
    done = run(workdir, *overrides, cache=cache, flags=["--accept_changed=model"])
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
def test_a_second_process_is_refused_without_effect_on_the_first(cache, tmp_path):
    workdir = tmp_path / "run"
    first = start(workdir, *QUICK, "num_steps=60", "checkpoint.period=5", cache=cache)
    wait_for(lambda: losses(workdir), process=first)
    second = run(workdir, *QUICK, "num_steps=60", "checkpoint.period=5", cache=cache)
    assert second.returncode == 2
    assert f"error: process {first.pid} on " in second.stderr, second.stderr
    assert len(second.stderr.strip().splitlines()) == 1, second.stderr
    out, err = first.communicate(timeout=150)
    assert first.returncode == 0, err
    assert sorted(losses(workdir)) == list(range(1, 61))
    assert load_host_state(str(workdir))[0] == 60


def test_a_work_directory_that_is_deleted_ends_the_run_and_its_state_is_saved(cache, tmp_path):
    workdir = tmp_path / "run"
    overrides = (*QUICK, "num_steps=400", "checkpoint.period=0")
    process = start(workdir, *overrides, cache=cache)
    wait_for(lambda: len(losses(workdir)) >= 3, process=process)
    shutil.rmtree(workdir)
    out, err = process.communicate(timeout=150)
    assert process.returncode == 1
    assert f"error: the work directory {workdir} was deleted or moved" in err, err
    step, _ = load_host_state(str(workdir))
    assert step >= 3 and f"An emergency checkpoint of step {step} was written there" in err
    assert len(err.strip().splitlines()) == 1, err
    config = json.loads((workdir / "config.json").read_text())
    assert len(config["run_id"]) == 16
    assert lines(workdir / "metrics.jsonl") == []


def test_a_path_that_storage_takes_for_a_pattern_is_refused_before_anything_is_made(
    cache, tmp_path
):
    done = run(tmp_path / "run[1]", *QUICK, cache=cache)
    assert done.returncode == 2 and "run[1] contains [ and ]" in done.stderr
    assert not any(tmp_path.iterdir())


def test_a_buffer_that_holds_no_batch_ends_the_run_that_would_search_for_ever(cache, tmp_path):
    """One response of each prompt would fit by its bookkeeping, and does not with its tokens."""
    done = run(tmp_path / "run", "eval.period=0", "replay.max_bytes=900", cache=cache)
    assert done.returncode == 1
    assert "error: no batch of 4 prompts can be drawn from the replay buffer" in done.stderr
    assert "of 900 bytes); responses so far: {'generated': " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
