# SPDX-License-Identifier: Apache-2.0
"""What a run may be continued from: real commands on directories that something happened to."""

import shutil

import pytest
from commands import SYNC, losses, run

QUICK = (*SYNC, "eval.period=0")


@pytest.mark.slow  # run/test_checkpoint.py has the parts
def test_a_checkpoint_that_is_damaged_or_of_another_run_is_one_line(cache, tmp_path):
    overrides = (*QUICK, "num_steps=2", "checkpoint.period=1")
    workdir, other = tmp_path / "run", tmp_path / "other"
    for each in (workdir, other):
        assert run(each, *overrides, cache=cache).returncode == 0
        (each / "report.json").unlink()  # as if it was killed before it wrote its report
    shutil.rmtree(other / "checkpoints" / "2")
    shutil.copytree(workdir / "checkpoints" / "2", other / "checkpoints" / "2")
    files = (workdir / "checkpoints" / "2" / "train_state").rglob("d/*")
    weights = max(files, key=lambda file: file.stat().st_size)
    data = bytearray(weights.read_bytes())
    data[len(data) // 2] ^= 16
    weights.write_bytes(data)
    for folder, text in ((workdir, "2 is damaged: train_state/"), (other, "2 is of run ")):
        done = run(folder, *overrides, cache=cache)
        assert done.returncode == 1 and text in done.stderr, done.stderr
        assert len(done.stderr.strip().splitlines()) == 1, done.stderr
        assert (folder / "checkpoints" / "2").is_dir()
    (workdir / "checkpoints" / "2").rename(tmp_path / "moved away")
    done = run(workdir, *overrides, cache=cache)
    assert done.returncode == 0 and sorted(losses(workdir)) == [1, 2], done.stderr


@pytest.mark.slow
def test_a_path_that_storage_takes_for_a_pattern_is_refused_before_anything_is_made(
    cache, tmp_path
):
    done = run(tmp_path / "run[1]", *QUICK, cache=cache)
    assert done.returncode == 2 and "run[1] contains [ and ]" in done.stderr
    assert not any(tmp_path.iterdir())


@pytest.mark.slow
def test_a_buffer_that_holds_no_batch_ends_the_run_that_would_search_for_ever(cache, tmp_path):
    """One response of each prompt would fit by its bookkeeping, and does not with its tokens."""
    done = run(tmp_path / "run", "eval.period=0", "replay.max_bytes=900", cache=cache)
    assert done.returncode == 1
    assert "error: no batch of 4 prompts can be drawn from the replay buffer" in done.stderr
    assert "of 900 bytes); responses so far: {'generated': " in done.stderr
    assert len(done.stderr.strip().splitlines()) == 1, done.stderr
