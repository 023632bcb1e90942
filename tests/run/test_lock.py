# SPDX-License-Identifier: Apache-2.0
"""One process works on a work directory: refused while it lives, taken over when it is gone."""

import os
import subprocess
import sys
import threading
import time

import pytest

from tba_jax.devices.worker import WorkerError
from tba_jax.run import lock
from tba_jax.run.errors import UserError
from tba_jax.run.lock import hold


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lock, "BEAT_S", 0.02)
    monkeypatch.setattr(lock, "EXPIRE_S", 1.0)


def beat_elsewhere(workdir, beat):
    # Whole at once, as the lock itself writes: a heartbeat may look at any moment.
    (workdir / "elsewhere").write_text(f"process 7 on far\n{beat}")
    (workdir / "elsewhere").replace(workdir / "heartbeat")


def test_one_process_holds_a_directory(tmp_path):
    run = tmp_path / "run"
    with hold(run):
        with pytest.raises(UserError, match=rf"process {os.getpid()} on .* is working on .*run\."):
            with hold(run):
                pass
    with hold(run):
        pass
    assert os.listdir(run) == ["lock"]


def test_a_killed_process_holds_nothing_on_its_machine(tmp_path):
    code = "import sys, os; from pathlib import Path; from tba_jax.run.lock import hold\n"
    code += "with hold(Path(sys.argv[1])): os.kill(os.getpid(), 9)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode == -9 and (tmp_path / "heartbeat").exists()
    with hold(tmp_path):
        pass


def test_a_holder_on_another_host_is_gone_when_it_sends_no_heartbeat(tmp_path):
    beat_elsewhere(tmp_path, 3)
    start = time.monotonic()
    with hold(tmp_path):
        assert time.monotonic() - start > 1.0


def test_a_holder_on_another_host_with_a_heartbeat_is_left_alone(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "EXPIRE_S", 60.0)
    beat_elsewhere(tmp_path, 3)
    threading.Timer(0.3, beat_elsewhere, (tmp_path, 4)).start()
    with pytest.raises(UserError, match="process 7 on far is working on"):
        with hold(tmp_path):
            pass
    (tmp_path / "heartbeat").unlink()  # it ends
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
