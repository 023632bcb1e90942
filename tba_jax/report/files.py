# SPDX-License-Identifier: Apache-2.0
"""Contents of a run's work directory: report.json, metrics.jsonl, config.json.

Each file may be missing. metrics.jsonl is read once, as a stream; only its numbers, evaluations and
counts stay in memory.
"""

import array
import collections
import dataclasses
import os
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.report.jsonl import stream_jsonl
from tba_jax.storage.whole_files import read_json

Facts = Mapping[str, Any]


class Metrics:
    """Columns of the lines of metrics.jsonl.

    Args:
        records: lines of the log in order; each is read once.

    Attributes:
        evaluations: lines with metrics of an evaluation, unchanged.
        staleness: staleness in steps -> number of uses, summed over the run.
    """

    def __init__(self, records: Iterable[Facts] = ()) -> None:
        self.evaluations: list[Facts] = []
        uses: collections.Counter[int] = collections.Counter()
        # Name of a metric -> numbers of the lines that have it, and its values.
        self._lines: dict[str, Any] = collections.defaultdict(lambda: array.array("q"))
        self._values: dict[str, Any] = collections.defaultdict(lambda: array.array("d"))
        for line, record in enumerate(records):
            for name, value in record.items():
                if isinstance(value, int | float):
                    self._lines[name].append(line)
                    self._values[name].append(value)
            if any(name.startswith("eval/") for name in record):
                self.evaluations.append(record)
            for staleness, count in record.get("buffer/staleness_histogram") or ():
                uses[int(staleness)] += int(count)
        self.staleness: Mapping[int, int] = dict(sorted(uses.items()))

    @property
    def names(self) -> list[str]:
        """Return the names of all numbers in the log, sorted."""
        return sorted(self._lines)

    def column(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of `x` and `y` in lines with numbers for both, as float64 arrays."""
        lines = [np.array(self._lines.get(name, ()), np.int64) for name in (x, y)]
        _, i, j = np.intersect1d(*lines, assume_unique=True, return_indices=True)
        a, b = (np.array(self._values.get(name, ()), np.float64) for name in (x, y))
        return a[i], b[j]


@dataclasses.dataclass(frozen=True)
class Run:
    """A run as read from its work directory.

    Attributes:
        report: contents of report.json; {} before the run has written it.
        config: flat config fields; {} without config.json.
        versions: versions of packages that affect the results; {} without config.json.
        metrics: columns of metrics.jsonl.
        chosen: settings that the run chose, with the reasons.
    """

    workdir: Path
    report: Facts
    config: Facts
    versions: Facts
    metrics: Metrics
    chosen: Facts = dataclasses.field(default_factory=dict)

    @property
    def name(self) -> str:
        return str(self.report.get("name") or self.config.get("name") or self.workdir.name)

    @property
    def logged_steps(self) -> int:
        """Return the newest step in metrics.jsonl."""
        return int(self.metrics.column("step", "step")[0].max(initial=0))

    @property
    def last_step(self) -> int:
        """Return the newest step in report.json or metrics.jsonl."""
        return max(self.report.get("steps") or 0, self.logged_steps)

    @property
    def num_steps(self) -> int:
        """Return the configured number of steps; without a config, the last step."""
        return self.config.get("num_steps") or self.last_step

    @property
    def is_finished(self) -> bool:
        """Return whether the last step was made and report.json was written."""
        return bool(self.report) and self.last_step >= self.num_steps

    @property
    def seconds(self) -> float:
        """Return the running time."""
        times, _ = self.metrics.column("time_s", "step")
        return self.report.get("wall_s") or float(times.max(initial=0.0))

    @property
    def metric(self) -> str:
        """Return the name of the headline metric, from the evaluations."""
        named = [r["eval/metric"] for r in self.metrics.evaluations if "eval/metric" in r]
        return named[-1] if named else "pass_at_1"

    @property
    def evals(self) -> list[Facts]:
        """Return the evaluations that have the headline metric, without "eval/" in the names."""
        return [
            {"step": 0, **{name.removeprefix("eval/"): value for name, value in record.items()}}
            for record in self.metrics.evaluations
            if isinstance(record.get(f"eval/{self.metric}"), int | float)
        ]

    @property
    def decoding(self) -> str:
        """Return a phrase about the decoding of evaluations, such as "greedy decoding"."""
        temperature = self.config.get("eval.temperature", 0.0)
        if not temperature:
            return "greedy decoding"
        n = self.config.get("eval.num_samples", 1)
        return f"{n} response{'s' if n > 1 else ''} each at temperature {temperature:g}"


def flat(facts: Facts, prefix: str = "") -> dict[str, Any]:
    """Return nested mappings as one mapping with dotted names."""
    out: dict[str, Any] = {}
    for name, value in facts.items():
        if isinstance(value, Mapping):
            out.update(flat(value, f"{prefix}{name}."))
        else:
            out[prefix + name] = value
    return out


def load_run(workdir: str | os.PathLike[str]) -> Run:
    """Read a work directory.

    Raises:
        ValueError: the path is not a work directory, or one of its files is damaged.
    """
    workdir = Path(workdir)
    if not any((workdir / name).exists() for name in ("metrics.jsonl", "report.json")):
        raise ValueError(
            f"{workdir}: no step is logged here (no metrics.jsonl and no report.json). Wait for "
            "the first step of the run, or give the directory of another --workdir"
        )
    resolved, report = (_read(workdir / name) for name in ("config.json", "report.json"))
    parts = {name: resolved.get(name, {}) for name in ("config", "versions", "chosen")}
    for name, value in parts.items():
        if not isinstance(value, dict):
            why = f"`{name}` is a {type(value).__name__}, wanted an object"
            raise _damaged(workdir / "config.json", why)
    try:
        metrics = Metrics(stream_jsonl(workdir / "metrics.jsonl"))
    except TypeError as error:
        raise _damaged(workdir / "metrics.jsonl", error) from error
    return Run(workdir, report, metrics=metrics, **parts | {"config": flat(parts["config"])})


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}). Remove the file to build the report without it")


def _read(path: Path) -> Facts:
    try:
        return read_json(path)
    except FileNotFoundError:
        return {}
    except ValueError as error:
        raise _damaged(path, error) from error
