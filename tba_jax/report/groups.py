# SPDX-License-Identifier: Apache-2.0
"""Groups of runs, their differing settings, and statistics over their seeds."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.report.figures import Curve, thinned
from tba_jax.report.files import Run, flat
from tba_jax.report.words import plain

_MOST_FIELDS = 3
_BAND_POINTS = 200


class RunGroup(NamedTuple):
    """Runs with equal values of some settings; by default only their seeds differ.

    Attributes:
        name: settings that distinguish the group, as text.
        runs: runs of the group, in the order of the command line.
    """

    name: str
    runs: list[Run]


def run_names(runs: Sequence[Run]) -> list[str]:
    """Return the folder name of each run, or its path if another run has the same name."""
    names = [run.workdir.name or str(run.workdir) for run in runs]
    return names if len(set(names)) == len(names) else [str(run.workdir) for run in runs]


def _settings(run: Run) -> dict[str, Any]:
    return {**run.config, **flat(run.versions, "versions.")}


def differing_fields(runs: Sequence[Run]) -> dict[str, list[Any]]:
    """Return the fields that differ between runs: name -> value in each run.

    Versions of packages have names `versions.NAME`. A run without the field has None.
    """
    told = [_settings(run) for run in runs]
    values = {name: [fields.get(name) for fields in told] for fields in told for name in fields}
    return {name: row for name, row in values.items() if any(v != row[0] for v in row)}


def group_runs(runs: Sequence[Run], fields: Sequence[str] = ()) -> list[RunGroup]:
    """Group runs by the values of some fields of their configs.

    Args:
        fields: config fields; empty: every field that differs between the runs, except `seed`.

    Raises:
        ValueError: no run has one of the fields.
    """
    differing = [name for name in differing_fields(runs) if name != "seed"]
    for field in fields:
        if not any(field in run.config for run in runs):
            known = ", ".join(name for name in ["seed", *differing] if name in runs[0].config)
            raise ValueError(
                f"--group={field}: no config of these runs has this field. "
                f"Fields that differ: {known or 'none'}"
            )
    chosen = list(fields) or differing
    members: dict[str, list[Run]] = {}
    for run in runs:
        values = [_settings(run).get(name) for name in chosen]
        members.setdefault(repr(values), []).append(run)
    groups = [*members.values()]
    if not fields:  # one field that differs between all groups, best a text, is a shorter name
        firsts = [_settings(group[0]) for group in groups]
        telling = [x for x in chosen if len({repr(s.get(x)) for s in firsts}) == len(groups)]
        telling.sort(key=lambda x: not isinstance(firsts[0].get(x), str))
        chosen = telling[:1] or chosen
    return [RunGroup(_group_name(group, chosen), group) for group in groups]


def _group_name(group: Sequence[Run], fields: Sequence[str]) -> str:
    if 0 < len(fields) <= _MOST_FIELDS:
        settings = _settings(group[0])
        return ", ".join(f"{name}={plain(settings.get(name))}" for name in fields)
    first, *others = run_names(group)
    return f"{first} and {len(others)} more" if others else first


def trained_tokens(run: Run) -> Curve:
    """Return (steps, response tokens trained on up to each step)."""
    steps, tokens = run.metrics.column("step", "train/response_tokens")
    return steps, np.cumsum(tokens)


def curve(run: Run, name: str, axis: str) -> Curve:
    """Return a metric against "step", "tokens" or "time" as float64 arrays; long logs are thinned.

    Args:
        name: key of metrics.jsonl.
    """
    x, y = run.metrics.column("time_s" if axis == "time" else "step", name)
    if axis == "tokens":
        steps, tokens = trained_tokens(run)
        if not len(steps):
            return steps, tokens
        x = np.interp(x, [0, *steps], [0, *tokens])
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


def mean_interval(values: Sequence[float]) -> tuple[float, float, float]:
    """Return the mean over seeds and the ends of its 90 % Student interval.

    For a single value, the ends are the value.
    """
    from scipy import special

    mean = float(np.mean(values))
    if len(values) < 2:
        return mean, mean, mean
    half = special.stdtrit(len(values) - 1, 0.95) * np.std(values, ddof=1) / np.sqrt(len(values))
    return mean, float(mean - half), float(mean + half)


def shared_prompts(runs: Sequence[Run]) -> dict[str, list[dict[str, Any] | None]]:
    """Return prompt -> held-out sample of each finished run, for prompts that two runs share."""
    by_run = [{str(s.get("prompt")): s for s in run.report.get("samples") or []} for run in runs]
    rows = {p: [samples.get(p) for samples in by_run] for samples in by_run for p in samples}
    return {prompt: row for prompt, row in rows.items() if sum(s is not None for s in row) > 1}
