# SPDX-License-Identifier: Apache-2.0
"""One process works on a work directory: refused while it lives, taken over when it is gone."""

import json
import os
import shutil
import subprocess
import sys
import threading

import pytest

from tba_jax.run.errors import UserError, WorkdirLost
from tba_jax.run.lock import Hold, LockFolder

ELSEWHERE = {"host": "far", "machine": "another boot", "pid": 7, "began": "1", "beat": 3}


def entry(workdir, number):
    return json.loads((workdir / "lock" / f"{number:08d}.json").read_text())


def held_elsewhere(workdir, number=4, **changes):
    (workdir / "lock").mkdir(parents=True, exist_ok=True)
    file = workdir / "lock" / f"{number:08d}.json"
    # Whole at once, as the lock itself writes: a heartbeat may look at any moment.
    (workdir / "elsewhere").write_text(json.dumps(ELSEWHERE | {"released": False} | changes))
    (workdir / "elsewhere").replace(file)


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


def test_the_next_holder_comes_after_the_last_one_let_go(tmp_path):
    with Hold(LockFolder(tmp_path / "run")) as hold:
        assert hold.number == 1 and not hold.taken_over
        with pytest.raises(
            UserError, match=rf"process {os.getpid()} on .* is working on .*run\. Wa"
        ):
            Hold(LockFolder(tmp_path / "run"))
        hold.confirm()
    with Hold(LockFolder(tmp_path / "run")) as hold:
        assert hold.number == 2 and not hold.taken_over
        assert os.listdir(tmp_path / "run" / "lock") == ["00000002.json"]


def test_a_killed_process_holds_nothing_on_its_machine(tmp_path):
    code = (
        "import sys, os; from pathlib import Path; from tba_jax.run.lock import Hold, LockFolder\n"
    )
    code += "hold = Hold(LockFolder(Path(sys.argv[1]))); os.kill(os.getpid(), 9)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run([sys.executable, "-c", code, str(tmp_path)], env=environment, timeout=60)
    assert done.returncode == -9 and not entry(tmp_path, 1)["released"]
    with Hold(LockFolder(tmp_path), sleep=None) as hold:  # at once
        assert hold.number == 2


def test_a_holder_elsewhere_is_gone_when_nothing_was_heard_of_it_by_our_own_clock(tmp_path):
    held_elsewhere(tmp_path)
    clock = Clock()
    with Hold(LockFolder(tmp_path), clock=clock, sleep=clock.sleep, expire_s=30.0) as hold:
        assert hold.number == 5 and clock.now_s == 30.0
        assert (
            "process 7 on far held " in hold.taken_over
            and "sent no heartbeat for 30 s" in hold.taken_over
        )


def test_a_holder_elsewhere_with_a_beat_is_left_alone(tmp_path):
    held_elsewhere(tmp_path)
    clock = Clock(t20=lambda: held_elsewhere(tmp_path, beat=4))
    with pytest.raises(UserError, match="process 7 on far is working on"):
        Hold(LockFolder(tmp_path), clock=clock, sleep=clock.sleep)
    assert clock.now_s == 20.0 and os.listdir(tmp_path / "lock") == ["00000004.json"]


def test_a_holder_elsewhere_that_lets_go_is_followed_at_once(tmp_path):
    held_elsewhere(tmp_path)
    clock = Clock(t5=lambda: held_elsewhere(tmp_path, released=True))
    with Hold(LockFolder(tmp_path), clock=clock, sleep=clock.sleep) as hold:
        assert hold.number == 5 and clock.now_s == 5.0 and not hold.taken_over


def test_of_many_who_find_a_stale_lock_one_takes_it(tmp_path):
    held_elsewhere(tmp_path)
    together, got, refused = threading.Barrier(12), [], []

    def race():
        together.wait(30.0)
        try:
            # By the real clock: by one that jumps, a lock would be stale whose holder is between
            # making the file and writing into it.
            got.append(Hold(LockFolder(tmp_path), beat_s=0.2, expire_s=2.0))
        except UserError as error:
            refused.append(str(error))

    threads = [threading.Thread(target=race) for _ in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60.0)
    assert len(got) == 1 and len(refused) == 11
    got[0].release()


@pytest.mark.parametrize("lost", ["taken over", "deleted"])
def test_the_heartbeat_reports_a_lost_directory(tmp_path, lost):
    hold = Hold(LockFolder(tmp_path / "run"), beat_s=0.01)
    hold.check()
    if lost == "deleted":
        shutil.rmtree(tmp_path / "run")
        message = "run was deleted or moved"
    else:
        held_elsewhere(tmp_path / "run", number=2)
        message = "process 7 on far has taken over .*run"
    assert hold._stop.wait(30.0)
    with pytest.raises(WorkdirLost, match=message):
        hold.check()
    with pytest.raises(WorkdirLost, match=message):
        hold.confirm()
    hold.release()
    # It wrote nothing there any more.
    assert (tmp_path / "run").exists() == (lost != "deleted")
    if lost != "deleted":
        assert entry(tmp_path / "run", 2)["host"] == "far"


def test_a_beat_that_storage_refuses_may_pass_but_not_for_long(tmp_path):
    clock = Clock()
    hold = Hold(LockFolder(tmp_path), beat_s=60.0, clock=clock)
    (tmp_path / "lock" / "00000001.unfinished").mkdir()  # cannot be written to
    hold._beat()
    clock.now_s = 31.0
    with pytest.raises(WorkdirLost, match="no heartbeat could be written to .* for 30 s"):
        hold._beat()
    hold.release()
