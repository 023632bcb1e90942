# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics: trackio, W&B or TensorBoard on request (`log.tracker`).

The progress line is in `progress`, metrics.jsonl in `jsonl`.
"""

import contextlib
import importlib
import io
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from tba_jax.report.jsonl import jsonable

TRACKER_PACKAGES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboardX"}
"""Kind of a tracker, which is also the name of the extra -> its Python package."""
_COLUMNS = ["step", "prompt", "response", "reward"]


class MetricWriter(Protocol):
    """Writer of the metrics of a run."""

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Record `values` (metric name -> number, string or list) of one optimiser step."""
        ...

    def close(self) -> None:
        """Flush and close; a second call does nothing."""
        ...


class MultiWriter:
    """Writer that forwards to several writers; `close` closes all of them even if one raises."""

    def __init__(self, writers: Sequence[MetricWriter]) -> None:
        self._writers = tuple(writers)

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        for writer in self._writers:
            writer.write(step, values)

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Write responses to the trackers.

        Args:
            of: kind of the responses, "train" or "eval".
            samples: records of samples.jsonl.
        """
        for writer in self._writers:
            if isinstance(writer, _Tracker):
                writer.write_samples(step, of, samples)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


def finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    """Return the finite numbers of `values`."""
    numbers = {name: jsonable(value) for name, value in values.items()}
    return {name: float(x) for name, x in numbers.items() if isinstance(x, int | float)}


class _Tracker:
    """Base class of the trackers.

    Args:
        kind: key of `TRACKER_PACKAGES`.

    Raises:
        ValueError: the package of the tracker is not installed.
    """

    def __init__(self, kind: str) -> None:
        package = TRACKER_PACKAGES[kind]
        try:
            self._module: Any = importlib.import_module(package)
        except ImportError as error:
            raise ValueError(
                f"log.tracker={kind}: the package {package} cannot be imported ({error}). Install "
                f"it with: pip install 'tba_jax[{kind}]', or unset log.tracker"
            ) from error

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the finite numbers of `values`."""
        self._log(step, finite_numbers(values))

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log responses as a table."""
        rows = [[step, s["prompt"], "".join(s["tokens"]), s["reward"]] for s in samples]
        self._log(step, {f"samples/{of}": self._module.Table(columns=_COLUMNS, data=rows)})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        raise NotImplementedError


class TensorBoardWriter(_Tracker):
    """Scalars and responses in TensorBoard event files; a resumed run replaces later values."""

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        super().__init__("tensorboard")
        self._folder, self._config = str(folder), config
        self._opened: Any = None

    def _writer(self, step: int) -> Any:
        if self._opened is None:
            self._opened = self._module.SummaryWriter(self._folder, purge_step=step)
            text = "".join(f"    {name} = {value}\n" for name, value in self._config.items())
            self._opened.add_text("config", text, step)
        return self._opened

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        for name, value in values.items():
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


class TrackioWriter(_Tracker):
    """Scalars and responses in a trackio project on this machine.

    `trackio show --project PROJECT` is the live page. A value of a step that an earlier process of
    the run logged, before it was killed, is not logged again.

    Args:
        name: name of the run; a resumed work directory continues the run of this name.
    """

    def __init__(self, project: str, *, name: str, config: Mapping[str, Any]) -> None:
        super().__init__("trackio")
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        earlier = storage.get_logs(project, name)
        self._logged = {(row["step"], key) for row in earlier for key in row}
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(io.StringIO()):  # the printed lines are those of the run
            self._run = self._module.init(
                project=project, name=name, config=dict(config), resume="allow", **options
            )

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        new = {key: value for key, value in values.items() if (step, key) not in self._logged}
        if new:
            self._run.log(new, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._module.finish()  # unlike the run's own method, not repeated at exit


class WandbWriter(_Tracker):
    """Scalars and responses in Weights & Biases.

    Args:
        workdir: folder of W&B's files.
        run_id: W&B run ID, so that a resumed work directory continues its W&B run; "": a new run.
    """

    def __init__(
        self, project: str, *, name: str, workdir: Path, config: Mapping[str, Any], run_id: str = ""
    ) -> None:
        super().__init__("wandb")
        self._run = self._module.init(
            project=project,
            name=name,
            dir=str(workdir),
            config=dict(config),
            id=run_id or None,
            resume="allow",
        )
        # W&B drops values of steps before its newest step; an evaluation may end after later steps.
        self._run.define_metric("*", step_metric="step")

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        self._run.log({**values, "step": step})

    def close(self) -> None:
        self._run.finish()


def make_tracker(
    tracker: str, workdir: Path, config: Mapping[str, Any], run_id: str
) -> MetricWriter:
    """Return the writer for a value of log.tracker that is not empty.

    Args:
        config: field name -> value.
        run_id: ID of the run in config.json; a resumed run continues in the tracker.

    Raises:
        ValueError: the package of the tracker is not installed.
    """
    kind, _, project = tracker.partition(":")
    if kind == "tensorboard":
        return TensorBoardWriter(workdir / "tensorboard", config)
    if kind == "trackio":
        return TrackioWriter(project, name=f"{workdir.name}-{run_id[:8]}", config=config)
    return WandbWriter(project, name=workdir.name, workdir=workdir, config=config, run_id=run_id)
