# SPDX-License-Identifier: Apache-2.0
"""The live page of a run: served on the loopback interface, updated from the run's files.

Invariant: an update reads a bounded number of bytes and draws a bounded number of points, for any
length of the run. The files of the run are only read.
"""

import asyncio
import json
import logging
import os
import secrets
import socket
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import uvicorn

from tba_jax.report import plots, sample_browser
from tba_jax.report.build import draw_own
from tba_jax.report.document import document, escaped
from tba_jax.report.figures import FIGURES
from tba_jax.report.files import Run, assemble
from tba_jax.report.jsonl import parse_line, read_blocks
from tba_jax.report.lines import wrong_metrics
from tba_jax.report.page import headline, render_body, run_name
from tba_jax.report.series import Metrics
from tba_jax.report.words import duration

POINTS = 2000  # number of lines of metrics.jsonl that are kept; the same number of evaluations
_UPDATE_BYTES = 2**26  # bytes of metrics.jsonl per update; a longer log takes several updates
_SCHEDULE_BYTES = 2**22  # bytes of schedule.jsonl that are read, from its end
_PERIOD_S = 5.0
_BUSY_SHARE = 0.01  # maximum share of all cores that updates use while the run trains
_DPI = 110
_PACE_STEPS = 32  # number of last steps whose speed gives the time left
_THEMES = {"light": plots.LIGHT, "dark": plots.DARK}


class SampledLog:
    """Evenly spaced lines of a growing metrics.jsonl, and its evaluations.

    Args:
        path: path of the log, which need not exist yet.
        most: a long log keeps from `most` to 2 * `most` lines, and as many evaluations.
    """

    def __init__(self, path: Path, most: int = POINTS) -> None:
        self._path, self._most = path, most
        self._forget()

    def _forget(self) -> None:
        self._file = (0, 0)
        self._offset, self._number = 0, 0
        self._stride = {False: 1, True: 1}  # key: whether a line has an evaluation
        self._kept: dict[bool, list[tuple[int, dict[str, Any]]]] = {False: [], True: []}

    @property
    def is_behind(self) -> bool:
        """Return whether the log has unread lines."""
        return self._path.exists() and self._path.stat().st_size > self._offset + 2**16

    def update(self, most_bytes: int = _UPDATE_BYTES) -> bool:
        """Read new lines, up to `most_bytes`; return whether there were new lines.

        A log that a resumed run truncated or replaced is read from its beginning.

        Raises:
            ValueError: a line is damaged.
        """
        if not self._path.exists():
            return False
        found = self._path.stat()
        file = found.st_dev, found.st_ino
        is_new = file != self._file or found.st_size < self._offset
        if is_new:
            self._forget()
            self._file = file
        began = self._offset
        for _, lines in read_blocks(self._path, began):
            for line in lines:
                self._number += 1
                self._offset += len(line)
                self._take(line)
            if self._offset - began >= most_bytes:
                break
        return is_new or self._offset > began

    def _take(self, line: bytes) -> None:
        is_evaluation = b'"eval/' in line
        kept = self._kept[is_evaluation]
        if not is_evaluation and self._number % self._stride[False]:
            return
        record = parse_line(f"{self._path}, line {self._number}", line, wrong_metrics)
        kept.append((self._number, record))
        if len(kept) > 2 * self._most:
            self._stride[is_evaluation] *= 2
            # The first and the last evaluation always stay: the page compares them.
            self._kept[is_evaluation] = [kept[0], *kept[2:-1:2], kept[-1]]

    def metrics(self) -> Metrics:
        """Return the kept lines, in the order of the log."""
        lines = sorted(self._kept[False] + self._kept[True], key=lambda pair: pair[0])
        return Metrics(record for _, record in lines)


def _newest_part(path: Path) -> int:
    """Return the byte offset of the first line within the last `_SCHEDULE_BYTES` of a log."""
    if not path.exists() or path.stat().st_size <= _SCHEDULE_BYTES:
        return 0
    with open(path, "rb") as file:
        file.seek(-_SCHEDULE_BYTES, os.SEEK_END)
        file.readline()
        return file.tell()


class LivePage:
    """The current page of a run; `update` renders it again after the files have changed.

    A picture is drawn when a browser requests it; all pictures of the page show the same state of
    the run. After an update or drawing the page pauses in proportion to the processor time that it
    took.

    Args:
        own: names of the user's figures, in the format of the setting `report.figures`.
        work_clock: clock of this process's processor time, in seconds.

    Attributes:
        version: number of the page, from 1; 0 before the first page.
        title: window title.
        body: HTML of the page.
    """

    def __init__(
        self,
        workdir: Path,
        own: str = "",
        *,
        clock: Callable[[], float] = time.monotonic,
        work_clock: Callable[[], float] = time.process_time,
        num_cores: int | None = None,
    ) -> None:
        self._workdir, self._clock, self._work_clock = workdir, clock, work_clock
        self._rest = 1 / (_BUSY_SHARE * (num_cores or len(os.sched_getaffinity(0)))) - 1
        self._log = SampledLog(workdir / "metrics.jsonl")
        self._next_s = 0.0
        self._seen: list[float] = []
        self._fault = ""
        self._run: Run | None = None
        self._shown: Run | None = None  # the run that the pictures show
        self._pictures: dict[tuple[str, str], bytes] = {}
        self._own = [*filter(None, map(str.strip, own.split(",")))]
        self._errors: dict[str, str] = {}  # errors of the user's figures, which are not drawn again
        self._shown_errors = 0
        self._number, self._next_pictures_s = 0, 0.0
        self.version, self.title, self.body = 0, "", ""

    def update(self) -> None:
        """Render the page if an update is due and a file of the run has changed."""
        if self.version and self._clock() < self._next_s:
            return
        began = self._work_clock()
        try:
            has_lines = self._log.update()
            seen = [_changed_s(self._workdir / x) for x in ("report.json", "config.json")]
            if has_lines or seen != self._seen or self._fault or self._run is None:
                start = _newest_part(self._workdir / "schedule.jsonl")
                self._run = assemble(self._workdir, self._log.metrics(), start)
                self._render()
            elif len(self._errors) > self._shown_errors or (
                self._run is not self._shown and self._clock() >= self._next_pictures_s
            ):
                self._render()
            self._seen, self._fault = seen, ""
        except (ValueError, OSError) as error:
            self._show_message(str(error))
        self._next_s = self._clock() + self._pause_s(began)

    def _pause_s(self, began: float) -> float:
        """Return the pause after an update, in seconds.

        Args:
            began: time of the work clock at the start of the update.
        """
        is_over = self._run is not None and self._run.is_finished
        rest = 0.0 if is_over else self._rest * (self._work_clock() - began)
        return max(_PERIOD_S, rest)

    def _render(self) -> None:
        run = self._run
        assert run is not None
        if self._clock() >= self._next_pictures_s or run.is_finished:
            self._shown, self._number = run, self._number + 1
            self._pictures.clear()
            self._next_pictures_s = self._clock() + _PERIOD_S
        self.title = f"{headline(run)} · {run_name(run)}"
        names = [x.name for x in FIGURES if x.name != "timeline" or run.busy_shares]
        own = {
            name.rpartition(":")[2]: self._errors.get(f"own{i}") or self._addresses(f"own{i}")
            for i, name in enumerate(self._own)
        }
        self._shown_errors = len(self._errors)
        self.body = _status(run, is_behind=self._log.is_behind) + render_body(
            run, {name: self._addresses(name) for name in names}, own, is_live=True
        )
        self.version += 1

    def _addresses(self, name: str) -> tuple[str, str]:
        return f"{self._number}/light/{name}", f"{self._number}/dark/{name}"

    def picture(self, theme: str, name: str) -> bytes:
        """Return the newest picture of a figure; empty if there is nothing to draw.

        Args:
            theme: light or dark.
            name: name of a figure; own0, own1, ... for the user's figures.
        """
        draw = {figure.name: figure.draw for figure in FIGURES}.get(name)
        own = {f"own{i}": x for i, x in enumerate(self._own)}.get(name, "")
        if not (draw or own) or theme not in _THEMES or self._shown is None:
            return b""
        if (theme, name) not in self._pictures and name not in self._errors:
            began = self._work_clock()
            if draw:
                figure = draw(self._shown, _THEMES[theme])
                self._pictures[theme, name] = plots.to_png(figure, _DPI) if figure else b""
            else:
                [drawn] = draw_own(self._shown, own, _DPI).values()
                if isinstance(drawn, str):
                    self._errors[name] = drawn
                else:
                    self._pictures["light", name], self._pictures["dark", name] = drawn
            if not self._shown.is_finished:
                self._next_pictures_s += self._rest * (self._work_clock() - began)
        return self._pictures.get((theme, name), b"")

    def _show_message(self, fault: str) -> None:
        """Show a message above the page, which stays unchanged."""
        if fault == self._fault and self.version:
            return
        self._fault = fault
        rest = self.body[self.body.find("<header") :] if "<header" in self.body else ""
        self.body = f'<p class="notice" role="alert">{escaped(fault)}</p>{rest}'
        self.version += 1


def _changed_s(path: Path) -> float:
    return path.stat().st_mtime if path.exists() else 0.0


def _status(run: Run, *, is_behind: bool) -> str:
    steps = f"step {run.last_step} of {run.num_steps}" if run.num_steps else "no step yet"
    state = "finished" if run.is_finished else "in progress"
    made, times = (x[-_PACE_STEPS:] for x in run.metrics.column("step", "time_s"))
    if not run.is_finished and len(made) > 1 and made[-1] > made[0]:
        pace_s = (times[-1] - times[0]) / (made[-1] - made[0])
        steps += f", {duration(pace_s * (run.num_steps - made[-1]))} left"
    more = ". The log is still being read, from older to newer lines" if is_behind else ""
    written_s = _changed_s(run.workdir / "metrics.jsonl")
    written = time.strftime("%H:%M:%S", time.localtime(written_s)) if written_s else "never"
    return (
        f'<p class="eyebrow" id="live" role="status">{state}: {steps}, last written {written}'
        f"{more}</p>"
    )


_SCRIPT = """
let version = %d;
// A picture stays until its successor has loaded, and a figure without data disappears.
function keep(old, figure) {
  const fresh = figure.querySelector('picture'), [source, image] = old ? old.children : [];
  if (!old || (image.complete && !image.naturalWidth)) return;
  if (source.srcset !== fresh.children[0].srcset) {
    source.srcset = fresh.children[0].srcset;
    image.setAttribute('src', fresh.children[1].getAttribute('src'));
  }
  fresh.replaceWith(old);
}
addEventListener('error', event => {
  if (event.target.tagName === 'IMG') event.target.closest('figure').hidden = true;
}, true);
async function follow() {
  try {
    const answer = await fetch('body?' + version, {cache: 'no-store'});
    if (answer.status === 200) {
      const page = await answer.json();
      const main = document.querySelector('main');
      const folded = () => [...main.querySelectorAll('details')].filter(
        item => !item.closest('#browser'));
      const open = folded().map(item => item.open);
      const browser = main.querySelector('#browser'), focus = document.activeElement;
      const drawn = Object.fromEntries([...main.querySelectorAll('figure')].map(
        item => [item.className, item.querySelector('picture')]));
      version = page.version; document.title = page.title; main.innerHTML = page.body;
      main.querySelectorAll('figure').forEach(item => keep(drawn[item.className], item));
      folded().forEach((item, i) => { item.open = !!open[i]; });
      if (browser) main.querySelector('#browser')?.replaceWith(browser);
      focus.focus();
      browse();
    }
  } catch (error) {
    document.getElementById('live').textContent = 'The server of this page has stopped.';
  }
  setTimeout(follow, 2000);
}
setTimeout(follow, 2000);
"""


# Pictures that have not loaded get room, so that only pictures in view are requested.
_STYLE = "figure:not([hidden]) img { min-height: 12rem; }"


class LiveServer:
    """HTTP server of a live page, on the loopback interface only.

    The address has a random part, so that other users of the machine and pages of other sites
    cannot read the run.

    Args:
        port: port to listen on; 0: any free port.

    Raises:
        ValueError: the port is in use or not permitted.
    """

    def __init__(self, page: LivePage, port: int = 0) -> None:
        self._page = page
        self._lock = asyncio.Lock()
        self._path = f"/{secrets.token_urlsafe(16)}/"
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            self._socket.bind(("127.0.0.1", port))
            # A browser that opens the address before `run` waits instead of being refused.
            self._socket.listen()
        except (OSError, OverflowError) as error:
            self._socket.close()
            raise ValueError(
                f"--live={port}: cannot listen on 127.0.0.1:{port} ({error}). Set another port, "
                "or --live without a port for any free one"
            ) from error
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(
            uvicorn.Config(
                self._respond,
                interface="asgi3",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_graceful_shutdown=1,
            )
        )

    @property
    def address(self) -> str:
        """Return the URL of the page."""
        return f"http://127.0.0.1:{self._socket.getsockname()[1]}{self._path}"

    def run(self) -> None:
        """Serve until Ctrl-C or `stop`."""
        self._server.run(sockets=[self._socket])

    def stop(self) -> None:
        """Stop `run`; may be called from another thread."""
        self._server.should_exit = True

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Answer one request, as an ASGI application."""
        del receive
        if scope["type"] != "http":
            return
        status, kind, content = await self._content(scope)
        headers = [
            (b"content-type", kind if kind == b"image/png" else kind + b"; charset=utf-8"),
            (b"content-length", str(len(content)).encode()),
            (b"cache-control", b"no-store" if kind != b"image/png" else b"max-age=3600"),
            (b"x-content-type-options", b"nosniff"),
            (b"referrer-policy", b"no-referrer"),
        ]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": content})

    async def _content(self, scope: Any) -> tuple[int, bytes, bytes]:
        path = scope["path"]
        is_known = secrets.compare_digest(path[: len(self._path)].encode(), self._path.encode())
        name = path[len(self._path) :]
        _, _, picture = name.partition("/")
        if scope["method"] != "GET" or not is_known or (name not in ("", "body") and not picture):
            return 404, b"text/plain", b"page not found"
        async with self._lock:
            if picture:
                theme, _, figure = picture.partition("/")
                png = await asyncio.to_thread(self._page.picture, theme, figure)
                return (200, b"image/png", png) if png else (404, b"text/plain", b"no such picture")
            await asyncio.to_thread(self._page.update)
        page = self._page
        if name == "":
            script = sample_browser.SCRIPT + _SCRIPT % page.version
            whole = document(
                page.title or "live",
                "live",
                page.body,
                sample_browser.STYLE + _STYLE,
                script,
                fetches=True,
            )
            return 200, b"text/html", whole.encode()
        if scope["query_string"] == str(page.version).encode():
            return 204, b"application/json", b""
        content = {"version": page.version, "title": page.title, "body": page.body}
        return 200, b"application/json", json.dumps(content).encode()
