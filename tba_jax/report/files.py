# SPDX-License-Identifier: Apache-2.0
"""Contents of a run's work directory: report.json, metrics.jsonl, config.json.

Each file may be missing. metrics.jsonl is read once, as a stream; only its numbers, evaluations and
counts stay in memory.
"""

import array
import collections
import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from tba_jax.report.jsonl import stream_jsonl
from tba_jax.storage.whole_files import read_json

Facts = Mapping[str, Any]
_Column = tuple["array.array[int]", "array.array[float]"]  # index of each line; its value


class Metrics:
    """Columns of the lines of metrics.jsonl.

    Args:
        records: lines of the log in order; each is read once.

    Attributes:
        evaluations: lines with metrics of an evaluation, unchanged.
        staleness: staleness in steps -> number of uses, summed over the run.
        last_step: highest step; 0 without a line.
    """

    def __init__(self, records: Iterable[Facts] = ()) -> None:
        self.evaluations: list[Facts] = []
        uses: collections.Counter[int] = collections.Counter()
        self._columns: dict[str, _Column] = collections.defaultdict(
            lambda: (array.array("q"), array.array("d"))
        )
        for line, record in enumerate(records):
            for name, value in record.items():
                if isinstance(value, int | float):
                    lines, values = self._columns[name]
                    lines.append(line)
                    values.append(value)
            if any(name.startswith("eval/") for name in record):
                self.evaluations.append(record)
            for staleness, count in record.get("buffer/staleness_histogram") or ():
                uses[int(staleness)] += int(count)
        self.staleness: Mapping[int, int] = dict(sorted(uses.items()))
        steps = self._columns["step"][1] if "step" in self._columns else []
        self.last_step = int(max(steps, default=0))

    @property
    def names(self) -> Sequence[str]:
        """Return the names of all numbers in the log, sorted."""
        return sorted(self._columns)

    def column(self, x: str, y: str) -> tuple[np.ndarray, np.ndarray]:
        """Return the values of `x` and `y` in lines with numbers for both, as float64 arrays."""
        if x not in self._columns or y not in self._columns:
            return np.zeros(0), np.zeros(0)
        (x_lines, x_values), (y_lines, y_values) = self._columns[x], self._columns[y]
        _, i, j = np.intersect1d(x_lines, y_lines, assume_unique=True, return_indices=True)
        return np.array(x_values)[i], np.array(y_values)[j]

    def of_evaluations(self, name: str) -> Iterator[Facts]:
        """Return the evaluations that have a number of this name."""
        return (r for r in self.evaluations if isinstance(r.get(name), int | float))


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
    def last_step(self) -> int:
        """Return the newest step in report.json or metrics.jsonl."""
        return max(self.report.get("steps") or 0, self.metrics.last_step)

    @property
    def num_steps(self) -> int:
        """Return the configured number of steps; without a config, the last step."""
        return self.config.get("num_steps") or self.last_step

    @property
    def is_finished(self) -> bool:
        """Return whether the last step was made and report.json was written."""
        return bool(self.report) and self.last_step >= self.num_steps

    @property
    def evals(self) -> list[Facts]:
        """Return the first and the last evaluation: [], [before] or [before, after].

        Raises:
            ValueError: the evaluations of report.json lack the metric that metrics.jsonl names.
        """
        found: list[Facts] = [
            {"step": 0, **{name.removeprefix("eval/"): value for name, value in record.items()}}
            for record in self.metrics.of_evaluations(f"eval/{self.metric}")
        ]
        ends = found[:1] + found[1:][-1:]
        reported = self.report.get("eval") or {}
        before, after = reported.get("before"), reported.get("after")
        if not (before and after):
            return ends
        if not all(isinstance(x.get(self.metric), int | float) for x in (before, after)):
            raise ValueError(
                f"{self.workdir / 'metrics.jsonl'}: the last eval/metric is {self.metric!r:.40}, "
                "but the evaluations of report.json lack it. Correct that line, or remove "
                "report.json to build the report without it"
            )
        after_step = ends[-1]["step"] if ends else self.last_step
        return [{"step": 0, **before}, {"step": after_step, **after}]

    @property
    def metric(self) -> str:
        """Return the name of the headline metric, from the evaluations."""
        named = [r["eval/metric"] for r in self.metrics.evaluations if "eval/metric" in r]
        return named[-1] if named else "pass_at_1"

    @property
    def decoding(self) -> str:
        """Return a phrase about the decoding of evaluations, such as "greedy decoding"."""
        temperature = self.config.get("eval.temperature", 0.0)
        if not temperature:
            return "greedy decoding"
        n = self.config.get("eval.num_samples", 1)
        return f"{n} response{'s' if n > 1 else ''} each at temperature {temperature:g}"

    @property
    def kind(self) -> str:
        """Return the name of the response kind whose share was measured; "" without one."""
        kinds = self.report.get("kinds") or []
        return kinds[0] if kinds else ""


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
            f"{workdir}: not the work directory of a run (no metrics.jsonl and no report.json). "
            "Give the directory of --workdir"
        )
    try:
        metrics = Metrics(stream_jsonl(workdir / "metrics.jsonl"))
    except TypeError as error:
        raise _damaged(workdir / "metrics.jsonl", error) from error
    resolved, report = (_read(workdir / name) for name in ("config.json", "report.json"))
    for name in ("config", "versions", "chosen"):
        if not isinstance(resolved.get(name, {}), dict):
            why = f"`{name}` is a {type(resolved[name]).__name__}, wanted an object"
            raise _damaged(workdir / "config.json", why)
    return Run(
        workdir=workdir,
        report=report,
        config=flat(resolved.get("config", {})),
        versions=resolved.get("versions", {}),
        metrics=metrics,
        chosen=resolved.get("chosen", {}),
    )


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}). Remove the file to build the report without it")


def _read(path: Path) -> Facts:
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
