# SPDX-License-Identifier: Apache-2.0
"""One process works on a work directory: refused while it lives, taken over when it is gone."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest

from tba_jax.devices.worker import WorkerError
from tba_jax.run import lock
from tba_jax.run.errors import UserError
from tba_jax.run.lock import Hold


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(lock, "EXPIRE_S", 1.0)


def beat_elsewhere(workdir, beat):
    # Whole at once, as the lock itself writes: a heartbeat may look at any moment.
    (workdir / "elsewhere").write_text(json.dumps({"host": "far", "pid": 7, "beat": beat}))
    (workdir / "elsewhere").replace(workdir / "heartbeat.json")


def test_one_process_holds_a_directory(tmp_path):
    with Hold(tmp_path / "run"):
        with pytest.raises(
            UserError, match=rf"process {os.getpid()} on .* is working on .*run\. Wa"
        ):
            Hold(tmp_path / "run")
    with Hold(tmp_path / "run"):
        pass
    assert os.listdir(tmp_path / "run") == ["lock"]


def test_a_killed_process_holds_nothing_on_its_machine(tmp_path):
    code = "import sys, os; from pathlib import Path; from tba_jax.run.lock import Hold\n"
    code += "hold = Hold(Path(sys.argv[1])); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode == -9 and (tmp_path / "heartbeat.json").exists()
    with Hold(tmp_path):
        pass


def test_a_holder_on_another_host_is_gone_when_it_sends_no_heartbeat(tmp_path):
    beat_elsewhere(tmp_path, 3)
    start = time.monotonic()
    with Hold(tmp_path):
        assert time.monotonic() - start > 1.0


def test_a_holder_on_another_host_with_a_heartbeat_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "EXPIRE_S", 60.0)
    beat_elsewhere(tmp_path, 3)
    threading.Timer(0.3, beat_elsewhere, (tmp_path, 4)).start()
    with pytest.raises(UserError, match="process 7 on far is working on"):
        Hold(tmp_path)
    (tmp_path / "heartbeat.json").unlink()  # it ends
    with Hold(tmp_path):
        pass


def failure(hold):
    """The error of `check`, once the heartbeat has failed."""
    deadline = time.monotonic() + 30.0
    while time.monotonic() < deadline:
        try:
            hold.check()
        except WorkerError as error:
            return str(error)
        time.sleep(0.01)
    raise AssertionError("the heartbeat does not fail")


def test_the_heartbeat_reports_a_deleted_directory(tmp_path):
    with Hold(tmp_path / "run") as hold:
        hold.check()
        (tmp_path / "run").rename(tmp_path / "moved")  # at once
        assert "run was deleted or moved" in failure(hold)
    assert not (tmp_path / "run").exists()


def test_storage_may_refuse_heartbeats_for_a_while(tmp_path, monkeypatch):
    def refuse(*arguments):
        raise OSError("stale file handle")

    with Hold(tmp_path) as hold:
        monkeypatch.setattr(lock, "write_json", refuse)
        start = time.monotonic()
        assert "no heartbeat could be written to" in failure(hold)
        assert time.monotonic() - start > 0.9
