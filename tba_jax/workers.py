# SPDX-License-Identifier: Apache-2.0
"""Processes that run users' code: reward functions and environments.

A worker is a process with a private socket, a log file and a process group, which is killed with
it. Jobs (calls of rewards, episodes of environments) share the workers of a pool. Workers import
neither jax nor transformers. This is no sandbox: a child process can leave the process group.

Deadline: a message is late when its worker has been free for `timeout_s` without answering it.
A worker is free for a message when the message is sent, and when the worker answers another job.
A coroutine that waits for ever keeps its worker free; it is late after `MOST_DEADLINES` deadlines.

Invariant: every message gets an answer or a named failure. A late message ends its worker, and
costs the jobs of that worker and nothing else.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import itertools
import json
import os
import pickle
import resource
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Sequence
from concurrent.futures import Future, wait
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
"""Seconds for the start of a worker and the import of the user's module, on a busy machine."""
MOST_DEADLINES = 10
"""Number of deadlines after which a coroutine that waits for ever is late."""
MAX_MEMORY_BYTES = 16 * 2**30
"""Limit of the memory that a worker allocates."""
_START = "its start, with the import of the user's module (move slow work into the function),"
_STARTED = 0  # number of the answer that says that the worker has started; jobs begin at 1
# Program of a worker. It finds modules where this process finds them.
_PROGRAM = "import json, sys; sys.path[:], *job = json.loads(sys.argv[1]); "
_PROGRAM += "from tba_jax.workers import serve; serve(*job)"

Reply = Callable[[Any], Awaitable[Any]]
"""`await reply(answer)` answers the newest message of a job, and returns the next one."""
Handler = Callable[[Any, Reply], Coroutine[Any, Any, Any]]
"""A job: coroutine function (first message, reply) -> last answer. Answers are written as JSON."""


class WorkerFailed(Exception):
    """A message got no answer.

    Attributes:
        name: "timeout", "crash" (the process ended), "lost" (another job ended the worker), "start"
            (the process did not start) or "closed".
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


def serve(module: str, make: str, arguments: Sequence[Any]) -> None:
    """Run the jobs of the parent, the peer of standard input; `make` returns the handler."""
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    with contextlib.suppress(ValueError):  # the user's own limit is lower
        own = resource.getrlimit(resource.RLIMIT_DATA)[1]
        resource.setrlimit(resource.RLIMIT_DATA, (MAX_MEMORY_BYTES, own))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    jobs: dict[int, tuple[asyncio.Queue[Any], asyncio.Task[None]]] = {}

    def send(number: int, answer: Any) -> None:
        connection.sendall(json.dumps([number, answer]).encode() + b"\n")

    async def run(number: int, messages: asyncio.Queue[Any]) -> None:
        async def reply(answer: Any) -> Any:
            send(number, answer)
            return await messages.get()

        try:
            send(number, await handler(await messages.get(), reply))
        finally:
            del jobs[number]

    def receive(number: int, *message: Any) -> None:
        if message and number not in jobs:
            messages: asyncio.Queue[Any] = asyncio.Queue()
            jobs[number] = messages, loop.create_task(run(number, messages))
        if message:
            jobs[number][0].put_nowait(*message)
        elif number in jobs:  # the parent has closed the job
            jobs[number][1].cancel()

    def read() -> None:  # a thread, which notices the end of the parent even during a user's call
        try:
            with connection.makefile("rb") as requests:
                while True:
                    loop.call_soon_threadsafe(receive, *pickle.load(requests))
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    handler: Handler = getattr(importlib.import_module(module), make)(*arguments)
    send(_STARTED, None)
    while True:
        # Users' code may raise SystemExit or KeyboardInterrupt, which stop a loop.
        with contextlib.suppress(BaseException):
            loop.run_forever()


class _Worker:
    """A process with its jobs; only the pools' loop uses it.

    Attributes:
        number: the smallest that no other worker of the pool has.
        jobs: numbers of the jobs.
        started: done when the process takes messages, or has failed.
        answers: futures of the messages without an answer by job, oldest message first.
        free_s: time of the newest answer.
        failure: name and text of the failure that ended the worker, and the job that caused it.
    """

    def __init__(self, pool: "WorkerPool") -> None:
        self._pool, self.jobs, self.free_s = pool, set[int](), 0.0
        self.number = min({*range(len(pool.workers) + 1)} - {w.number for w in pool.workers})
        self.started = asyncio.Future[None]()
        self.answers = {_STARTED: self.started}
        self.failure: tuple[str, str, int] | None = None
        self._writer: asyncio.StreamWriter | None = None
        name = f"{pool.kind}-{socket.gethostname()}-{os.getpid()}-{self.number}.log"
        self._log = pool.logs and pool.logs / name
        if self._log:
            self._log.parent.mkdir(parents=True, exist_ok=True)
        ours, theirs = socket.socketpair()
        # The working directory is last: a user's file must not hide a module of the library.
        paths = [*sys.path, os.getcwd()]
        job = json.dumps([paths, pool.make.__module__, pool.make.__name__, pool.arguments])
        command, stdin = [sys.executable, "-P", "-c", _PROGRAM, job], theirs.fileno()
        with theirs, open(self._log, "ab") if self._log else contextlib.nullcontext() as log:
            streams: Any = {"stdin": stdin, "stdout": log, "stderr": log}
            self.process = subprocess.Popen(command, process_group=0, **streams)
        loop = asyncio.get_running_loop()
        self._reading = loop.create_task(self._read(ours))
        late = f"{_START} took longer than {START_TIMEOUT_S:g} s"
        loop.call_later(START_TIMEOUT_S, lambda: self.started.done() or self.end("timeout", late))

    async def _read(self, ours: socket.socket) -> None:
        """Receive answers until the process ends."""
        with contextlib.suppress(OSError):  # the worker was ended
            reader, self._writer = await asyncio.open_connection(sock=ours, limit=2**40)
            while (line := await reader.readline()).endswith(b"\n"):
                number, answer = json.loads(line)
                self.free_s = time.monotonic()
                if number in self.answers:
                    self.answers.pop(number).set_result(answer)
            self._writer.close()
        self.end("crash", "its process ended")

    def send(self, *message: Any) -> None:
        """Send the number of a job and a message to it; the number alone closes the job."""
        if self._writer and not self.failure:
            self._writer.write(pickle.dumps(message))

    def end(self, name: str, text: str, cause: int | None = None) -> None:
        """Kill the process and its group, unless the worker has ended.

        Args:
            cause: number of the job that failed; None: the job with the oldest message.
        """
        if self.failure:
            return
        self._pool.workers.remove(self)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        if name == "crash":
            text += f" (exit code {self.process.returncode}); see {self._log or 'standard error'}"
        if not self.started.done() and name != "closed":
            name = "start"
        self.failure = name, text, cause or next(iter(self.answers), _STARTED)
        while self.answers:
            self.answers.popitem()[1].cancel()
        if self._writer:
            self._writer.transport.abort()  # a child outside of the group may keep the socket open


class Job:
    """One call of a reward, or one episode, in a worker; only the pools' loop uses it.

    Attributes:
        since_s: start of the deadline of the message without an answer; inf while the job owes an
            answer, but waits for the parent.
    """

    def __init__(self, pool: "WorkerPool") -> None:
        self._pool, self._number = pool, next(pool.numbers)
        self._worker: _Worker | None = None
        self.since_s = 0.0

    async def ask(self, message: Any, timeout_s: float, doing: str) -> Any:
        """Send a message, which can be pickled, and return its answer, or raise WorkerFailed.

        `doing` is the subject in the text of a failure, as in "reset took longer than 2 s".
        """
        worker = self._worker = self._worker or self._pool.take(self._number)
        if not worker.started.done():
            await asyncio.wait([worker.started])
        answer = worker.answers[self._number] = asyncio.Future()
        worker.send(self._number, message)
        self.since_s = time.monotonic()
        while not answer.done() or answer.cancelled():
            if worker.failure:
                name, text, cause = worker.failure
                if name in ("timeout", "crash") and self._number != cause:
                    name, text = "lost", f"another job ended the {self._pool.kind} worker: {text}"
                raise WorkerFailed(name, text)
            last_s = self.since_s + (MOST_DEADLINES - 1) * timeout_s
            left_s = max(self.since_s, min(worker.free_s, last_s)) + timeout_s - time.monotonic()
            if left_s <= 0:
                worker.end("timeout", f"{doing} took longer than {timeout_s:g} s", self._number)
            else:  # a suspended deadline may restart meanwhile
                await asyncio.wait([answer], timeout=min(left_s, timeout_s))
        return answer.result()

    def leave(self) -> None:
        """Leave the worker, which cancels the job if the job has not ended."""
        if worker := self._worker:
            worker.jobs.discard(self._number)
            if worker.answers.pop(self._number, None) and not worker.jobs:  # it may hang
                worker.end("lost", "its job was closed")
            worker.send(self._number)


@dataclasses.dataclass(eq=False)
class WorkerPool:
    """Pool of workers; starts a worker when a job needs it. Only `run`, `close` are thread-safe.

    Attributes:
        kind: name of the pool, for log files.
        make: importable function (*arguments) -> handler, called once in each worker.
        num_workers: maximum number of workers. If all have a job, `ask` waits, and other jobs take
            the worker with the fewest jobs.
        logs: folder of the log files; None: the output is that of this process.
    """

    kind: str
    make: Callable[..., Handler]
    arguments: Sequence[Any]
    _: dataclasses.KW_ONLY
    num_workers: int
    logs: Path | None = None

    def __post_init__(self) -> None:
        self.workers: list[_Worker] = []
        self.numbers = itertools.count(_STARTED + 1)
        self._idle, self._is_closed = asyncio.Semaphore(self.num_workers), False
        self._open = set[Future[Any]]()

    def run(self, coroutine: Coroutine[Any, Any, Any], loop: Any = None) -> "Future[Any]":
        """Run a coroutine on `loop` (None: that of all pools); closing the pool cancels it."""
        future = asyncio.run_coroutine_threadsafe(coroutine, loop or loop_of())
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def close(self) -> None:
        """Kill all workers, even during a call; messages without an answer fail as "closed"."""
        wait([self.run(self._end_all())], 10.0)
        # Jobs receive their failure; coroutines that wait for something else are cancelled.
        for future in wait(list(self._open), 1.0).not_done:
            future.cancel()

    async def ask(self, message: Any, timeout_s: float, doing: str) -> Any:
        """Return the answer to a job of one message, as `Job.ask`; wait for an idle worker."""
        async with self._idle:
            job = Job(self)
            try:
                return await job.ask(message, timeout_s, doing)
            finally:
                job.leave()

    def take(self, job: int) -> _Worker:
        """Give a job a new worker if all have jobs and more may run, else that with fewest jobs."""
        if self._is_closed:
            raise WorkerFailed("closed", f"the {self.kind} workers were closed")
        for worker in [w for w in self.workers if w.process.poll() is not None]:
            worker.end("crash", "its process ended")
        worker = min(self.workers, key=lambda w: len(w.jobs), default=None)
        if worker is None or (worker.jobs and len(self.workers) < self.num_workers):
            worker = _Worker(self)
            self.workers.append(worker)
        worker.jobs.add(job)
        return worker

    async def _end_all(self) -> None:
        self._is_closed = True
        for worker in list(self.workers):
            worker.end("closed", f"the {self.kind} workers were closed")


def most_wait_s(timeout_s: float) -> float:
    """Return the seconds after which each message with this deadline is answered or has failed."""
    return START_TIMEOUT_S + (MOST_DEADLINES + 1) * timeout_s


@functools.cache
def loop_of(name: str = "workers") -> asyncio.AbstractEventLoop:
    """Return the event loop of this name, in a thread; nothing may block that of the workers."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=name, daemon=True).start()
    return loop
