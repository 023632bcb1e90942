# SPDX-License-Identifier: Apache-2.0
"""trace.json: a run over time, in the format of Chrome traces, for https://ui.perfetto.dev.

The trainer has a track for each part of a step: waiting for a batch, drawing it, training. A batch
may be drawn while the previous one trains. Searchers, buffer and evaluations are counters.
"""

import json
from collections.abc import Iterator
from typing import Any

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
    return json.dumps({"displayTimeUnit": "ms", "traceEvents": [*_spans(run), *_counters(run)]})


def _named(kind: str, process: int, track: int, name: str) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": process, "tid": track, "args": {"name": name}}


def _spans(run: Run) -> Iterator[dict[str, Any]]:
    """Yield a span for each part of each step of the trainer."""
    yield _named("process_name", _TRAINER, 0, "trainer")
    known = {name: dict(zip(*run.metrics.column("step", name), strict=True)) for name in _SPANS}
    for track, name in enumerate(_SPANS.values()):
        yield _named("thread_name", _TRAINER, track, name)
    ends, _ = run.metrics.column("time_s", "train/step_s")
    for step, end in [*zip(known["train/step_s"], ends, strict=True)][-_MAX_STEPS:]:
        durations = [known[name].get(step, 0.0) for name in _SPANS]
        begin = end - sum(durations)
        for track, (label, seconds) in enumerate(zip(_SPANS.values(), durations, strict=True)):
            where = {"pid": _TRAINER, "tid": track, "ts": 1e6 * begin, "dur": 1e6 * seconds}
            if seconds > 0:
                yield {"ph": "X", "name": label, **where, "args": {"step": int(step)}}
            begin += seconds


def _counters(run: Run) -> Iterator[dict[str, Any]]:
    """Yield the values of every counter and of the headline metric of evaluations."""
    yield _named("process_name", _COUNTS, 0, "searchers and buffer")
    for name, label in {**_COUNTERS, f"eval/{run.metric}": f"eval/{run.metric}"}.items():
        for time_s, value in [*zip(*run.metrics.column("time_s", name), strict=True)][-_MAX_STEPS:]:
            place = {"pid": _COUNTS, "ts": 1e6 * time_s}
            yield {"ph": "C", "name": label, **place, "args": {"value": value}}
