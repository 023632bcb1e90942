# SPDX-License-Identifier: Apache-2.0
"""Processes that run users' code: reward functions and environments.

Users' code may hang, raise, crash, or start other processes. A worker is a process with a private
socket, a log file and a process group of its own, which is killed with it. Jobs (calls of rewards,
episodes of environments) share the workers of a pool. Workers import neither jax nor transformers.
This is no sandbox: a child process can leave the process group.

Invariant: every message to a worker gets an answer or a named failure. A message that gets no
answer before its deadline ends its worker, and costs the jobs of that worker and nothing else.
"""

import asyncio
import contextlib
import functools
import importlib
import itertools
import json
import math
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
MOST_ANSWER_BYTES = 2**24
"""Maximum size of an answer; a worker that sends more is killed."""
MAX_MEMORY_BYTES = 16 * 2**30
"""Limit of the memory that a worker allocates."""
_START = "its start, with the import of the user's module (move slow work into the function),"
MOST_DEADLINES = 10
"""Deadlines after which a coroutine is late that waits for ever, and so keeps its worker free."""
_TICK_S = 0.5  # longest time until a missed deadline that was restarted is noticed
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
    """Run the jobs of the parent, the peer of standard input, until it closes the socket.

    Args:
        module, make, arguments: function that returns the handler.
    """
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    jobs: dict[int, tuple[asyncio.Queue[Any], asyncio.Task[None]]] = {}

    def send(number: int, answer: Any) -> None:
        connection.sendall(json.dumps([number, answer]).encode() + b"\n")

    async def run(number: int, message: Any, messages: asyncio.Queue[Any]) -> None:
        def reply(answer: Any) -> Awaitable[Any]:
            send(number, answer)
            return messages.get()

        try:
            send(number, await handler(message, reply))
        finally:
            del jobs[number]

    def receive(request: Sequence[Any]) -> None:
        number, *message = request
        if number not in jobs and message:
            messages: asyncio.Queue[Any] = asyncio.Queue()
            jobs[number] = messages, loop.create_task(run(number, message[0], messages))
        elif message:
            jobs[number][0].put_nowait(message[0])
        elif number in jobs:  # the parent has closed the job
            jobs[number][1].cancel()

    def read() -> None:  # a thread, which notices the end of the parent even during a user's call
        try:
            with connection.makefile("rb") as requests:
                while True:
                    loop.call_soon_threadsafe(receive, pickle.load(requests))
        finally:
            os.killpg(0, signal.SIGKILL)

    threading.Thread(target=read, daemon=True).start()
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a user's file must not hide a module of the library
    # Imports the user's module, before the first deadline runs.
    handler: Handler = getattr(importlib.import_module(module), make)(*arguments)
    send(-1, None)  # the process has started
    while True:
        # Users' code may raise SystemExit or KeyboardInterrupt, which stop a loop.
        with contextlib.suppress(BaseException):
            loop.run_forever()


class _Worker(asyncio.Protocol):
    """A process with its jobs; only the thread of the pool's loop uses it.

    Attributes:
        jobs: numbers of the jobs.
        answers: futures of the messages without an answer by job, oldest message first.
        free_s: time of the newest answer, at which the worker was free; at first, of its start.
    """

    def __init__(self, pool: "WorkerPool", number: int) -> None:
        self.number, self.jobs, self.transport = number, set[int](), asyncio.Transport()
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.has_started, self.free_s = False, time.monotonic()
        self._pool, self._data, self._log = pool, bytearray(), "standard error"
        self.socket, theirs = socket.socketpair()
        job = [sys.path, pool.make.__module__, pool.make.__name__, pool.arguments]
        command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(job)]
        with theirs, contextlib.ExitStack() as stack:
            output = None
            if pool.logs is not None:
                pool.logs.mkdir(parents=True, exist_ok=True)
                name = f"{pool.kind}-{socket.gethostname()}-{os.getpid()}-{number}.log"
                output = stack.enter_context(open(pool.logs / name, "ab"))
                self._log = output.name
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=output, stderr=output, process_group=0
            )

    def write(self, *message: Any) -> None:
        """Send the number of a job and a message to it; the number alone closes the job."""
        self.transport.write(pickle.dumps(message))

    def data_received(self, data: bytes) -> None:
        self._data += data
        *lines, self._data = self._data.split(b"\n") if b"\n" in data else [self._data]
        for number, value in map(json.loads, lines):
            self.has_started, self.free_s = True, time.monotonic()
            answer = self.answers.pop(number, None)
            if answer is not None and not answer.done():
                answer.set_result(value)
        if len(self._data) > MOST_ANSWER_BYTES:
            self.end("crash", f"an answer has more than {MOST_ANSWER_BYTES} bytes")

    def connection_lost(self, exc: Exception | None) -> None:
        self.end("crash", "its process ended")

    def end(self, name: str, text: str, number: int | None = None) -> None:
        """Kill the process and its group; the message of a job fails by this name, others as lost.

        Args:
            number: number of the job; None: that with the oldest message, which ran.
        """
        if self not in self._pool.workers:
            return
        self._pool.workers.remove(self)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        self.transport.abort()
        if name == "crash":
            text += f" (exit code {self.process.returncode}); see {self._log}"
        if not self.has_started and name != "closed":
            name = "start"
        number = next(iter(self.answers), None) if number is None else number
        for each, answer in self.answers.items():
            failure = WorkerFailed(name, text)
            if each != number and name not in ("start", "closed"):
                other = f"another job ended the {self._pool.kind} worker"
                failure = WorkerFailed("lost", f"{other}: {text}")
            if not answer.done():
                answer.set_exception(failure)
                answer.exception()  # read, or asyncio warns of a job that was closed


class Job:
    """One call of a reward, or one episode of an environment, in a worker.

    Only the thread of the pool's loop uses it, except for the deadline.
    """

    def __init__(self, pool: "WorkerPool") -> None:
        self._pool, self._number = pool, next(pool.numbers)
        self._worker: _Worker | None = None
        self._since_s = 0.0  # start of the deadline

    def suspend_deadline(self) -> None:
        """Suspend the deadline: the job owes an answer, but waits for the parent."""
        self._since_s = math.inf

    def restart_deadline(self) -> None:
        """Restart the deadline of the message without an answer."""
        self._since_s = time.monotonic()

    async def ask(self, message: Any, timeout_s: float, doing: str) -> Any:
        """Send a message and return its answer.

        Args:
            message: any object that can be pickled.
            timeout_s: deadline, counted from the time at which the worker is free for the message;
                answers to other jobs show that it is free, for ten deadlines at most.
            doing: subject for the text of a failure, as in "reset took longer than 2 s".

        Raises:
            WorkerFailed: there is no answer.
        """
        if self._worker is None:
            self._worker = await self._pool.take(self._number)
        worker = self._worker
        if worker not in self._pool.workers:
            text = f"the {self._pool.kind} worker of this job was ended by another job"
            raise WorkerFailed("lost", text)
        answer = worker.answers[self._number] = asyncio.get_running_loop().create_future()
        self.restart_deadline()
        worker.write(self._number, message)
        while not answer.done():
            limit_s = timeout_s if worker.has_started else START_TIMEOUT_S
            free_s = min(worker.free_s, self._since_s + (MOST_DEADLINES - 1) * limit_s)
            left_s = max(self._since_s, free_s) + limit_s - time.monotonic()
            if left_s <= 0:
                late = f"{doing if worker.has_started else _START} took longer than {limit_s:g} s"
                worker.end("timeout", late, self._number)
            await asyncio.wait([answer], timeout=max(0.0, min(left_s, _TICK_S)))
        return answer.result()

    def leave(self) -> None:
        """Give the place in the worker back. A job that has not ended is cancelled."""
        worker = self._worker
        if worker not in self._pool.workers or self._number not in worker.jobs:
            return
        worker.jobs.remove(self._number)
        is_open = worker.answers.pop(self._number, None) is not None
        if is_open and not worker.jobs:  # it may hang, and nothing else runs there
            worker.end("lost", "its job was closed")
        else:
            worker.write(self._number)


class WorkerPool:
    """Thread-safe pool of workers; starts a worker when a job needs it.

    Args:
        kind: name of the pool, for log files.
        make: importable function (*arguments) -> handler, called once in each worker.
        arguments: arguments of `make`.
        num_workers: maximum number of workers. If all have a job, `call` waits, and other jobs take
            the worker with the fewest jobs.
        logs: folder of the log files; None: the output is that of this process.
    """

    def __init__(
        self,
        kind: str,
        make: Callable[..., Handler],
        arguments: Sequence[Any],
        *,
        num_workers: int,
        logs: Path | None = None,
    ) -> None:
        self.kind, self.make, self.arguments, self.logs = kind, make, arguments, logs
        self.num_workers, self.numbers = num_workers, itertools.count()
        self.workers: list[_Worker] = []
        self._idle, self._starting = asyncio.Semaphore(num_workers), asyncio.Lock()
        self._loop, self._is_closed = _loop_of_pools(), False
        self._open = set[Future[Any]]()

    def open(self) -> Job:
        """Return a new job."""
        return Job(self)

    def call(self, message: Any, timeout_s: float, doing: str) -> "Future[Any]":
        """Return the answer to a job of one message, as `Job.ask`; it waits for an idle worker."""

        async def ask() -> Any:
            async with self._idle:
                job = self.open()
                try:
                    return await job.ask(message, timeout_s, doing)
                finally:
                    job.leave()

        return self.run(ask())

    def run(
        self, coroutine: Coroutine[Any, Any, Any], loop: asyncio.AbstractEventLoop | None = None
    ) -> "Future[Any]":
        """Run a coroutine on this loop, or the pool's; it is cancelled when the pool is closed."""
        future = asyncio.run_coroutine_threadsafe(coroutine, loop or self._loop)
        self._open.add(future)
        future.add_done_callback(self._open.discard)
        return future

    def close(self) -> None:
        """Kill all workers, even during a call; messages without an answer fail as "closed"."""
        wait([self.run(self._end_all())], 10.0)
        # Jobs receive their failure; coroutines that wait for something else are cancelled.
        for future in wait(list(self._open), 1.0).not_done:
            future.cancel()

    # Methods for the pool's loop.

    async def _end_all(self) -> None:
        async with self._starting:
            self._is_closed = True
            for worker in list(self.workers):
                worker.end("closed", f"the {self.kind} workers were closed")

    async def end_idle(self) -> None:
        """End the workers without jobs; later jobs start new ones."""
        for worker in [w for w in self.workers if not w.jobs]:
            worker.end("lost", "it was idle")

    async def take(self, job: int) -> _Worker:
        """Give a job the worker with the fewest; a new one, if all have jobs and more may run.

        Raises:
            WorkerFailed: the pool was closed.
        """
        async with self._starting:
            for worker in [w for w in self.workers if w.process.poll() is not None]:
                worker.end("crash", "its process ended")
            if self._is_closed:
                raise WorkerFailed("closed", f"the {self.kind} workers were closed")
            worker = min(self.workers, key=lambda w: len(w.jobs), default=None)
            if worker is None or (worker.jobs and len(self.workers) < self.num_workers):
                number = min({*range(len(self.workers) + 1)} - {w.number for w in self.workers})
                worker = _Worker(self, number)
                made = self._loop.create_connection(lambda: worker, sock=worker.socket)
                worker.transport, _ = await made
                self.workers.append(worker)
            worker.jobs.add(job)
            return worker


def start_loop(name: str) -> asyncio.AbstractEventLoop:
    """Return a new event loop, which runs in a thread of this name until it is stopped."""
    loop = asyncio.new_event_loop()

    def run() -> None:
        loop.run_forever()
        loop.close()

    threading.Thread(target=run, name=name, daemon=True).start()
    return loop


# All pools share an event loop.
_loop_of_pools = functools.cache(functools.partial(start_loop, "workers"))
