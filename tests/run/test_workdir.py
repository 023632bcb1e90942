# SPDX-License-Identifier: Apache-2.0
"""config.json decides what a work directory is. One process works on it: others are refused while
it lives, and take over when it is gone."""

import contextlib
import dataclasses
import os
import threading
import time

import pytest

from tba_jax.config.schema import make_config
from tba_jax.devices.worker import WorkerError
from tba_jax.run import workdir as workdirs
from tba_jax.run.errors import UserError
from tba_jax.run.run import claim
from tba_jax.run.workdir import begin_run, hold, run_id_of, saved_config

CONFIG = make_config({"task.name": "arithmetic", "num_steps": 3})


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(workdirs, "BEAT_S", 0.02)
    monkeypatch.setattr(workdirs, "EXPIRE_S", 1.0)


def contents(folder):
    return {path: path.is_file() and path.read_bytes() for path in folder.rglob("*")}


OTHER_CONFIG = r"holds a run with another config: seed: 1 -> 0"
# Files of a folder; "config" is the config of a run with another seed, "cut" the half of it.
REFUSED = [
    ({"config.json": "config"}, OTHER_CONFIG),  # a copy: no lock file beside it
    ({"config.json": "cut"}, r"config\.json is not readable as the config .* Restore the file"),
    ({"config.json": '{"model_type": "llama"}'}, r"a run of tba_jax \(it has no"),
    ({"metrics.jsonl": "{}"}, r"holds 'metrics\.jsonl' and no config\.json: it is not empty"),
]


@pytest.mark.parametrize(("files", "message"), REFUSED)
def test_a_folder_that_holds_no_such_run_is_refused_and_left_alone(tmp_path, files, message):
    begin_run(tmp_path / "other", dataclasses.replace(CONFIG, seed=1))
    text = (tmp_path / "other" / "config.json").read_text()
    texts = {"config": text, "cut": text[: len(text) // 2]}
    (tmp_path / "run").mkdir()
    for name, content in files.items():
        (tmp_path / "run" / name).write_text(texts.get(content, content))
    before = contents(tmp_path)
    with contextlib.ExitStack() as held:
        with pytest.raises(UserError, match=message) as raised:
            claim(tmp_path / "run", CONFIG, held)
    assert "\n" not in str(raised.value)
    assert contents(tmp_path) == before


OURS = ("tba_jax-lock", "tba_jax-heartbeat", "config.json.unfinished")


@pytest.mark.parametrize("left", [(), OURS[:1], OURS])
def test_a_new_folder_and_a_start_that_was_killed_begin_a_run(tmp_path, left):
    for name in left:
        (tmp_path / name).write_text("")
    with contextlib.ExitStack() as held:
        claim(tmp_path, CONFIG, held)
        assert run_id_of(tmp_path) and saved_config(tmp_path)["num_steps"] == 3
    (tmp_path / "notes.txt").write_text("x")  # of the user
    with contextlib.ExitStack() as held:
        claim(tmp_path, CONFIG, held)
        assert (tmp_path / "notes.txt").read_text() == "x"


def test_a_start_without_a_step_is_corrected_in_place_and_a_copied_config_continues(tmp_path):
    with contextlib.ExitStack() as held:
        claim(tmp_path / "a", dataclasses.replace(CONFIG, seed=1), held)  # fails after that
    with contextlib.ExitStack() as held:
        claim(tmp_path / "a", CONFIG, held)
    assert saved_config(tmp_path / "a")["seed"] == 0
    begin_run(tmp_path / "b", CONFIG)
    copied = (tmp_path / "b" / "config.json").read_bytes()
    with contextlib.ExitStack() as held:
        claim(tmp_path / "b", CONFIG, held)
    assert (tmp_path / "b" / "config.json").read_bytes() == copied


def beat_elsewhere(workdir, beat):
    # Whole at once, as the lock itself writes: a heartbeat may look at any moment.
    (workdir / "elsewhere").write_text(f"process 7 on far\n{beat}")
    (workdir / "elsewhere").replace(workdir / "tba_jax-heartbeat")


def test_one_process_holds_a_directory(tmp_path):
    run = tmp_path / "run"
    with hold(run):
        with pytest.raises(UserError, match=rf"process {os.getpid()} on .* is working on .*run\."):
            with hold(run):
                pass
    with hold(run):
        pass
    assert os.listdir(run) == ["tba_jax-lock"]


def test_a_holder_on_another_host_is_gone_when_it_sends_no_heartbeat(tmp_path):
    beat_elsewhere(tmp_path, 3)
    start = time.monotonic()
    with hold(tmp_path):
        assert time.monotonic() - start > 1.0


def test_a_holder_on_another_host_with_a_heartbeat_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(workdirs, "EXPIRE_S", 60.0)
    beat_elsewhere(tmp_path, 3)
    threading.Timer(0.3, beat_elsewhere, (tmp_path, 4)).start()
    with pytest.raises(UserError, match="process 7 on far is working on"):
        with hold(tmp_path):
            pass
    (tmp_path / "tba_jax-heartbeat").unlink()  # it ends
    with hold(tmp_path):
        pass


def failure(held):
    """The error of `check`, once the heartbeat has failed."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            held.check()
        except WorkerError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("the heartbeat does not fail")


def test_the_heartbeat_reports_a_directory_that_was_moved_or_fails_for_a_while(tmp_path):
    with hold(tmp_path / "run") as held:
        held.check()
        start = time.monotonic()
        (tmp_path / "run").rename(tmp_path / "moved")
        assert "the work directory was deleted or moved" in failure(held)
        assert time.monotonic() - start > 0.9
    assert not (tmp_path / "run").exists()
