# SPDX-License-Identifier: Apache-2.0
from tba_jax.report import process
from tba_jax.report.process import ReportProcess


def test_a_report_is_rewritten_at_intervals(tmp_path, monkeypatch):
    monkeypatch.setattr(process, "_COMMAND", ("sh", "-c", 'echo "$1" >> "$0/times"'))
    now, told = [0.0], tmp_path / "times"
    writer = ReportProcess(tmp_path, clock=lambda: now[0])
    for now[0], wanted in ((0.0, 0), (299.0, 0), (300.0, 1), (310.0, 1), (900.0, 2)):
        writer.write(1, {})
        if writer._process is not None:
            writer._process.wait()
        assert (len(told.read_text().splitlines()) if told.exists() else 0) == wanted
    writer.close()
