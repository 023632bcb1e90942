# SPDX-License-Identifier: Apache-2.0
"""What a resume does to the logs of the run."""

import json

import pytest

from tba_jax.devices.cluster import Cluster
from tba_jax.report.jsonl import read_jsonl
from tba_jax.run.run import open_logs


class Display:
    def __init__(self):
        self.notes = []

    def note(self, text):
        self.notes.append(text)

    def write(self, step, values):
        pass

    def close(self):
        pass


def opened(folder):
    display = Display()
    return display, open_logs(folder, Cluster(), display, [])


@pytest.fixture
def saved(tmp_path):
    """Logs of a run that was saved at step 3 and went on to step 5; the state of its logs."""
    _, logs = opened(tmp_path)
    for step in range(6):
        if step == 4:
            state = logs.state()
        logs.metrics.write(step, {})
        logs.samples.append({"step": step})
    logs.close()
    return state


def resume(folder, state):
    """The display's notes, and steps of the metrics."""
    display, logs = opened(folder)
    if state is not None:
        logs.restore(state)
    logs.cut_back(3, lambda r: r["step"] <= 3)
    logs.close()
    samples = read_jsonl(folder / "samples.jsonl")
    assert [r["step"] for r in samples] == [0, 1, 2, 3]
    return display.notes, [r["step"] for r in read_jsonl(folder / "metrics.jsonl")]


@pytest.mark.parametrize("is_known", [True, False])
def test_what_is_done_again_is_dropped(saved, tmp_path, is_known):
    assert resume(tmp_path, saved if is_known else None) == ([], [0, 1, 2, 3])


def test_a_log_that_was_cut_or_lost_is_named(saved, tmp_path):
    name = "metrics.jsonl"
    path = tmp_path / name
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:2]))
    notes, *_ = resume(tmp_path, saved)
    had, has = saved.meta[name], len(b"".join(lines[:2]))
    assert notes == [
        f"{path} is not whole: it had {had} bytes when checkpoint 3 was written, and has {has} "
        "now. The report lacks the lost lines"
    ]
    path.unlink()
    notes, *_ = resume(tmp_path, saved)
    assert len(notes) == 1 and f"{name} is not whole" in notes[0] and "has 0 now" in notes[0]


def test_a_log_of_something_else_is_not_taken_for_the_runs(saved, tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text("".join(json.dumps({"step": i, "text": "x" * i}) + "\n" for i in range(60)))
    notes, metrics = resume(tmp_path, saved)
    assert len(notes) == 1 and metrics == [0, 1, 2, 3]
