# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: one line redrawn in place on a terminal, otherwise a line at intervals."""

import collections
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tba_jax.report.words import format_count, format_duration, format_metric, metric_label
from tba_jax.report.writers import finite_numbers

_PLAIN_PERIOD_S = 10.0  # least time between two plain lines
_SHOWN_SHARE = 0.05  # smaller shares are not shown
_PART = "search/reward_part_"
# (label, metrics of which the first known one is shown, format)
_FIELDS: tuple[tuple[str, tuple[str, ...], Any], ...] = (
    ("reward", ("search/reward_mean", "train/reward_mean"), "{:.3f}".format),
    ("KIND answers", ("search/kind_share", "eval/kind_share"), "{:.0%}".format),
    (
        "length",
        ("search/response_length_mean", "eval/response_length_mean"),
        "{:.1f} tokens".format,
    ),
    ("groups with equal rewards", ("search/equal_rewards_share",), "{:.0%}".format),
    ("KL", ("train/kl_reference",), "{:.3g}".format),
    ("staleness", ("buffer/staleness_mean",), "{:.1f}".format),
    ("decoded", ("search/tokens_per_s",), lambda x: f"{format_count(x)} tok/s"),
    ("trained", ("train/tokens_per_s",), lambda x: f"{format_count(x)} tok/s"),
)


class ProgressDisplay:
    """Progress display of a run.

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
        self._clock, self._lock = clock, threading.RLock()
        self._start = clock() if start_s is None else start_s
        self._phase, self._step = "", 0
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
        numbers = finite_numbers(values)
        with self._lock:
            self._take(numbers)
            is_first = not self._marks
            if step > self._step:
                self._step, self._phase = step, ""
                self._marks.append((self._clock(), step))
            due = self._clock() - self._printed_at >= _PLAIN_PERIOD_S
            due = due or f"eval/{self._metric}" in numbers or (is_first and bool(self._marks))
            if self._live is None and due:
                self._print_line()

    def resume(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Continue the values and the elapsed time of a run from the lines of its metrics.jsonl."""
        with self._lock:
            for record in records:
                self._take(finite_numbers(record))
                self._step = max(self._step, record.get("step", 0))
            self._start = self._clock() - self._last.get("time_s", 0.0)

    def phase(self, text: str) -> None:
        """Show an activity during which no steps are made, such as "compiling"."""
        with self._lock:
            if self._live is None and text and text != self._phase:
                self.note(text)
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
        return f", {format_duration(seconds)} left"

    def _fields(self) -> dict[str, str]:
        """Return label -> text of every known quantity."""
        last, fields = self._last, dict[str, str]()
        now = last.get(f"eval/{self._metric}")
        if now is not None and self._first_eval is not None:
            ends = [format_metric(self._metric, x) for x in (self._first_eval, now)]
            fields[f"held-out {metric_label(self._metric)}"] = " -> ".join(dict.fromkeys(ends))
        for label, names, form in _FIELDS:
            value = next((last[name] for name in names if name in last), None)
            if value is not None:
                fields[label] = form(value)
        if parts := [
            f"{name.removeprefix(_PART)} {value:.3f}"
            for name, value in last.items()
            if name.startswith(_PART) and "reward" in fields
        ]:
            fields["reward"] += f" ({', '.join(parts)})"
        if (cut := last.get("search/cut_share", 0.0)) >= _SHOWN_SHARE and "length" in fields:
            fields["length"] += f" ({cut:.0%} cut)"
        if last.get("search/equal_rewards_share", 0.0) < _SHOWN_SHARE:
            fields.pop("groups with equal rewards", None)
        if "buffer/staleness_max" in last and "staleness" in fields:
            fields["staleness"] += f" (max {last['buffer/staleness_max']:.0f})"
        if "fleet/searchers" in last:
            there, slots, hosts = (
                last[f"fleet/{name}"] for name in ("searchers", "slots", "hosts")
            )
            plural = "" if hosts == 1 else "s"
            fields["searchers"] = f"{there:.0f}/{slots:.0f} on {hosts:.0f} host{plural}"
        if not self._kind:
            fields.pop("KIND answers", None)
        return fields

    def _line(self) -> str:
        step = f"{self._step:>{len(str(self._num_steps))}}/{self._num_steps}"
        fields = [f"{k.replace('KIND', self._kind)} {v}" for k, v in self._fields().items()]
        return f"[{self._elapsed()}] " + "  ".join([f"step {step}{self._left()}", *fields])

    def _print_line(self) -> None:
        self._printed_at, self._printed_step = self._clock(), self._step
        self._print(self._line())

    def _shown(self) -> Any:
        """Return the line on a terminal, cut at the width of the terminal."""
        from rich.text import Text

        with self._lock:
            text = f"[{self._elapsed()}] {self._phase}" if self._phase else self._line()
        return Text(text, no_wrap=True, overflow="ellipsis")
