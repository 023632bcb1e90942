# SPDX-License-Identifier: Apache-2.0
"""Numbered folders of Orbax: complete or invisible, of this run, with a digest for each file."""

import itertools
import shutil

import jax.numpy as jnp
import numpy as np
from etils import epath
from orbax.checkpoint._src.futures import synchronization

from tba_jax.storage.steps import SavedSteps, delete_own


def saved(folder, **options):
    return SavedSteps(folder, "x", error=RuntimeError, **{"run_id": "f00d"} | options)


def save(steps, *numbers):
    for number in numbers:
        steps.write(number, {"w": np.full(8, number)})
    steps.wait()


def names(folder):
    return sorted(path.name for path in folder.iterdir())


def newest(folder):
    return saved(folder, read_only=True).newest()


def test_a_save_is_complete_though_other_saves_begin(tmp_path, monkeypatch):
    # Between any two looks at Orbax's number of the newest save, another save has begun.
    numbers = itertools.count(1000)
    ids = synchronization.OperationIdGenerator
    monkeypatch.setattr(ids, "get_current_operation_id", lambda: str(next(numbers)))
    steps = saved(tmp_path)
    steps.write(3, {"w": jnp.arange(8.0)})
    steps.close()
    assert newest(tmp_path) == 3


def test_only_old_folders_of_this_run_are_deleted(tmp_path):
    other = saved(tmp_path, run_id="other")
    save(other, 1)
    other.close()
    (tmp_path / "2").mkdir()
    (tmp_path / "2" / "model.bin").write_text("theirs")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "0").symlink_to(tmp_path / "elsewhere")
    (tmp_path / "5.orbax-checkpoint-tmp").mkdir()  # of a save that was killed
    wanted = [3]
    steps = saved(tmp_path, wanted=lambda: wanted)
    save(steps, 3, 4, 5, 6)
    assert names(tmp_path) == ["0", "1", "2", "3", "5", "6", "elsewhere"]
    wanted.clear()
    save(steps, 7)
    steps.close()
    assert names(tmp_path) == ["0", "1", "2", "6", "7", "elsewhere"]
    delete_own(epath.Path(tmp_path), "f00d")
    assert names(tmp_path) == ["0", "1", "2", "elsewhere"]


def test_a_kill_leaves_no_half_of_an_old_folder(tmp_path, monkeypatch):
    steps = saved(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, **options: None)  # killed before
        save(steps, 3, 4, 5)
    saved(tmp_path, read_only=True)  # another process may be saving
    assert names(tmp_path) == ["00.orbax-checkpoint-tmp", "4", "5"]
    saved(tmp_path)
    assert names(tmp_path) == ["4", "5"]
    with monkeypatch.context() as patched:
        patched.setattr(shutil, "rmtree", lambda path, **options: None)
        delete_own(epath.Path(tmp_path), "f00d")
    saved(tmp_path)
    assert names(tmp_path) == []
