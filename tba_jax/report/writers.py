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

from tba_jax.report.jsonl import jsonable

TRACKER_PACKAGES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboardX"}
"""Kind of a tracker, which is also the name of the extra -> its Python package."""


class MultiWriter:
    """Writer of metrics that forwards to several writers.

    Args:
        writers: objects with `write` and `close`; a tracker also has `write_samples`.
    """

    def __init__(self, writers: Sequence[Any]) -> None:
        self._writers = tuple(writers)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record `values` (metric name -> number, string or list) of one optimiser step."""
        for writer in self._writers:
            writer.write(step, values)

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write responses to the trackers.

        Args:
            of: kind of the responses, "train" or "eval".
            samples: records of samples.jsonl.
        """
        for writer in self._writers:
            if hasattr(writer, "write_samples"):
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


def _table(step: int, samples: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the arguments of the table of responses in trackio and W&B."""
    rows = [[step, s["prompt"], "".join(s["tokens"]), s["reward"]] for s in samples]
    return {"columns": ["step", "prompt", "response", "reward"], "data": rows}


class TensorBoardWriter:
    """Scalars and responses in TensorBoard event files; a resumed run replaces later values."""

    def __init__(self, folder: Path, config: Mapping[str, Any]) -> None:
        self._open: Any = importlib.import_module("tensorboardX").SummaryWriter
        self._folder, self._config, self._opened = str(folder), config, None

    def _writer(self, step: int) -> Any:
        if self._opened is None:
            self._opened = self._open(self._folder, purge_step=step)
            text = "".join(f"    {name} = {value}\n" for name, value in self._config.items())
            self._opened.add_text("config", text, step)
        return self._opened

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in finite_numbers(values).items():
            self._writer(step).add_scalar(name, value, step)

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Add responses as indented text, so that TensorBoard interprets no markup."""
        text = "\n\n".join(
            f"reward {sample['reward']}\n{sample['prompt']}\n-> {''.join(sample['tokens'])}"
            for sample in samples
        )
        indented = "".join(f"    {line}\n" for line in text.splitlines())
        self._writer(step).add_text(f"samples/{of}", indented, step)

    def close(self) -> None:
        if self._opened is not None:
            self._opened.close()


class TrackioWriter:
    """Scalars and responses in a trackio project on this machine.

    `trackio show --project PROJECT` is the live page. A value of a step that an earlier process of
    the run logged, before it was killed, is not logged again.

    Args:
        name: name of the run; a resumed work directory continues the run of this name.
    """

    def __init__(self, project: str, *, name: str, config: Mapping[str, Any]) -> None:
        self._trackio: Any = importlib.import_module("trackio")
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        earlier = storage.get_logs(project, name)
        self._logged = {(row["step"], key) for row in earlier for key in row}
        options: Any = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(io.StringIO()):  # the printed lines are those of the run
            self._run = self._trackio.init(
                project=project, name=name, config=dict(config), resume="allow", **options
            )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        self._log(step, finite_numbers(values))

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        self._log(step, {f"samples/{of}": self._trackio.Table(**_table(step, samples))})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        new = {key: value for key, value in values.items() if (step, key) not in self._logged}
        if new:
            self._run.log(new, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._trackio.finish()  # unlike the run's own method, not repeated at exit


class WandbWriter:
    """Scalars and responses in Weights & Biases.

    Args:
        options: arguments of `wandb.init`. With the same `id`, a run continues.
    """

    def __init__(self, **options: Any) -> None:
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
            return TensorBoardWriter(workdir / "tensorboard", config)
        if kind == "trackio":
            return TrackioWriter(project, name=f"{workdir.name}-{run_id[:8]}", config=config)
        return WandbWriter(**options, config=dict(config))
    except ImportError as error:
        raise ValueError(
            f"log.tracker={kind}: the package {TRACKER_PACKAGES[kind]} cannot be imported "
            f"({error}). Install it with: pip install 'tba_jax[{kind}]', or unset log.tracker"
        ) from error
