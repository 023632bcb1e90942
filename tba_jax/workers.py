# SPDX-License-Identifier: Apache-2.0
"""Processes that run users' code: reward functions and environments.

Users' code may hang, raise, crash, or start other processes. A worker is a process with a private
pipe, a log file and a process group of its own, which is killed with it. Jobs (calls of rewards,
episodes of environments) share the workers of a pool. Every message to a worker gets an answer or a
named failure. Workers import neither jax nor transformers. This is no sandbox: a child process can
leave the process group.

Invariant: a message that gets no answer before its deadline ends its worker, and costs the jobs of
that worker and nothing else.
"""

import asyncio
import collections
import contextlib
import dataclasses
import itertools
import json
import math
import multiprocessing
import os
import pickle
import signal
import socket
import sys
import threading
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from concurrent.futures import Future
from multiprocessing import connection as pipes
from pathlib import Path
from typing import Any

import numpy.random

START_TIMEOUT_S = 60.0
"""Seconds for the start of a worker and the import of the user's module, on a busy machine."""
MOST_ANSWER_BYTES = 2**24
"""Maximum size of an answer; a worker that sends more is killed."""
NOTHING = "nothing"
"""Message that an `Exchange` returns as None."""
_TICK_S = 0.1  # longest time until a missed deadline is noticed


class WorkerFailed(Exception):
    """A message got no answer.

    Attributes:
        name: "timeout", "crash" (the process ended), "lost" (another job ended the worker), "start"
            (the process did not start) or "closed".
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name


# --- in the worker -------------------------------------------------------------------------------


class Exchange:
    """Messages of one job, in the worker.

    The first message starts the job's coroutine; `answer_and_wait` answers a message and returns
    the next one.
    """

    def __init__(self, send: Callable[[Any], None]) -> None:
        self._send = send
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    def answer(self, value: Any) -> None:
        """Answer the newest message; the value can be written as JSON."""
        self._send(value)

    async def answer_and_wait(self, value: Any) -> Any:
        """Answer the newest message, and return the next one; None for `NOTHING`."""
        self.answer(value)
        message = await self.messages.get()
        return None if message == NOTHING else message


Handler = Callable[[Exchange, Any], Awaitable[None]]
"""Coroutine function of a job: (exchange, first message) -> None; it answers every message."""


def _serve(
    connection: pipes.Connection,
    make: Callable[..., Handler],
    arguments: Sequence[Any],
    folder: str,
    environment: Mapping[str, str],
    max_memory_bytes: int,
    log: str,
) -> None:
    """Run the jobs of the parent on one event loop, until the parent closes the pipe."""
    _enter(connection, folder, environment, max_memory_bytes, log)
    handler = make(*arguments)  # imports the user's module, before the first deadline runs
    connection.send_bytes(b"null")
    jobs: dict[int, tuple[Exchange, asyncio.Task[None]]] = {}

    def receive() -> None:
        try:
            number, message = pickle.loads(connection.recv_bytes())
        except (EOFError, OSError):
            leave()
        if message is None:  # the parent has closed the job
            if number in jobs:
                jobs[number][1].cancel()
        elif number in jobs:
            jobs[number][0].messages.put_nowait(message)
        else:
            exchange = Exchange(lambda value: send([number, value]))
            task = loop.create_task(_job(handler(exchange, message)))
            task.add_done_callback(lambda _: jobs.pop(number, None))
            jobs[number] = exchange, task

    def send(value: Any) -> None:
        try:
            connection.send_bytes(json.dumps(value).encode())
        except OSError:
            leave()

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.add_reader(connection.fileno(), receive)
    while True:
        # Users' code may raise SystemExit or KeyboardInterrupt, which stop a loop.
        with contextlib.suppress(BaseException):
            loop.run_forever()


async def _job(handled: Awaitable[None]) -> None:
    with contextlib.suppress(asyncio.CancelledError):
        await handled


def _enter(
    connection: pipes.Connection,
    folder: str,
    environment: Mapping[str, str],
    max_memory_bytes: int,
    log: str,
) -> None:
    """Prepare a new process for users' code; it ends with its group when its parent ends.

    Args:
        connection: pipe to the parent; children of this process do not inherit it, so the parent
            sees when this process ends.
        folder: folder from which user modules can be imported.
        environment: environment variables of the parent.
        max_memory_bytes: limit of the memory that the process allocates; 0: no limit.
        log: file to which standard output and standard error are appended; "": no change.
    """
    if sys.platform != "win32":
        os.setpgid(0, 0)
        _limit(max_memory_bytes)
    os.environ.update(environment)
    os.set_inheritable(connection.fileno(), False)
    sys.stdin = open(os.devnull)
    if log:
        descriptor = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        os.dup2(descriptor, 1)
        os.dup2(descriptor, 2)
        os.close(descriptor)
    # A parent that was killed cannot stop a process that hangs in users' code.
    threading.Thread(target=_leave_with_parent, name="exit-with-parent", daemon=True).start()
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's file must not hide a module of the library
    # The fork server imports numpy once for all workers, so each has the same global generator.
    numpy.random.seed()


def leave() -> None:
    """End this process and its process group."""
    if sys.platform != "win32":
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def _leave_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    parent.join()
    leave()


def _limit(max_memory_bytes: int) -> None:
    import resource

    resource.setrlimit(resource.RLIMIT_CORE, (0, resource.getrlimit(resource.RLIMIT_CORE)[1]))
    if max_memory_bytes:
        _, hard = resource.getrlimit(resource.RLIMIT_DATA)
        is_free = hard == resource.RLIM_INFINITY
        most = max_memory_bytes if is_free else min(max_memory_bytes, hard)
        resource.setrlimit(resource.RLIMIT_DATA, (most, hard))


# --- in the parent -------------------------------------------------------------------------------


@dataclasses.dataclass
class _Sent:
    """A message without an answer."""

    future: "Future[Any]"
    doing: str
    timeout_s: float
    since_s: float  # start of the deadline; inf: suspended
    is_call: bool  # whether the answer ends the job


class Job:
    """One call of a reward, or one episode of an environment, in a worker; one thread uses it."""

    def __init__(self, pool: "WorkerPool", worker: "_Worker", number: int) -> None:
        self._pool, self.worker, self.number = pool, worker, number

    def send(self, message: Any, timeout_s: float, doing: str) -> "Future[Any]":
        """Send a message; the result of the future is the answer, or a `WorkerFailed`.

        Args:
            message: any object that can be pickled, but not None.
            timeout_s: deadline, counted from the time at which the worker is free for the message.
            doing: subject for the text of a failure, as in "reset took longer than 2 s".
        """
        return self._pool._send(self, message, timeout_s, doing)

    def suspend_deadline(self) -> None:
        """Suspend the deadline: the job owes an answer, but waits for the parent."""
        self._pool._set_deadline(self, math.inf)

    def restart_deadline(self) -> None:
        """Restart the deadline of the message without an answer."""
        self._pool._set_deadline(self, time.monotonic())

    def close(self) -> None:
        """Give the place in the worker back. A job that has not ended is cancelled."""
        self._pool._close_job(self)


class _Worker:
    """A process, its pipe and its jobs; the lock of the pool guards all fields."""

    def __init__(self, number: int) -> None:
        self.number = number
        self.process: Any = None  # None: there is no process
        self.connection: Any = None
        self.is_started = False
        self.start_s = 0.0
        self.jobs: set[int] = set()
        self.sent: dict[int, _Sent] = {}  # by the number of the job, oldest message first

    @property
    def is_alive(self) -> bool:
        """Return whether the process runs."""
        return self.process is not None and self.process.is_alive()

    @property
    def is_ready(self) -> bool:
        """Return whether the process has imported the user's module."""
        return self.is_started and self.is_alive

    @property
    def head(self) -> _Sent | None:
        """Return the oldest message without an answer whose deadline runs."""
        return next((sent for sent in self.sent.values() if sent.since_s < math.inf), None)


class WorkerPool:
    """Thread-safe pool of workers; starts a worker when a job needs it.

    Args:
        kind: name of the pool, for log files.
        make: importable function (*arguments) -> handler, called once in each worker.
        arguments: arguments of `make`.
        num_workers: maximum number of workers. If all have a job, `call` waits, and `open` takes
            the worker with the fewest jobs.
        max_memory_bytes: memory limit of each worker; 0: none.
        logs: folder of the log files; None: the output is that of this process.
    """

    def __init__(
        self,
        kind: str,
        make: Callable[..., Handler],
        arguments: Sequence[Any],
        *,
        num_workers: int,
        max_memory_bytes: int = 0,
        logs: Path | None = None,
    ) -> None:
        self.num_workers = num_workers
        self._kind, self._make, self._arguments = kind, make, arguments
        self._max_memory_bytes, self._logs = max_memory_bytes, logs
        self._lock = threading.RLock()
        self._workers: list[_Worker] = []
        self._numbers = itertools.count()
        self._waiting: collections.deque[tuple[Future[Any], Any, float, str]] = collections.deque()
        self._dropped: list[Any] = []  # connections that the reader closes
        self._woken, self._wake = multiprocessing.Pipe(duplex=False)
        self._is_closed = False
        self._reader: threading.Thread | None = None

    @property
    def pids(self) -> list[int]:
        """Return the process IDs of the workers that run."""
        with self._lock:
            return [w.process.pid for w in self._workers if w.process is not None]

    def open(self) -> Job:
        """Return a new job.

        Raises:
            WorkerFailed: the pool was closed.
        """
        with self._lock:
            self._check_open()
            worker = min(self._workers, key=lambda w: len(w.jobs), default=None)
            is_busy = worker is not None and bool(worker.jobs)
            if worker is None or (is_busy and len(self._workers) < self.num_workers):
                worker = self._add_worker()
            return self._open_on(worker)

    def call(self, message: Any, timeout_s: float, doing: str) -> "Future[Any]":
        """Run a job of one message in the next idle worker; arguments and result as of `Job.send`.

        Raises:
            WorkerFailed: the pool was closed.
        """
        future: Future[Any] = Future()
        with self._lock:
            self._check_open()
            self._waiting.append((future, message, timeout_s, doing))
            self._start_waiting()
        return future

    def end_idle(self) -> None:
        """End the workers without jobs; later jobs start new ones."""
        with self._lock:
            for worker in self._workers:
                if not worker.jobs:
                    self._end(worker, "lost", "it was idle")

    def close(self) -> None:
        """Kill all workers, even during a call; messages without an answer fail as "closed"."""
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
            for worker in self._workers:
                self._end(worker, "closed", "the workers were closed")
            self._fail_waiting("closed", "the workers were closed")
            reader = self._reader
        self._wake.send_bytes(b"")
        if reader is not None and reader is not threading.current_thread():
            reader.join()
        self._wake.close()
        self._woken.close()

    # Methods from here on need the lock.

    def _check_open(self) -> None:
        if self._is_closed:
            raise WorkerFailed("closed", f"the {self._kind} workers were closed")

    def _add_worker(self) -> _Worker:
        self._workers.append(_Worker(len(self._workers)))
        return self._workers[-1]

    def _ensure_alive(self, worker: _Worker) -> None:
        """Start the worker's process if there is none, or if it was killed."""
        if worker.process is not None and not worker.process.is_alive():
            self._end(worker, "crash", "the process ended")
        if worker.process is not None:
            return
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload([self._make.__module__])
        worker.connection, theirs = context.Pipe()
        arguments = (theirs, self._make, self._arguments, os.getcwd(), dict(os.environ))
        log = _log_file(self._logs, self._kind, worker.number)
        worker.process = context.Process(
            target=_serve, args=(*arguments, self._max_memory_bytes, log), daemon=True
        )
        worker.is_started, worker.start_s = False, time.monotonic()
        worker.process.start()
        theirs.close()
        if self._reader is None:
            name = f"{self._kind}-workers"
            self._reader = threading.Thread(target=self._read, name=name, daemon=True)
            self._reader.start()
        self._wake.send_bytes(b"")

    def _open_on(self, worker: _Worker) -> Job:
        self._ensure_alive(worker)
        job = Job(self, worker, next(self._numbers))
        worker.jobs.add(job.number)
        return job

    def _start_waiting(self) -> None:
        """Give waiting calls to idle workers, and start workers for the others."""
        for worker in self._workers:
            if self._waiting and worker.is_ready and not worker.jobs:
                future, message, timeout_s, doing = self._waiting.popleft()
                if future.set_running_or_notify_cancel():
                    self._send(self._open_on(worker), message, timeout_s, doing, future)
        num_starting = sum(w.process is not None and not w.is_started for w in self._workers)
        while num_starting < len(self._waiting):
            worker = next((w for w in self._workers if not w.is_alive), None)
            if worker is None and len(self._workers) == self.num_workers:
                return
            self._ensure_alive(worker or self._add_worker())
            num_starting += 1

    def _fail_waiting(self, name: str, text: str) -> None:
        waiting, self._waiting = self._waiting, collections.deque()
        for future, *_ in waiting:
            if future.set_running_or_notify_cancel():
                future.set_exception(WorkerFailed(name, text))

    def _end(self, worker: _Worker, name: str, text: str) -> None:
        """Kill a worker and its process group; its oldest message fails by this name."""
        process, worker.process = worker.process, None
        if process is None:
            return
        self._dropped.append(worker.connection)
        head, sent = worker.head, worker.sent
        worker.sent, worker.jobs = {}, set()
        if process.pid is not None and sys.platform != "win32":
            # Before the process itself, whose ID could otherwise become that of another process.
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(process.pid, signal.SIGKILL)
        process.kill()
        process.join(1.0)
        lost = WorkerFailed("lost", f"another job ended the {self._kind} worker: {text}")
        if name in ("closed", "start"):
            lost = WorkerFailed(name, text)
        for each in sent.values():
            own = WorkerFailed(name, text) if each is head else lost
            each.future.set_exception(own)

    # Methods from here on take the lock.

    def _send(
        self, job: Job, message: Any, timeout_s: float, doing: str, call: Any = None
    ) -> "Future[Any]":
        future = call or Future()
        with self._lock:
            worker = job.worker
            if job.number not in worker.jobs:
                name, text = "lost", f"the {self._kind} worker of this job was ended by another job"
                if self._is_closed:
                    name, text = "closed", f"the {self._kind} workers were closed"
                future.set_exception(WorkerFailed(name, text))
                return future
            worker.sent[job.number] = _Sent(
                future, doing, timeout_s, time.monotonic(), call is not None
            )
            connection = worker.connection
        # Without the lock: a worker that hangs may not read, and its end needs the lock.
        with contextlib.suppress(OSError):  # the reader finds that the process has ended
            connection.send_bytes(pickle.dumps((job.number, message)))
        return future

    def _set_deadline(self, job: Job, since_s: float) -> None:
        with self._lock:
            if (sent := job.worker.sent.pop(job.number, None)) is not None:
                sent.since_s = since_s
                job.worker.sent[job.number] = sent

    def _close_job(self, job: Job) -> None:
        with self._lock:
            worker = job.worker
            if job.number not in worker.jobs:
                return
            worker.jobs.remove(job.number)
            is_open = worker.sent.pop(job.number, None) is not None
            if is_open and not worker.jobs:  # it may hang, and nothing else runs there
                self._end(worker, "lost", "its job was closed")
                return
            connection = worker.connection
        with contextlib.suppress(OSError):
            connection.send_bytes(pickle.dumps((job.number, None)))

    def _read(self) -> None:
        """Receive answers and end late workers, until the pool is closed."""
        while True:
            with self._lock:
                for connection in self._dropped:
                    connection.close()
                self._dropped = []
                if self._is_closed:
                    return
                live = {w.connection: w for w in self._workers if w.process is not None}
            for ready in pipes.wait([*live, self._woken], _TICK_S):
                if ready is self._woken:
                    self._woken.recv_bytes()
                else:
                    self._receive(live[ready], ready)  # pyright: ignore[reportArgumentType]
            with self._lock:
                for worker in self._workers:
                    self._check_deadline(worker)
                self._start_waiting()

    def _receive(self, worker: _Worker, connection: Any) -> None:
        try:
            found = json.loads(connection.recv_bytes(MOST_ANSWER_BYTES))
        except (EOFError, OSError):
            with self._lock:
                if worker.connection is connection and worker.process is not None:
                    self._crashed(worker)
            return
        with self._lock:
            if worker.connection is not connection or worker.process is None:
                return
            if found is None:
                worker.is_started = True
            else:
                number, value = found
                sent = worker.sent.pop(number, None)
                if sent is not None and sent.is_call:
                    worker.jobs.discard(number)
                if sent is not None:
                    sent.future.set_result(value)
            if worker.head is not None:  # the worker begins this message now
                worker.head.since_s = max(worker.head.since_s, time.monotonic())

    def _crashed(self, worker: _Worker) -> None:
        worker.process.join(1.0)
        output = _log_file(self._logs, self._kind, worker.number) or "standard error"
        if worker.is_started:
            code = worker.process.exitcode
            self._end(worker, "crash", f"its process ended (exit code {code}); see {output}")
            return
        text = (
            f"its process ended while it was starting; see {output} "
            '(a script that starts one needs `if __name__ == "__main__":`)'
        )
        self._end(worker, "start", text)
        self._fail_waiting("start", text)

    def _check_deadline(self, worker: _Worker) -> None:
        now, head = time.monotonic(), worker.head
        if worker.process is None:
            return
        if not worker.is_started and now > worker.start_s + START_TIMEOUT_S:
            text = (
                f"its module was not imported within {START_TIMEOUT_S:.0f} s. Move slow work from "
                "the module's top level into the function"
            )
            self._end(worker, "start", text)
            self._fail_waiting("start", text)
        elif worker.is_started and head is not None and now > head.since_s + head.timeout_s:
            self._end(worker, "timeout", f"{head.doing} took longer than {head.timeout_s:g} s")


def _log_file(folder: Path | None, kind: str, number: int) -> str:
    """Return the log file of a worker of this process; "" without a folder: standard streams."""
    if folder is None:
        return ""
    folder.mkdir(parents=True, exist_ok=True)
    return str(folder / f"{kind}-{socket.gethostname()}-{os.getpid()}-{number}.log")
