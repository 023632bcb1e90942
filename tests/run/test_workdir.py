# SPDX-License-Identifier: Apache-2.0
"""config.json decides what a work directory is; only what the run made is deleted."""

import contextlib
import dataclasses
import os
import zlib

import jax.numpy as jnp
import pytest

from tba_jax.commands import report
from tba_jax.commands.entry_point import run_command
from tba_jax.config.schema import make_config
from tba_jax.run import lock
from tba_jax.run.checkpoint import Checkpoints
from tba_jax.run.errors import UserError
from tba_jax.run.run import claim
from tba_jax.run.workdir import begin_run, run_id_of, saved_config
from tba_jax.storage.whole_files import write_json

CONFIG = make_config({"task.name": "arithmetic", "num_steps": 3})


def tree(folder):
    """Every name below a folder with its kind, link target or digest."""
    found = {}
    for path in sorted(folder.rglob("*")):
        if path.is_symlink():
            found[str(path.relative_to(folder))] = os.readlink(path)
        elif path.is_file():
            found[str(path.relative_to(folder))] = zlib.crc32(path.read_bytes())
        else:
            found[str(path.relative_to(folder))] = "folder"
    return found


def file_of_another_program(workdir):
    (workdir / "metrics.jsonl").write_text('{"loss": 1}\n')


def model_folder(workdir):
    (workdir / "config.json").write_text('{"model_type": "llama"}')


def cut_config(workdir):
    begin_run(workdir, CONFIG)
    text = (workdir / "config.json").read_text()
    (workdir / "config.json").write_text(text[: len(text) // 2])


def run_with_another_config(workdir):
    begin_run(workdir, dataclasses.replace(CONFIG, seed=1))
    write_json(workdir / "report.json", {"steps": 3})


REFUSED = {
    file_of_another_program: r"run holds 'metrics\.jsonl' and no config\.json: it is not empty",
    model_folder: r"config\.json is not readable as the config of a run of tba_jax \(it has no",
    cut_config: r"config\.json is not readable as the config of a run .* Restore the file",
    run_with_another_config: r"holds a run with another config: seed: 1 -> 0",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_a_folder_that_holds_no_such_run_is_refused_and_left_alone(tmp_path, make):
    workdir = tmp_path / "run"
    workdir.mkdir()
    make(workdir)
    before = tree(tmp_path)
    with contextlib.ExitStack() as held:
        with pytest.raises(UserError, match=REFUSED[make]) as raised:
            claim(workdir, CONFIG, held)
    assert "\n" not in str(raised.value)
    assert tree(tmp_path) == before


@pytest.mark.parametrize("left", [(), ("lock",), ("lock", "heartbeat", "config.json.unfinished")])
def test_a_new_folder_and_a_start_that_was_killed_begin_a_run(tmp_path, left, monkeypatch):
    # The heartbeat may be that of another host.
    monkeypatch.setattr(lock, "BEAT_S", 0.1)
    monkeypatch.setattr(lock, "EXPIRE_S", 0.5)
    for name in left:
        (tmp_path / name).write_text("")
    with contextlib.ExitStack() as held:
        claim(tmp_path, CONFIG, held)
        assert run_id_of(tmp_path) and saved_config(tmp_path)["num_steps"] == 3
    (tmp_path / "notes.txt").write_text("x")  # of the user
    with contextlib.ExitStack() as held:
        claim(tmp_path, CONFIG, held)
        assert (tmp_path / "notes.txt").read_text() == "x"


def test_only_checkpoints_of_the_run_are_deleted(tmp_path):
    def save(run_id, *steps):
        checkpoints = Checkpoints(tmp_path, run_id=run_id)
        for step in steps:
            checkpoints.save(step, {"w": jnp.zeros(2)}, {})
        checkpoints.close()

    save("theirs", 1)
    (tmp_path / "checkpoints" / "2").mkdir()
    (tmp_path / "checkpoints" / "2" / "model.bin").write_text("x")
    (tmp_path / "checkpoints" / "notes.orbax-checkpoint-tmp").mkdir()
    foreign = tree(tmp_path)
    save("mine", 10, 20, 30, 40)
    left = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
    assert left == ["1", "2", "30", "40", "notes.orbax-checkpoint-tmp"]
    assert foreign.items() <= tree(tmp_path).items()


def test_a_report_is_not_written_over_files_of_another_program(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "report.html").write_text("theirs")
    before = tree(tmp_path)
    assert run_command(lambda: report.main([str(tmp_path)])) == 2
    assert "holds no run: there is no" in capsys.readouterr().err
    assert tree(tmp_path) == before
