# SPDX-License-Identifier: Apache-2.0
"""Writers of metrics: the progress display, and trackio, W&B or TensorBoard on request.

All sinks implement `MetricWriter`.

Invariant: every writer is closed, even if closing another one failed.
"""

import collections
import contextlib
import importlib
import io
import math
import os
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import ModuleType
from typing import Any, Protocol

from tba_jax.report.jsonl import jsonable
from tba_jax.report.words import format_count, format_duration, format_metric, metric_label

_PLAIN_PERIOD_S = 10.0  # least time between two plain lines
_SHOWN_SHARE = 0.05  # smaller shares are not shown


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
            if isinstance(writer, TensorBoardWriter | TrackioWriter | WandbWriter):
                writer.write_samples(step, of, samples)

    def close(self) -> None:
        with contextlib.ExitStack() as stack:
            for writer in self._writers:
                stack.callback(writer.close)


TRACKER_PACKAGES = {"trackio": "trackio", "wandb": "wandb", "tensorboard": "tensorboardX"}
"""Kind of a tracker, which is also the name of the extra -> its Python package."""


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


def _package(kind: str) -> ModuleType:
    try:
        return importlib.import_module(TRACKER_PACKAGES[kind])
    except ImportError as error:
        raise ValueError(
            f"log.tracker={kind}: the package {TRACKER_PACKAGES[kind]} cannot be imported "
            f"({error}). Install it with: pip install 'tba_jax[{kind}]', or unset log.tracker"
        ) from error


def _finite_numbers(values: Mapping[str, Any]) -> dict[str, float]:
    numbers = {}
    for name, value in values.items():
        value = jsonable(value)
        if isinstance(value, int | float):
            numbers[name] = float(value)
    return numbers


class TensorBoardWriter:
    """Scalars and responses in TensorBoard event files (extra `tensorboard`).

    A resumed run replaces the values from its first step on.

    Raises:
        ValueError: tensorboardX is not installed.
    """

    def __init__(self, folder: str | os.PathLike[str], config: Mapping[str, Any]) -> None:
        self._module = _package("tensorboard")
        self._folder, self._config = str(folder), config
        self._opened: Any = None

    def _writer(self, step: int) -> Any:
        if self._opened is None:
            self._opened = self._module.SummaryWriter(self._folder, purge_step=step)
            text = "".join(f"    {name} = {value}\n" for name, value in self._config.items())
            self._opened.add_text("config", text, step)
        return self._opened

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Add the finite numbers of `values`."""
        for name, value in _finite_numbers(values).items():
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
        """Flush and close the event file."""
        if self._opened is not None:
            self._opened.close()


class TrackioWriter:
    """Scalars and responses in a trackio project on this machine (extra `trackio`).

    `trackio show --project PROJECT` is the live page. Invariant: a value of a step that an earlier
    process of the run logged, before it was killed, is not logged again.

    Args:
        name: name of the run; a resumed work directory continues the run of this name.

    Raises:
        ValueError: trackio is not installed.
    """

    def __init__(self, project: str, *, name: str, config: Mapping[str, Any]) -> None:
        self._module = _package("trackio")
        storage = importlib.import_module("trackio.sqlite_storage").SQLiteStorage
        earlier = storage.get_logs(project, name)
        self._logged = {(row["step"], key) for row in earlier for key in row}
        options = {"embed": False, "auto_log_gpu": False, "auto_log_cpu": False}
        with contextlib.redirect_stdout(io.StringIO()):  # the printed lines are those of the run
            self._run = self._module.init(
                project=project, name=name, config=dict(config), resume="allow", **options
            )

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the finite numbers of `values` that the step has not logged yet."""
        self._log(step, _finite_numbers(values))

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log responses as a table."""
        self._log(step, {f"samples/{of}": _table(self._module, step, samples)})

    def _log(self, step: int, values: Mapping[str, Any]) -> None:
        new = {key: value for key, value in values.items() if (step, key) not in self._logged}
        if new:
            self._run.log(new, step=step)

    def close(self) -> None:
        with contextlib.redirect_stdout(io.StringIO()):
            self._module.finish()  # unlike the run's own method, not repeated at exit


def _table(module: ModuleType, step: int, samples: Sequence[Mapping[str, Any]]) -> Any:
    """Return a table of responses for W&B or trackio."""
    columns = ["step", "prompt", "response", "reward"]
    rows = [[step, s["prompt"], "".join(s["tokens"]), s["reward"]] for s in samples]
    return module.Table(columns=columns, data=rows)


class WandbWriter:
    """Scalars and responses in Weights & Biases (extra `wandb`).

    Args:
        workdir: folder of W&B's files.
        run_id: W&B run ID, so that a resumed work directory continues its W&B run; "": a new run.

    Raises:
        ValueError: wandb is not installed.
    """

    def __init__(
        self,
        project: str,
        *,
        name: str,
        workdir: str | os.PathLike[str],
        config: Mapping[str, Any],
        run_id: str = "",
    ) -> None:
        self._module = _package("wandb")
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

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Log the finite numbers of `values`."""
        self._run.log({**_finite_numbers(values), "step": step})

    def write_samples(self, step: int, of: str, samples: Sequence[Mapping[str, Any]]) -> None:
        """Log responses as a table."""
        self._run.log({f"samples/{of}": _table(self._module, step, samples), "step": step})

    def close(self) -> None:
        self._run.finish()


class ProgressDisplay:
    """Progress of a run: one line redrawn in place on a terminal, otherwise a line at intervals.

    Without a terminal, the first step, evaluations, phases and notes are printed at once.

    Args:
        num_steps: steps of the whole run.
        kind: name of the response kind that `*/kind_share` counts, such as "worked".
        metric: headline metric of evaluations.
        console: a rich Console; None: standard output.
        clock: function that returns the time in seconds.
        start_s: value of `clock` at which the run began; None: now.
    """

    def __init__(
        self,
        num_steps: int,
        *,
        kind: str = "",
        metric: str = "pass_at_1",
        console: Any = None,
        clock: Callable[[], float] = time.perf_counter,
        start_s: float | None = None,
    ) -> None:
        from rich.console import Console
        from rich.live import Live

        self._num_steps, self._kind, self._metric = num_steps, kind, metric
        self._console = console if console is not None else Console(highlight=False)
        self._clock = clock
        self._lock = threading.RLock()
        self._start = clock() if start_s is None else start_s
        self._phase = ""
        self._step = 0
        self._marks: collections.deque[tuple[float, int]] = collections.deque(maxlen=32)
        self._first_eval: float | None = None
        self._last: dict[str, float] = {}
        self._printed_at, self._printed_step = -math.inf, -1
        self._closed = False
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._shown, console=self._console, refresh_per_second=4
            )
            self._live.start()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Store the newest values; the next refresh shows them."""
        numbers = _finite_numbers(values)
        with self._lock:
            self._take(numbers)
            is_first = not self._marks
            if step > self._step:
                self._step = step
                self._marks.append((self._clock(), step))
                self._phase = ""
            due = self._clock() - self._printed_at >= _PLAIN_PERIOD_S
            due = due or f"eval/{self._metric}" in numbers or (is_first and bool(self._marks))
            if self._live is None and due:
                self._print_line()

    def resume(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Continue the values and the elapsed time of a run from the lines of its metrics.jsonl."""
        with self._lock:
            for record in records:
                self._take(_finite_numbers(record))
                self._step = max(self._step, record.get("step", 0))
            self._start = self._clock() - self._last.get("time_s", 0.0)

    def phase(self, text: str) -> None:
        """Show an activity during which no steps are made, such as "compiling"."""
        with self._lock:
            if self._live is None and text and text != self._phase:
                self._print(f"[{self._elapsed()}] {text}")
            self._phase = text

    def note(self, text: str) -> None:
        """Print one permanent line."""
        with self._lock:
            self._print(f"[{self._elapsed()}] {text}")

    def close(self) -> None:
        """Show the final state and release the terminal."""
        with self._lock:
            if self._closed:
                return
            self._closed = True
        if self._live is not None:
            self._live.stop()
        elif self._marks and self._printed_step != self._step:
            self._print_line()

    def _take(self, numbers: Mapping[str, float]) -> None:
        self._last.update(numbers)
        if self._first_eval is None:
            self._first_eval = numbers.get(f"eval/{self._metric}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _elapsed(self) -> str:
        return format_duration(self._clock() - self._start)

    def _left(self) -> str:
        """Return the time until the last step at the recent rate; "" before two steps."""
        if len(self._marks) < 2 or self._step >= self._num_steps:
            return ""
        (first_time, first_step), (last_time, last_step) = self._marks[0], self._marks[-1]
        pace = (last_time - first_time) / (last_step - first_step)
        seconds = (self._num_steps - last_step) * pace - (self._clock() - last_time)
        return format_duration(seconds)

    def _headline(self) -> str:
        last = self._last.get(f"eval/{self._metric}")
        if last is None or self._first_eval is None:
            return ""
        texts = [format_metric(self._metric, value) for value in (self._first_eval, last)]
        return " -> ".join(dict.fromkeys(texts))

    def _field(self, name: str, form: Callable[[float], str]) -> str:
        return form(self._last[name]) if name in self._last else ""

    def _fields(self) -> dict[str, str]:
        """Return label -> text of every known quantity."""
        stale = self._field("buffer/staleness_mean", "{:.1f}".format)
        if stale and "buffer/staleness_max" in self._last:
            stale += f" (max {self._last['buffer/staleness_max']:.0f})"
        share = "search/kind_share" if "search/kind_share" in self._last else "eval/kind_share"
        length = "search/response_length_mean"
        if length not in self._last:
            length = "eval/response_length_mean"
        cut = self._last.get("search/cut_share", 0.0)
        reward = "search/reward_mean" if "search/reward_mean" in self._last else "train/reward_mean"
        fields = {
            f"held-out {metric_label(self._metric)}": self._headline(),
            "reward": self._field(reward, "{:.3f}".format) + self._parts(),
            f"{self._kind} answers": self._field(share, "{:.0%}".format) if self._kind else "",
            "length": self._field(length, "{:.1f} tokens".format)
            + (f" ({cut:.0%} cut)" if cut >= _SHOWN_SHARE else ""),
            "groups with equal rewards": self._shown_share("search/equal_rewards_share"),
            "KL": self._field("train/kl_reference", "{:.3g}".format),
            "staleness": stale,
            "decoded": self._field("search/tokens_per_s", lambda x: format_count(x) + " tok/s"),
            "trained": self._field("train/tokens_per_s", lambda x: format_count(x) + " tok/s"),
            "searchers": self._searchers(),
        }
        return {label: text for label, text in fields.items() if text}

    def _parts(self) -> str:
        """Return the means of several rewards by name, in brackets."""
        prefix = "search/reward_part_"
        parts = [
            f"{name.removeprefix(prefix)} {value:.3f}"
            for name, value in self._last.items()
            if name.startswith(prefix)
        ]
        return f" ({', '.join(parts)})" if parts else ""

    def _shown_share(self, name: str) -> str:
        """Return the text of a share; "" for a small share."""
        share = self._last.get(name, 0.0)
        return f"{share:.0%}" if share >= _SHOWN_SHARE else ""

    def _searchers(self) -> str:
        """Return the numbers of connected searchers and of hosts; "" without a fleet."""
        if "fleet/searchers" not in self._last:
            return ""
        there, slots, hosts = (
            self._last[f"fleet/{name}"] for name in ("searchers", "slots", "hosts")
        )
        return f"{there:.0f}/{slots:.0f} on {hosts:.0f} host{'' if hosts == 1 else 's'}"

    def _line(self) -> str:
        left = self._left()
        step = f"{self._step:>{len(str(self._num_steps))}}/{self._num_steps}"
        parts = [f"step {step}" + (f", {left} left" if left else "")]
        parts += [f"{label} {text}" for label, text in self._fields().items()]
        return f"[{self._elapsed()}] " + "  ".join(parts)

    def _print_line(self) -> None:
        self._printed_at, self._printed_step = self._clock(), self._step
        self._print(self._line())

    def _shown(self) -> Any:
        """Return the line on a terminal, cut at the width of the terminal."""
        from rich.text import Text

        with self._lock:
            text = f"[{self._elapsed()}] {self._phase}" if self._phase else self._line()
        return Text(text, no_wrap=True, overflow="ellipsis")
