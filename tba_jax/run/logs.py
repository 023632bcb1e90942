# SPDX-License-Identifier: Apache-2.0
"""Logs: the files that a process of a run writes beside its work, and the display.

A checkpoint says how long its logs were. A resume copies them up to there, and of what was written
after it the lines that stay; the copies take the names of the logs. A process that lost the work
directory and still runs then writes to files without a name. Invariant: a log that is shorter than
its checkpoint says is named, here and in the log itself.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

from tba_jax.devices.cluster import Cluster
from tba_jax.flow.state import PartState
from tba_jax.report.jsonl import JsonlWriter
from tba_jax.report.relay import Display
from tba_jax.report.writers import MultiWriter

Wanted = Callable[[dict[str, Any]], bool]


class Logs:
    """Where a process writes.

    Args:
        metrics: all sinks of metrics, `own` and the display among them.
        progress: the display.
        schedule: the order in which things were done.
        own: metrics.jsonl; None in processes other than 0.
        samples: samples.jsonl; None in processes other than 0.
    """

    def __init__(
        self,
        metrics: MultiWriter,
        progress: Display,
        schedule: JsonlWriter,
        own: JsonlWriter | None,
        samples: JsonlWriter | None,
    ) -> None:
        self.metrics = metrics
        self.progress = progress
        self.schedule = schedule
        self.samples = samples
        self._own = own
        self._saved: dict[str, int] = {}

    def state(self) -> PartState:
        """How long the files are: what was logged before lies below that."""
        return PartState({}, {file.path.name: file.num_bytes() for file in self._files()})

    def restore(self, state: PartState) -> None:
        """Take note of how long they were; `cut_back` compares."""
        self._saved = dict(state.meta)

    def cut_back(self, step: int, is_kept_metric: Wanted, is_kept_event: Wanted) -> None:
        """Drop lines of work that will be done again, and say which lines were lost.

        Args:
            step: of the checkpoint that was restored, 0 without one.
            is_kept_metric: of metrics.jsonl and samples.jsonl.
            is_kept_event: of the schedule log.
        """
        lost = [found for file in self._files() if (found := self._lost(file)) is not None]
        for file in self._files():
            start = self._saved.get(file.path.name, 0)
            if any(one.path == file.path for one in lost):
                start = 0  # what there is may be of any time
            file.keep(is_kept_event if file is self.schedule else is_kept_metric, start)
        for path, then, now in lost:
            self.progress.note(
                f"{path} is not whole: it had {then:,} bytes when checkpoint {step} was written, "
                f"and has {now:,} now. The report lacks what is gone, and --replay_schedule needs "
                "the whole of a schedule log"
            )
            facts = {"log": path.name, "num_bytes": then, "found_bytes": now}
            self.schedule.append({"event": "lost", "step": step, **facts})

    def _lost(self, file: JsonlWriter) -> "_Lost | None":
        then = self._saved.get(file.path.name)
        if then is None or file.has_line_end(then):
            return None
        return _Lost(file.path, then, file.num_bytes())

    def replaced(self) -> list[str]:
        """Names of the logs that another process has replaced by copies."""
        return [file.path.name for file in self._files() if file.is_replaced()]

    def _files(self) -> list[JsonlWriter]:
        return [file for file in (self.schedule, self._own, self.samples) if file is not None]

    def close(self) -> None:
        """Complete the files."""
        self.progress.close()
        self.metrics.close()
        self.schedule.close()
        if self.samples is not None:
            self.samples.close()


class _Lost(NamedTuple):
    """A log that should be longer."""

    path: Path
    then: int
    now: int


def open_logs(
    workdir: Path,
    cluster: Cluster,
    progress: Display,
    extra: list[Any],
    confirm: Callable[[], None] = lambda: None,
) -> Logs:
    """The logs of a process, appended to where they are.

    Args:
        workdir: of the run.
        cluster: its processes; only process 0 writes metrics.jsonl and samples.jsonl.
        progress: the display.
        extra: more metric sinks.
        confirm: raises where this process no longer holds the work directory.
    """
    own = JsonlWriter(workdir / "metrics.jsonl", confirm) if cluster.is_primary else None
    samples = JsonlWriter(workdir / "samples.jsonl", confirm) if cluster.is_primary else None
    sinks = [*([own] if own else []), progress, *extra]
    schedule = JsonlWriter(workdir / schedule_name(cluster.process_id), confirm)
    return Logs(MultiWriter(sinks), progress, schedule, own, samples)


def schedule_name(process_id: int) -> str:
    """File name of a process's schedule log."""
    return "schedule.jsonl" if process_id == 0 else f"schedule.{process_id}.jsonl"
