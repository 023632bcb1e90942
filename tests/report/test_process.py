# SPDX-License-Identifier: Apache-2.0
import time

from tba_jax.report import process
from tba_jax.report.process import ReportProcess


def wait_for(condition):
    end = time.monotonic() + 60
    while not condition() and time.monotonic() < end:
        time.sleep(0.05)
    assert condition()


def test_a_report_is_rewritten_and_rests_in_proportion(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_COMMAND", ("sh", "-c", 'echo "$1" >> "$0/times"'))
    now = [0.0]
    writer = ReportProcess(tmp_path, clock=lambda: now[0])
    told = tmp_path / "times"
    for now[0] in (0.0, 299.0):
        writer.write(1, {})
    assert not told.exists()
    now[0] = 300.0
    writer.write(2, {})
    wait_for(told.exists)
    wait_for(lambda: writer._process.poll() is not None)
    for now[0], count in ((310.0, 1), (799.0, 1), (800.0, 2)):  # it took 10 s: a rest of 500 s
        writer.write(3, {})
        wait_for(lambda wanted=count: len(told.read_text().splitlines()) == wanted)
    writer.close()
