# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics: trackio, W&B or TensorBoard on request (`log.tracker`).

The progress line is in `progress`, metrics.jsonl in `jsonl`. A tracker's package is imported when
the tracker is made.
"""

import contextlib
import importlib
import io
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.report.jsonl import jsonable, stream_jsonl

TRACKER_PACKAGES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboardX"}
"""Kind of a tracker, which is also the name of the extra -> its Python package."""


class MultiWriter:
    """Writer of metrics that forwards to several writers.

    Args:
        writers: objects with `write` and `close`; a tracker also has `write_samples`, and `logged`:
            (step, kind) of the lines that it has from an earlier process of the run.
    """

    def __init__(self, writers: Sequence[Any]) -> None:
        self._writers = tuple(writers)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record `values` (metric name -> number, string or list) of one optimiser step."""
        for writer in self._writers:
            if (step, _kind(values)) not in getattr(writer, "logged", ()):
                writer.write(step, values)

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write responses to the trackers.

        Args:
            of: kind of the responses, "train" or "eval".
            samples: records of samples.jsonl.
        """
        for writer in self._writers:
            if hasattr(writer, "logged") and (step, f"samples/{of}") not in writer.logged:
                writer.write_samples(step, of, samples)

    def close(self) -> None:
        """Close all writers, even if one raises."""
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of `values`."""
    numbers = {name: jsonable(value) for name, value in values.items()}
    return {name: float(x) for name, x in numbers.items() if isinstance(x, int | float)}


def _kind(values: Mapping[str, Any]) -> str:
    """Return the name that only lines of evaluations or samples have; else "train"."""
    return min(values.keys() & {"eval/n", "samples/eval", "samples/train"}, default="train")


def _logged(workdir: Path, delay_s: float) -> set[tuple[int, str]]:
    """Return the lines of metrics.jsonl, with their samples, that are older than the delay."""
    lines = stream_jsonl(workdir / "metrics.jsonl")
    times = {(x["step"], _kind(x)): x.get("time_s", 0.0) for x in lines}
    last = max(times.values(), default=0.0) - delay_s
    found = {key for key, time_s in times.items() if time_s <= last}
    return found | {(step, f"samples/{kind.removesuffix('/n')}") for step, kind in found}


def _table(step: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of the table of responses in trackio and W&B."""
    rows = [[step, s["prompt"], "".join(s["tokens"]), s["reward"]] for s in samples]
    return {"columns": ["step", "prompt", "response", "reward"], "data": rows}


class TensorBoardWriter:
    """Scalars and responses in TensorBoard event files, written every second."""

    def __init__(self, workdir: Path, config: Mapping[str, Any]) -> None:
        self.logged, folder = _logged(workdir, 2.0), str(workdir / "tensorboard")
        package: Any = importlib.import_module("tensorboardX")
        # TensorBoard forgets later steps of an earlier process: they are trained again.
        first = max((step for step, _ in self.logged), default=-1) + 1
        self._writer = package.SummaryWriter(folder, flush_secs=1, purge_step=first)
        text = "".join(f"    {name} = {value}\n" for name, value in config.items())
        self._writer.add_text("config", text)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in finite_numbers(values).items():
            self._writer.add_scalar(name, value, step)

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add responses as indented text, so that TensorBoard interprets no markup."""
        text = "\n\n".join(
            f"reward {sample['reward']}\n{sample['prompt']}\n-> {''.join(sample['tokens'])}"
            for sample in samples
        )
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer.add_text(f"samples/{of}", indented, step)

    def close(self) -> None:
        self._writer.close()


class TrackioWriter:
    """Scalars and responses in a trackio project; `trackio show --project PROJECT` is a live page.

    Args:
        name: name of the run; a resumed work directory continues the run of this name.
    """

    def __init__(self, project: str, *, name: str, config: Mapping[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        self.logged = {(row["step"], _kind(row)) for row in storage.get_logs(project, name)}
        options: Any = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(io.StringIO()):  # the printed lines are those of the run
            self._run = self._trackio.init(
                project=project, name=name, config=dict(config), resume="allow", **options
            )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log(finite_numbers(values), step=step)

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        self._run.log({f"samples/{of}": self._trackio.Table(**_table(step, samples))}, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # unlike the run's own method, not repeated at exit


class WandbWriter:
    """Scalars and responses in Weights & Biases; `options` are arguments of `wandb.init`."""

    def __init__(self, workdir: Path, **options: Any) -> None:
        self.logged = _logged(workdir, 15.0)  # W&B writes its file every 15 seconds
        self._wandb: Any = importlib.import_module("wandb")
        self._run = self._wandb.init(resume="allow", **options)
        # W&B drops values of steps before its newest step; an evaluation may end after later steps.
        self._run.define_metric("*", step_metric="step")

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**finite_numbers(values), "step": step})

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        table = self._wandb.Table(**_table(step, samples))
        self._run.log({f"samples/{of}": table, "step": step})

    def close(self) -> None:
        self._run.finish()


def make_tracker(tracker: str, workdir: Path, config: Mapping[str, Any], run_id: str) -> Any:
    """Return the writer for a value of log.tracker that is not empty.

    Args:
        config: field name -> value.
        run_id: ID of the run in config.json; a resumed run continues in the tracker.

    Raises:
        ValueError: the package of the tracker is not installed.
    """
    kind, _, project = tracker.partition(":")
    options = {"project": project, "name": workdir.name, "dir": str(workdir), "id": run_id or None}
    try:
        if kind == "tensorboard":
            return TensorBoardWriter(workdir, config)
        if kind == "trackio":
            return TrackioWriter(project, name=f"{workdir.name}-{run_id[:8]}", config=config)
        return WandbWriter(workdir, **options, config=dict(config))
    except ImportError as error:
        raise ValueError(
            f"log.tracker={kind}: the package {TRACKER_PACKAGES[kind]} cannot be imported "
            f"({error}). Install it with: pip install 'tba_jax[{kind}]', or unset log.tracker"
        ) from error
