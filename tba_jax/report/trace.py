# SPDX-License-Identifier: Apache-2.0
"""trace.json: a run over time, in the format of Chrome traces, for https://ui.perfetto.dev.

The trainer has a track for each part of a step: waiting for a batch, drawing it, training. A batch
may be drawn while the previous one trains. Searchers, buffer and evaluations are counters.
"""

import json
from collections.abc import Iterator
from typing import Any

import numpy as np

from tba_jax.report.files import Run

_MAX_STEPS = 5_000  # newest steps that are written: 3 MB
# In their order within a step, whose end is the time of its line.
_SPANS = {
    "train/wait_batch_s": "wait for a batch",
    "train/draw_s": "draw",
    "train/step_s": "train",
}
_COUNTERS = {
    "search/tokens_per_s": "decoded tokens per second",
    "search/idle_s": "seconds that searchers were idle",
    "buffer/num_trajectories": "responses in the buffer",
    "buffer/staleness_mean": "staleness in steps",
}
_TRAINER, _COUNTS = 1, 2  # process IDs in the trace


def render_trace(run: Run) -> str:
    """Return the trace as JSON; times are microseconds since the start of the run."""
    events = [*_names(), *_spans(run), *_counters(run)]
    lines = (json.dumps(event, separators=(",", ":")) for event in events)
    return '{"displayTimeUnit":"ms","traceEvents":[\n' + ",\n".join(lines) + "\n]}\n"


def _names() -> Iterator[dict[str, Any]]:
    for process, name in ((_TRAINER, "trainer"), (_COUNTS, "searchers and buffer")):
        yield {"ph": "M", "name": "process_name", "pid": process, "tid": 0, "args": {"name": name}}
    for track, name in enumerate(_SPANS.values()):
        named = {"name": "thread_name", "pid": _TRAINER, "tid": track, "args": {"name": name}}
        yield {"ph": "M", **named}


def _spans(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a span for each part of each step of the trainer."""
    known = {name: dict(zip(*run.metrics.column("step", name), strict=True)) for name in _SPANS}
    ends, _ = run.metrics.column("time_s", "train/step_s")
    for step, end in [*zip(known["train/step_s"], ends, strict=True)][-_MAX_STEPS:]:
        durations = {name: float(known[name].get(step, 0.0)) for name in _SPANS}
        begin = end - sum(durations.values())
        for track, (name, seconds) in enumerate(durations.items()):
            if seconds > 0:
                yield {
                    "ph": "X",
                    "name": _SPANS[name],
                    "pid": _TRAINER,
                    "tid": track,
                    "ts": _microseconds(begin),
                    "dur": _microseconds(seconds),
                    "args": {"step": int(step)},
                }
            begin += seconds


def _counters(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the values of every counter and of the headline metric of evaluations."""
    names = dict(_COUNTERS)
    names |= {name: name for name in run.metrics.names if name.startswith("eval/pass_at_")}
    for name, label in names.items():
        times, values = run.metrics.column("time_s", name)
        for time_s, value in zip(times[-_MAX_STEPS:], values[-_MAX_STEPS:], strict=True):
            if np.isfinite(value):
                counted = {"value": float(value)}
                ts = _microseconds(time_s)
                yield {"ph": "C", "name": label, "pid": _COUNTS, "ts": ts, "args": counted}


def _microseconds(seconds: float) -> int:
    return round(1e6 * float(seconds))
