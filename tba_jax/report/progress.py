# SPDX-License-Identifier: Apache-2.0
"""Progress of a run: one line redrawn in place on a terminal, otherwise a line at intervals."""

import collections
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from tba_jax.report.words import format_count, format_duration, format_metric, metric_label
from tba_jax.report.writers import finite_numbers

_PLAIN_PERIOD_S = 10.0  # least time between two plain lines
_SHOWN_SHARE = 0.05  # smaller shares are not shown
_PART = "search/reward_part_"


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
        self._printed = (-_PLAIN_PERIOD_S, -1)  # time and step of the newest plain line
        self._is_closed = False
        self._live: Live | None = None
        if self._console.is_terminal and not self._console.is_dumb_terminal:
            self._live = Live(
                get_renderable=self._shown, console=self._console, refresh_per_second=4
            )
            self._live.start()

    def write(self, step: int, values: Mapping[str, Any]) -> None:
        """Store the newest values; the next refresh shows them."""
        with self._lock:
            self._take(values)
            is_first = not self._marks
            if step > self._step:
                self._step, self._phase = step, ""
                self._marks.append((self._clock(), step))
            is_due = self._clock() - self._printed[0] >= _PLAIN_PERIOD_S or (
                f"eval/{self._metric}" in values or (is_first and bool(self._marks))
            )
            if self._live is None and is_due:
                self._print_line()

    def resume(self, records: Iterable[Mapping[str, Any]]) -> None:
        """Continue the values and the elapsed time of a run from the lines of its metrics.jsonl."""
        with self._lock:
            for record in records:
                self._take(record)
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
            if self._is_closed:
                return
            self._is_closed = True
        if self._live is not None:
            self._live.stop()
        elif self._marks and self._printed[1] != self._step:
            self._print_line()

    def _take(self, values: Mapping[str, Any]) -> None:
        self._last.update(finite_numbers(values))
        if self._first_eval is None:
            self._first_eval = self._last.get(f"eval/{self._metric}")

    def _print(self, text: str) -> None:
        self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def _print_line(self) -> None:
        self._printed = self._clock(), self._step
        self._print(self._line())

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

    def _line(self) -> str:
        step = f"{self._step:>{len(str(self._num_steps))}}/{self._num_steps}"
        return f"[{self._elapsed()}] " + "  ".join([f"step {step}{self._left()}", *self._fields()])

    def _fields(self) -> list[str]:
        """Return the known quantities as text."""
        last, fields = self._last, list[str]()

        def add(form: str, *names: str, details: str = "") -> None:
            """Add the first known of the named metrics."""
            if found := [last[name] for name in names if name in last]:
                fields.append(form.format(found[0]) + details)

        if self._first_eval is not None:
            ends = [self._first_eval, last[f"eval/{self._metric}"]]
            texts = dict.fromkeys(format_metric(self._metric, x) for x in ends)
            lost = last.get("eval/num_failed", 0)
            detail = f" ({lost:.0f} responses without reward)" if lost else ""
            fields.append(f"held-out {metric_label(self._metric)} {' -> '.join(texts)}{detail}")
        parts = [f"{x.removeprefix(_PART)} {last[x]:.3f}" for x in last if x.startswith(_PART)]
        detail = f" ({', '.join(parts)})" if parts else ""
        add("reward {:.3f}", "search/reward_mean", "train/reward_mean", details=detail)
        if self._kind:
            add(self._kind + " answers {:.0%}", "search/kind_share", "eval/kind_share")
        cut = last.get("search/cut_share", 0.0)
        detail = f" ({cut:.0%} cut)" if cut >= _SHOWN_SHARE else ""
        names = [f"{of}/response_length_mean" for of in ("search", "eval")]
        add("length {:.1f} tokens", *names, details=detail)
        if last.get("search/equal_rewards_share", 0.0) >= _SHOWN_SHARE:
            add("groups with equal rewards {:.0%}", "search/equal_rewards_share")
        add("KL {:.3g}", "train/kl_reference")
        oldest = last.get("buffer/staleness_max")
        detail = "" if oldest is None else f" (max {oldest:.0f})"
        add("staleness {:.1f}", "buffer/staleness_mean", details=detail)
        for label, name in (("decoded", "search/tokens_per_s"), ("trained", "train/tokens_per_s")):
            if name in last:
                fields.append(f"{label} {format_count(last[name])} tok/s")
        if "fleet/searchers" in last:
            there, slots, hosts = (last[f"fleet/{x}"] for x in ("searchers", "slots", "hosts"))
            fields.append(f"searchers {there:.0f}/{slots:.0f} on {hosts:.0f} hosts")
        return fields

    def _shown(self) -> Any:
        """Return the line on a terminal, cut at the width of the terminal."""
        from rich.text import Text

        with self._lock:
            text = f"[{self._elapsed()}] {self._phase}" if self._phase else self._line()
        return Text(text, no_wrap=True, overflow="ellipsis")
