# SPDX-License-Identifier: Apache-2.0
"""Contents of a run's work directory: report.json, metrics.jsonl, config.json.

Each file may be missing. Logs are read as streams; only their columns stay in memory.
"""

import dataclasses
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tba_jax.report.jsonl import stream_jsonl
from tba_jax.report.lines import wrong_config, wrong_metrics, wrong_report
from tba_jax.report.series import Metrics
from tba_jax.storage.whole_files import read_json

Facts = Mapping[str, Any]


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
            {
                "step": record.get("step", 0),
                **{
                    name.removeprefix("eval/"): value
                    for name, value in record.items()
                    if name.startswith("eval/")
                },
            }
            for record in self.metrics.of_evaluations(f"eval/{self.metric}")
        ]
        ends = found[:1] + found[1:][-1:]
        told = self.report.get("eval") or {}
        if told.get("before") and told.get("after"):
            for time in ("before", "after"):
                if not isinstance(told[time].get(self.metric), int | float):
                    raise ValueError(
                        f"{self.workdir / 'metrics.jsonl'}: the last eval/metric is "
                        f"{self.metric!r:.40}, but the evaluations of report.json lack it. "
                        "Correct that line, or remove report.json to build the report without it"
                    )
            after_step = ends[-1]["step"] if ends else self.last_step
            return [{"step": 0, **told["before"]}, {"step": after_step, **told["after"]}]
        return ends

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
    return assemble(workdir, Metrics(stream_jsonl(workdir / "metrics.jsonl", wrong_metrics)))


def assemble(workdir: Path, metrics: Metrics) -> Run:
    """Return a run whose metrics were already read.

    Raises:
        ValueError: config.json or report.json is damaged.
    """
    resolved = _read_json(workdir / "config.json")
    for name in ("config", "versions", "chosen"):
        if not isinstance(resolved.get(name, {}), dict):
            raise _damaged(
                workdir / "config.json",
                f"`{name}` is a {type(resolved[name]).__name__}, wanted an object",
            )
    config, report = flat(resolved.get("config", {})), _read_json(workdir / "report.json")
    for name, wrong in (
        ("config.json", wrong_config(config)),
        ("report.json", wrong_report(report)),
    ):
        if wrong:
            raise _damaged(workdir / name, wrong)
    return Run(
        workdir=workdir,
        report=report,
        config=config,
        versions=resolved.get("versions", {}),
        metrics=metrics,
        chosen=resolved.get("chosen", {}),
    )


def _damaged(path: Path, why: object) -> ValueError:
    return ValueError(f"{path} is damaged ({why}). Remove the file to build the report without it")


def _read_json(path: Path) -> Mapping[str, Any]:
    if not path.exists():
        return {}
    try:
        return read_json(path)
    except (OSError, ValueError) as error:
        raise _damaged(path, error) from error
