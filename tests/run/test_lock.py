# SPDX-License-Identifier: Apache-2.0
"""One process works on a work directory: refused while it lives, taken over when it is gone."""

import json
import os
import subprocess
import sys

import pytest

from tba_jax.run.errors import UserError, WorkdirLost
from tba_jax.run.lock import Hold


def beat_elsewhere(workdir, beat):
    # Whole at once, as the lock itself writes: a heartbeat may look at any moment.
    (workdir / "elsewhere").write_text(json.dumps({"host": "far", "pid": 7, "beat": beat}))
    (workdir / "elsewhere").replace(workdir / "heartbeat.json")


class Clock:
    """A monotonic clock; `events` are called when it has come that far."""

    def __init__(self, **events):
        self.now_s, self.events = 0.0, {float(k[1:]): call for k, call in events.items()}

    def __call__(self):
        return self.now_s

    def sleep(self, seconds):
        self.now_s += seconds
        for at in [at for at in self.events if at <= self.now_s]:
            self.events.pop(at)()


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
    with Hold(tmp_path, sleep=None):  # at once
        pass


def test_a_holder_elsewhere_is_gone_when_it_sends_no_heartbeat_by_our_own_clock(tmp_path):
    beat_elsewhere(tmp_path, 3)
    clock = Clock()
    with Hold(tmp_path, clock=clock, sleep=clock.sleep, expire_s=30.0):
        assert clock.now_s == 30.0


def test_a_holder_elsewhere_with_a_heartbeat_is_left_alone(tmp_path):
    beat_elsewhere(tmp_path, 3)
    clock = Clock(t20=lambda: beat_elsewhere(tmp_path, 4))
    with pytest.raises(UserError, match="process 7 on far is working on"):
        Hold(tmp_path, clock=clock, sleep=clock.sleep)
    assert clock.now_s == 20.0
    (tmp_path / "heartbeat.json").unlink()  # it ends
    with Hold(tmp_path, sleep=None):
        pass


def test_the_heartbeat_reports_a_deleted_directory(tmp_path):
    hold = Hold(tmp_path / "run", beat_s=0.01)
    hold.check()
    (tmp_path / "run").rename(tmp_path / "moved")  # at once
    assert hold.stop.wait(30.0)
    with pytest.raises(WorkdirLost, match="run was deleted or moved"):
        hold.check()
    hold.release()
    assert not (tmp_path / "run").exists()


def test_storage_may_refuse_heartbeats_for_a_while(tmp_path):
    clock = Clock()
    hold = Hold(tmp_path, beat_s=60.0, clock=clock)
    (tmp_path / "heartbeat.json.unfinished").mkdir()  # cannot be written to
    hold._beat()
    clock.now_s = 31.0
    with pytest.raises(WorkdirLost, match="no heartbeat could be written to .* for 30 s"):
        hold._beat()
    hold.release()
