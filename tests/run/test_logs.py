# SPDX-License-Identifier: Apache-2.0
"""What a resume does to the logs of the run."""

from types import SimpleNamespace

from tba_jax.report.jsonl import read_jsonl
from tba_jax.run.records import Logs


def opened(folder):
    display = SimpleNamespace(write=lambda step, values: None, close=lambda: None)
    return Logs(folder, True, display, [])


def test_what_is_done_again_is_dropped(tmp_path):
    logs = opened(tmp_path)
    for step in range(6):
        logs.metrics.write(step, {})
        logs.samples.append({"step": step})
    logs.close()
    logs = opened(tmp_path)
    logs.cut_back(lambda record: record["step"] <= 3)
    logs.metrics.write(4, {})
    logs.close()
    assert [r["step"] for r in read_jsonl(tmp_path / "samples.jsonl")] == [0, 1, 2, 3]
    assert [r["step"] for r in read_jsonl(tmp_path / "metrics.jsonl")] == [0, 1, 2, 3, 4]
