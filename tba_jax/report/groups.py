# SPDX-License-Identifier: Apache-2.0
"""Groups of runs: their curves, means over seeds, and differing settings."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.report.figures import Curve, thinned
from tba_jax.report.files import Run, flat
from tba_jax.report.samples import newest_evaluation
from tba_jax.report.words import plain

AXES = {"step": "optimiser step", "tokens": "trained tokens", "time": "time since start (min:s)"}
_MOST_FIELDS = 3
_BAND_POINTS = 200


@dataclasses.dataclass(frozen=True)
class RunGroup:
    """Runs with equal values of some settings; by default only their seeds differ.

    Attributes:
        name: settings that distinguish the group, as text.
        runs: runs of the group, in the order of the command line.
    """

    name: str
    runs: tuple[Run, ...]


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return the folder name of each run, or its path if another run has the same name."""
    names = [run.workdir.name or str(run.workdir) for run in runs]
    if len(set(names)) == len(names):
        return names
    return [str(run.workdir) for run in runs]


def differing_fields(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the fields that differ between runs: name -> value in each run.

    Versions of packages have names `versions.NAME`. A run without the field has None.
    """
    told = [{**run.config, **flat(run.versions, "versions.")} for run in runs]
    names = dict.fromkeys(name for fields in told for name in fields)
    values = {name: [fields.get(name) for fields in told] for name in names}
    return {name: row for name, row in values.items() if any(v != row[0] for v in row)}


def group_runs(runs: Sequence[Run], fields: Sequence[str] = ()) -> list[RunGroup]:
    """Group runs by the values of some fields of their configs.

    Args:
        fields: config fields; empty: every field that differs between the runs, except `seed`.

    Raises:
        ValueError: no run has one of the fields.
    """
    for field in fields:
        if not any(field in run.config for run in runs):
            known = ", ".join(name for name in differing_fields(runs) if name in runs[0].config)
            raise ValueError(
                f"--group={field}: no config of these runs has this field. "
                f"Fields that differ: {known or 'none'}"
            )
    chosen = list(fields) or [name for name in differing_fields(runs) if name != "seed"]
    members: dict[str, list[Run]] = {}
    for run in runs:
        members.setdefault(repr([_field(run, name) for name in chosen]), []).append(run)
    grouped = list(members.values())
    if not fields:
        separating = [x for x in chosen if _num_values(grouped, x) == len(grouped)]
        # A text value distinguishes groups better than a number.
        separating.sort(key=lambda x: not isinstance(_field(grouped[0][0], x), str))
        chosen = separating[:1] or chosen
    return [RunGroup(_group_name(group, chosen), tuple(group)) for group in grouped]


def _field(run: Run, name: str) -> Any:
    return {**run.config, **flat(run.versions, "versions.")}.get(name)


def _num_values(grouped: Sequence[Sequence[Run]], name: str) -> int:
    return len({repr(_field(group[0], name)) for group in grouped})


def _group_name(group: Sequence[Run], fields: Sequence[str]) -> str:
    if 0 < len(fields) <= _MOST_FIELDS:
        return ", ".join(f"{name}={plain(_field(group[0], name))}" for name in fields)
    first, *others = run_names(group)
    return f"{first} and {len(others)} more" if others else first


def trained_tokens(run: Run) -> Curve:
    """Return (steps, response tokens trained on up to each step)."""
    steps, tokens = run.metrics.column("step", "train/response_tokens")
    return steps, np.cumsum(tokens)


def curve(run: Run, name: str, axis: str) -> Curve:
    """Return a metric against an axis, as two float64 arrays; long logs are thinned.

    Args:
        name: key of metrics.jsonl.
        axis: a key of `AXES`.
    """
    if axis == "time":
        x, y = run.metrics.column("time_s", name)
    else:
        x, y = run.metrics.column("step", name)
    if axis == "tokens":
        steps, tokens = trained_tokens(run)
        if not len(steps):
            return np.zeros(0), np.zeros(0)
        x = np.interp(x, np.concatenate([[0], steps]), np.concatenate([[0], tokens]))
    return thinned(x, y)


def band(curves: Sequence[Curve]) -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray] | None:
    """Return (x, mean, lowest, highest) where all runs have values; None for a single run."""
    curves = [(x, y) for x, y in curves if len(x) > 1]
    if len(curves) < 2:
        return None
    low, high = max(x[0] for x, _ in curves), min(x[-1] for x, _ in curves)
    if not low < high:
        return None
    grid = np.linspace(low, high, _BAND_POINTS)
    values = np.stack([np.interp(grid, x, y) for x, y in curves])
    return grid, values.mean(0), values.min(0), values.max(0)


def mean_interval(values: Sequence[float]) -> tuple[float, float | None]:
    """Return the mean over seeds and half the width of its 90 % Student interval.

    The interval is None for fewer than two values.
    """
    from scipy import special

    n = len(values)
    mean = float(np.mean(values))
    if n < 2:
        return mean, None
    half = special.stdtrit(n - 1, 0.95) * np.std(values, ddof=1) / np.sqrt(n)
    return mean, float(half)


def shared_prompts(runs: Sequence[Run]) -> Mapping[str, list[Mapping[str, Any] | None]]:
    """Return prompt -> newest held-out sample of each run, for prompts that two runs share.

    A finished run has its samples in report.json, a run in progress in samples.jsonl.
    """
    by_run = []
    for run in runs:
        samples = run.report.get("samples") or newest_evaluation(run.workdir / "samples.jsonl")
        by_run.append({str(s.get("prompt")): s for s in reversed(samples)})
    prompts = dict.fromkeys(prompt for samples in by_run for prompt in reversed(samples))
    rows = {prompt: [samples.get(prompt) for samples in by_run] for prompt in prompts}
    return {prompt: row for prompt, row in rows.items() if sum(s is not None for s in row) > 1}


def common_folder(runs: Sequence[Run]) -> Path:
    """Return the common folder of all runs, or the working directory if there is none."""
    parents = {run.workdir.resolve().parent for run in runs}
    return parents.pop() if len(parents) == 1 else Path.cwd()
