# SPDX-License-Identifier: Apache-2.0
"""trace.json: parts of steps in order, without overlap; counters with the values of the log."""

import json

from tba_jax.report import trace
from tba_jax.report.files import load_run

LINES = [
    {"step": 0, "time_s": 4.0, "eval/pass_at_1": 0.25},
    {"step": 1, "time_s": 7.0, "train/wait_batch_s": 1.5, "train/draw_s": 0.5, "train/step_s": 1.0},
    {
        "step": 2,
        "time_s": 9.0,
        "train/wait_batch_s": 0.0,
        "train/draw_s": 0.25,
        "train/step_s": 1.5,
    },
    {"step": 2, "time_s": 9.5, "eval/pass_at_1": 0.5, "search/tokens_per_s": 80.0},
]


def test_parts_of_steps_and_counters(tmp_path):
    lines = [x | {"train/loss": 1.0} if "train/step_s" in x else x for x in LINES]
    (tmp_path / "metrics.jsonl").write_text("".join(json.dumps(x) + "\n" for x in lines))
    events = json.loads(trace.render_trace(load_run(tmp_path)))["traceEvents"]
    parts = [e for e in events if e["ph"] == "X"]
    assert [(e["args"]["step"], e["name"], e["ts"] / 1e6, e["dur"] / 1e6) for e in parts] == [
        (1, "wait for a batch", 4.0, 1.5),
        (1, "draw", 5.5, 0.5),
        (1, "train", 6.0, 1.0),
        (2, "draw", 7.25, 0.25),
        (2, "train", 7.5, 1.5),
    ]
    counted = [(e["name"], e["ts"] / 1e6, e["args"]["value"]) for e in events if e["ph"] == "C"]
    assert counted[-1] == ("eval/pass_at_1", 9.5, 0.5)
    assert ("decoded tokens per second", 9.5, 80.0) in counted
