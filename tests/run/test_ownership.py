# SPDX-License-Identifier: Apache-2.0
"""A work directory with files of another program is refused, and nothing in it changes."""

import dataclasses
import json
import os
import zlib

import pytest

from tba_jax.commands import report
from tba_jax.config.schema import make_config
from tba_jax.flow.state import PartState
from tba_jax.run.errors import UserError
from tba_jax.run.host_state import Facts, HostState, pack
from tba_jax.run.workdir import begin_or_continue, begin_run, claim, holds_run, inspect
from tba_jax.storage import sealed
from tba_jax.weights.versions import PublicationError, Versions

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


def save_checkpoint(workdir, name, run_id, **facts):
    """What identifies a checkpoint of a run."""
    folder = workdir / "checkpoints" / str(name) / "host_state"
    folder.mkdir(parents=True)
    state = HostState(Facts(0, 1, run_id, **facts), {"clock": PartState({}, {})})
    (folder / "process_00000.npz").write_bytes(pack(state))


def model_folder(workdir):
    (workdir / "config.json").write_text('{"model_type": "llama"}')


def metrics_of_another_program(workdir):
    (workdir / "metrics.jsonl").write_text('{"loss": 1}\n')


def linked_metrics(workdir):
    (workdir.parent / "theirs.jsonl").write_text("{}\n")
    (workdir / "metrics.jsonl").symlink_to(workdir.parent / "theirs.jsonl")


def linked_weights(workdir):
    (workdir.parent / "theirs").mkdir()
    (workdir.parent / "theirs" / "model.bin").write_text("x")
    (workdir / "weights").symlink_to(workdir.parent / "theirs")


def weights_of_another_program(workdir):
    (workdir / "weights" / "3").mkdir(parents=True)
    (workdir / "weights" / "3" / "model.bin").write_text("x")


def checkpoints_of_another_program(workdir):
    for step in (2, 3):
        (workdir / "checkpoints" / str(step) / "default").mkdir(parents=True)


def checkpoints_of_another_program_in_a_run(workdir):
    begin_run(workdir, CONFIG)
    checkpoints_of_another_program(workdir)


def checkpoint_of_another_program_older_than_one_of_the_run(workdir):
    begin_run(workdir, CONFIG, "mine")
    save_checkpoint(workdir, 4, "mine", step=4)
    folder = workdir / "checkpoints" / "3"
    (folder / "train_state").mkdir(parents=True)
    (folder / "_CHECKPOINT_METADATA").write_text('{"item_handlers": {"train_state": "theirs"}}')


def checkpoint_of_another_run(workdir):
    begin_run(workdir, CONFIG, "mine")
    save_checkpoint(workdir, 2, "theirs")


def renamed_checkpoint(workdir):
    begin_run(workdir, CONFIG, "mine")
    save_checkpoint(workdir, 12, "mine", step=8)


def damaged_config(workdir):
    begin_run(workdir, CONFIG)
    text = (workdir / "config.json").read_text()
    (workdir / "config.json").write_text(text.replace('"num_steps": 3', '"num_steps": 4'))


def report_of_another_program(workdir):
    (workdir / "report.html").write_text("<html>")


def folder_in_place_of_a_file(workdir):
    (workdir / "schedule.jsonl").mkdir()
    (workdir / "schedule.jsonl" / "notes.txt").write_text("x")


def unfinished_file_of_another_program(workdir):
    (workdir.parent / "theirs.txt").write_text("x")
    (workdir / "config.json.unfinished").symlink_to(workdir.parent / "theirs.txt")


def lock_of_another_program(workdir):
    (workdir / "lock").mkdir()
    (workdir / "lock" / "00000001.json.bak").write_text("x")


def prompts_of_another_program(workdir):
    (workdir / "prompts.json").write_text("[]")


def linked_tensorboard(workdir):
    (workdir.parent / "theirs").mkdir()
    (workdir / "tensorboard").symlink_to(workdir.parent / "theirs")


def link_in_the_lock_of_a_run(workdir):
    begin_run(workdir, CONFIG)
    (workdir.parent / "theirs.txt").write_text("x")
    (workdir / "lock").mkdir()
    (workdir / "lock" / "00000001.unfinished").symlink_to(workdir.parent / "theirs.txt")


def link_in_the_plots_of_a_run(workdir):
    begin_run(workdir, CONFIG)
    (workdir / "plots").mkdir()
    (workdir / "plots" / "reward.png").symlink_to(workdir.parent / "theirs.png")


def report_of_another_config(workdir):
    begin_run(workdir, dataclasses.replace(CONFIG, seed=1))
    sealed.write(workdir / "report.json", {"steps": 3})


REFUSED = {
    prompts_of_another_program: r"prompts\.json begins with b'\[\]': no run",
    linked_tensorboard: r"tensorboard is a symbolic link",
    link_in_the_lock_of_a_run: r"lock/00000001\.unfinished is a symbolic link",
    link_in_the_plots_of_a_run: r"plots/reward\.png is a symbolic link",
    report_of_another_config: r"holds a run with another config: seed: 1 -> 0",
    model_folder: r"config\.json is not readable as the config of a run of tba_jax \(lacks",
    metrics_of_another_program: r"holds metrics\.jsonl, and no config\.json of a run of tba_jax",
    linked_metrics: r"metrics\.jsonl is a symbolic link, and a run writes and deletes under that",
    linked_weights: r"weights is a symbolic link",
    weights_of_another_program: r"holds weights, and no config\.json",
    checkpoints_of_another_program: r"holds checkpoints, and no config\.json",
    checkpoints_of_another_program_in_a_run: r"checkpoints/3 is not a checkpoint of tba_jax",
    checkpoint_of_another_program_older_than_one_of_the_run: r"checkpoints/3 is not a checkpoint",
    checkpoint_of_another_run: r"checkpoints/2 is a checkpoint of run theirs, and the work direc",
    renamed_checkpoint: r"checkpoints/12 holds step 8: the folder was renamed\. Name it .*/8 again",
    damaged_config: r"has the digest .* Restore the file",
    report_of_another_program: r"report\.html begins with b'<html>': no run of tba_jax wrote it",
    folder_in_place_of_a_file: r"schedule\.jsonl is not a regular file",
    unfinished_file_of_another_program: r"config\.json\.unfinished is a symbolic link",
    lock_of_another_program: r"holds lock, and no config\.json",
}


@pytest.mark.parametrize("make", REFUSED, ids=lambda make: make.__name__)
def test_files_of_another_program_are_refused_and_left_alone(tmp_path, make):
    workdir = tmp_path / "run"
    workdir.mkdir()
    make(workdir)
    before = tree(tmp_path)
    with pytest.raises(UserError, match=REFUSED[make]) as raised:
        claim(workdir, CONFIG)
    assert "\n" not in str(raised.value)
    assert tree(tmp_path) == before


def test_other_names_are_left_alone(tmp_path):
    (tmp_path / "lost+found").mkdir()
    (tmp_path / "run.log").write_text("x")
    (tmp_path / "checkpoints").mkdir()  # empty: nobody's
    before = tree(tmp_path)
    with claim(tmp_path, CONFIG):
        assert inspect(tmp_path).run_id
    after = tree(tmp_path)
    assert {name: after[name] for name in before} == before


def test_a_start_that_was_killed_holding_the_lock_is_continued(tmp_path):
    (tmp_path / "lock").mkdir()
    (tmp_path / "lock" / "00000001.json").write_text("")
    with claim(tmp_path, CONFIG):
        assert inspect(tmp_path).run_id


@pytest.mark.parametrize("left", [(), ("train_state",), ("_CHECKPOINT_METADATA", "train_state")])
def test_a_run_that_was_killed_while_it_deleted_a_checkpoint_continues(tmp_path, left):
    begin_run(tmp_path, CONFIG, "mine")
    save_checkpoint(tmp_path, 4, "mine", step=4)
    folder = tmp_path / "checkpoints" / "3"
    folder.mkdir()
    for name in left:
        if name == "train_state":
            (folder / name).mkdir()
        else:
            (folder / name).write_text('{"item_handlers": {"host_state": "tba_jax.run.x"}}')
    assert inspect(tmp_path).run_id == "mine"


def test_every_damage_of_the_facts_of_a_checkpoint_is_left_to_who_restores_it(tmp_path):
    begin_run(tmp_path, CONFIG, "mine")
    save_checkpoint(tmp_path, 2, "mine", step=2)
    file = tmp_path / "checkpoints" / "2" / "host_state" / "process_00000.npz"
    data = file.read_bytes()
    for bit in range(8 * len(data)):
        changed = bytearray(data)
        changed[bit // 8] ^= 1 << bit % 8
        file.write_bytes(changed)
        assert inspect(tmp_path).run_id == "mine"


def test_a_lost_config_is_written_again_with_the_run_id_of_the_checkpoint(tmp_path):
    flat = json.loads(json.dumps(_flat(CONFIG)))
    save_checkpoint(tmp_path, 2, "abc", step=2, config=flat)
    other = dataclasses.replace(CONFIG, seed=1)
    with pytest.raises(UserError, match="holds a run with another config: seed: 0 -> 1"):
        holds_run(tmp_path, other)
    assert begin_or_continue(tmp_path, CONFIG)
    assert sealed.read(tmp_path / "config.json")["run_id"] == "abc"


def _flat(config):
    from tba_jax.config.schema import flatten

    return flatten(config)


def test_only_versions_that_the_run_made_are_deleted(tmp_path):
    theirs = tmp_path / "weights" / "7"
    theirs.mkdir(parents=True)
    (theirs / "model.bin").write_text("x")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "elsewhere" / "file").write_text("x")
    (tmp_path / "weights" / "1").symlink_to(tmp_path / "elsewhere")
    foreign = tree(tmp_path)
    versions = Versions(tmp_path)
    for version in (2, 4, 6, 8):
        versions.begin(version)
        versions.path(version).mkdir()
        (versions.path(version) / "array").write_text(str(version))
        versions.add(version)
    assert versions.named() == [6, 8]
    versions.begin(10)
    (tmp_path / "weights" / "10.orbax-checkpoint-tmp").mkdir()  # killed while it was written
    unfinished = tmp_path / "weights" / "12.orbax-checkpoint-tmp"
    unfinished.mkdir()
    with pytest.raises(PublicationError, match="orbax-checkpoint-tmp exists and was not written"):
        versions.begin(12)
    unfinished.rmdir()
    Versions(tmp_path).clear()
    left = tree(tmp_path)
    left.pop("versions.json")
    assert left == foreign
    with pytest.raises(PublicationError, match="weights/7 exists and was not written by this run"):
        versions.begin(7)


def test_a_report_is_not_written_over_files_of_another_program(tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text('{"step": 1}\n')
    (tmp_path / "report.html").write_text("theirs")
    before = tree(tmp_path)
    assert report.main([str(tmp_path)]) == 1
    assert "no run of tba_jax wrote it" in capsys.readouterr().err
    assert tree(tmp_path) == before
