# SPDX-License-Identifier: Apache-2.0
"""Processes that run users' code: reward functions and environments.

Users' code may hang, raise, crash, or start other processes. A worker is a process with a private
socket, a log file and a process group of its own, which is killed with it. Jobs (calls of rewards,
episodes of environments) share the workers of a pool. Every message to a worker gets an answer or a
named failure. Workers import neither jax nor transformers. This is no sandbox: a child process can
leave the process group.

Invariant: a message that gets no answer before its deadline ends its worker, and costs the jobs of
that worker and nothing else.
"""

import asyncio
import contextlib
import importlib
import itertools
import json
import math
import os
import pickle
import resource
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Coroutine, Sequence
from concurrent.futures import Future
from pathlib import Path
from typing import Any

START_TIMEOUT_S = 60.0
"""Seconds for the start of a worker and the import of the user's module, on a busy machine."""
MOST_ANSWER_BYTES = 2**24
"""Maximum size of an answer; a worker that sends more is killed."""
MAX_MEMORY_BYTES = 16 * 2**30
"""Limit of the memory that a worker allocates."""
_SIZE_BYTES = 8  # a message to a worker begins with its size
_TICK_S = 0.5  # longest time until a missed deadline that was restarted is noticed
# Program of a worker. It finds modules where this process finds them.
_PROGRAM = "import json, sys; sys.path[:], *job = json.loads(sys.argv[1]); "
_PROGRAM += "from tba_jax.workers import serve; serve(*job)"


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
    """Messages of one job, in the worker; the first one starts the job's coroutine.

    Attributes:
        answer: answers the newest message with a value that can be written as JSON.
    """

    def __init__(self, answer: Callable[[Any], None]) -> None:
        self.answer = answer
        self.messages: asyncio.Queue[Any] = asyncio.Queue()

    async def answer_and_wait(self, value: Any) -> Any:
        """Answer the newest message, and return the next one."""
        self.answer(value)
        return await self.messages.get()


Handler = Callable[[Exchange, Any], Coroutine[Any, Any, None]]
"""Coroutine function of a job: (exchange, first message) -> None; it answers every message."""


def serve(module: str, make: str, arguments: Sequence[Any]) -> None:
    """Run the jobs of the parent, the peer of standard input, until it closes the socket.

    Args:
        module, make, arguments: function that returns the handler.
    """
    connection = socket.socket(fileno=os.dup(0))
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    threading.Thread(target=_leave_with, args=(connection,), daemon=True).start()
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    hard = resource.getrlimit(resource.RLIMIT_DATA)[1]
    most = MAX_MEMORY_BYTES if hard == resource.RLIM_INFINITY else min(MAX_MEMORY_BYTES, hard)
    resource.setrlimit(resource.RLIMIT_DATA, (most, hard))
    if os.getcwd() not in sys.path:
        sys.path.append(os.getcwd())  # last: a user's file must not hide a module of the library
    # Imports the user's module, before the first deadline runs.
    handler: Handler = getattr(importlib.import_module(module), make)(*arguments)
    jobs: dict[int, tuple[Exchange, asyncio.Task[None]]] = {}

    def receive() -> None:
        size = int.from_bytes(connection.recv(_SIZE_BYTES, socket.MSG_WAITALL))
        number, *message = pickle.loads(connection.recv(size, socket.MSG_WAITALL))
        if not message:  # the parent has closed the job
            if number in jobs:
                jobs[number][1].cancel()
        elif number in jobs:
            jobs[number][0].messages.put_nowait(*message)
        else:
            exchange = Exchange(lambda value: send([number, value]))
            task = loop.create_task(handler(exchange, *message))
            task.add_done_callback(lambda _: jobs.pop(number, None))
            jobs[number] = exchange, task

    def send(value: Any) -> None:
        connection.sendall(json.dumps(value).encode() + b"\n")

    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    loop.add_reader(connection.fileno(), receive)
    send([-1, None])  # the process has started
    while True:
        # Users' code may raise SystemExit or KeyboardInterrupt, which stop a loop.
        with contextlib.suppress(BaseException):
            loop.run_forever()


def _leave_with(connection: socket.socket) -> None:
    """End this process and its group, even in a user's call, when the parent ends."""
    poll = select.poll()
    poll.register(connection, 0)  # only the end of the peer
    poll.poll()
    os.killpg(0, signal.SIGKILL)


# --- in the parent -------------------------------------------------------------------------------


class _Worker:
    """A process with its jobs; only the thread of the pool's loop uses it.

    Attributes:
        answers: futures of the messages without an answer by job number, oldest message first.
        free_s: time of the newest answer, at which the worker was free; inf: it has not started.
    """

    def __init__(self, pool: "WorkerPool", number: int) -> None:
        self.number, self.jobs, self.is_ended = number, set[int](), False
        self.answers: dict[int, asyncio.Future[Any]] = {}
        self.free_s = math.inf
        self._pool = pool
        ours, theirs = socket.socketpair()
        job = [sys.path, pool.make.__module__, pool.make.__name__, pool.arguments]
        command = [sys.executable, "-P", "-c", _PROGRAM, json.dumps(job)]
        with theirs, contextlib.ExitStack() as stack:
            output = None
            if pool.logs is not None:
                pool.logs.mkdir(parents=True, exist_ok=True)
                name = f"{pool.kind}-{socket.gethostname()}-{os.getpid()}-{number}.log"
                output = stack.enter_context(open(pool.logs / name, "ab"))
            self.process = subprocess.Popen(
                command, stdin=theirs.fileno(), stdout=output, stderr=output, process_group=0
            )
        loop = asyncio.get_running_loop()
        connecting = asyncio.open_connection(sock=ours, limit=MOST_ANSWER_BYTES)
        self._streams = loop.create_task(connecting)
        self._task = loop.create_task(self._receive(output.name if output else "standard error"))

    async def write(self, *message: Any) -> None:
        """Send the number of a job and a message to it; the number alone closes the job."""
        data = pickle.dumps(message)
        (await self._streams)[1].write(len(data).to_bytes(_SIZE_BYTES) + data)

    async def _receive(self, output: str) -> None:
        """Receive answers until the process ends; `output` is the place of its output."""
        reader, writer = await self._streams
        try:
            line = await asyncio.wait_for(reader.readline(), START_TIMEOUT_S)
            while line:
                number, value = json.loads(line)
                answer = self.answers.pop(number, None)
                if answer is not None and not answer.done():
                    answer.set_result(value)
                self.free_s = time.monotonic()
                line = await reader.readline()
        except TimeoutError:
            text = f"its module was not imported within {START_TIMEOUT_S:.0f} s. Move slow work "
            self.end("start", f"{text}from the module's top level into the function")
        except ValueError:  # the line is too long, or no JSON
            text = f"an answer has more than {MOST_ANSWER_BYTES} bytes, or users' code wrote it"
            self.end("crash", text)
        except OSError:  # the process was killed while it wrote
            pass
        finally:
            writer.transport.abort()
        self.end("crash", f"its process ended (exit code {self._exit_code()}); see {output}")

    def _exit_code(self) -> int | None:
        """Wait a second for the end of the process."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(1.0)
        return self.process.returncode

    def end(self, name: str, text: str, number: int | None = None) -> None:
        """Kill the process and its group; the message of this job fails by this name.

        Args:
            number: number of the job that failed; None: that of the oldest message.
        """
        if self.is_ended:
            return
        self.is_ended = True
        self._pool.workers.remove(self)
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        self._exit_code()
        if self.free_s == math.inf and name != "closed":
            name = "start"
        lost = WorkerFailed("lost", f"another job ended the {self._pool.kind} worker: {text}")
        number = next(iter(self.answers), None) if number is None else number
        for each, answer in self.answers.items():
            is_own = each == number or name in ("start", "closed")
            if not answer.done():
                answer.set_exception(WorkerFailed(name, text) if is_own else lost)
                answer.exception()  # read, or asyncio warns of a job that was closed
        self._task.cancel()


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
            timeout_s: deadline, counted from the time at which the worker is free for the message.
            doing: subject for the text of a failure, as in "reset took longer than 2 s".

        Raises:
            WorkerFailed: there is no answer.
        """
        if self._worker is None:
            self._worker = self._pool.idlest()
            self._worker.jobs.add(self._number)
        worker = self._worker
        if worker.is_ended:
            text = f"the {self._pool.kind} worker of this job was ended by another job"
            raise WorkerFailed("lost", text)
        answer = worker.answers[self._number] = asyncio.get_running_loop().create_future()
        self.restart_deadline()
        await worker.write(self._number, message)
        while not answer.done():
            left_s = max(self._since_s, worker.free_s) + timeout_s - time.monotonic()
            if left_s <= 0:
                text = f"{doing} took longer than {timeout_s:g} s"
                worker.end("timeout", text, self._number)
            await asyncio.wait([answer], timeout=max(0.0, min(left_s, _TICK_S)))
        return answer.result()

    async def leave(self) -> None:
        """Give the place in the worker back. A job that has not ended is cancelled."""
        worker = self._worker
        if worker is None or worker.is_ended or self._number not in worker.jobs:
            return
        worker.jobs.remove(self._number)
        is_open = worker.answers.pop(self._number, None) is not None
        if is_open and not worker.jobs:  # it may hang, and nothing else runs there
            worker.end("lost", "its job was closed")
        else:
            await worker.write(self._number)


class WorkerPool:
    """Thread-safe pool of workers; starts a worker when a job needs it.

    Args:
        kind: name of the pool, for log files.
        make: importable function (*arguments) -> handler, called once in each worker.
        arguments: arguments of `make`.
        num_workers: maximum number of workers. If all have a job, `call` waits, and `open` takes
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
        self._idle = asyncio.Semaphore(num_workers)
        self._lock, self._is_closed = threading.Lock(), False
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._run_loop, name=f"{kind}-workers", daemon=True)
        self._thread.start()

    def open(self) -> Job:
        """Return a new job."""
        return Job(self)

    def call(self, message: Any, timeout_s: float, doing: str) -> "Future[Any]":
        """Return the answer to a job of one message, as `Job.ask`; it waits for an idle worker."""
        return self.run(self._call(message, timeout_s, doing))

    def run(self, coroutine: Coroutine[Any, Any, Any]) -> "Future[Any]":
        """Run a coroutine on the pool's loop; its result is `WorkerFailed` in a closed pool."""
        with self._lock:
            if not self._is_closed:
                return asyncio.run_coroutine_threadsafe(coroutine, self._loop)
        coroutine.close()
        failed: Future[Any] = Future()
        failed.set_exception(self._closed())
        return failed

    def close(self) -> None:
        """Kill all workers, even during a call; messages without an answer fail as "closed"."""
        with self._lock:
            if not self._is_closed:
                self._is_closed = True
                asyncio.run_coroutine_threadsafe(self._end_all(), self._loop)
        self._thread.join(10.0)

    def _closed(self) -> WorkerFailed:
        return WorkerFailed("closed", f"the {self.kind} workers were closed")

    def _run_loop(self) -> None:
        self._loop.run_forever()
        self._loop.close()

    # Methods for the pool's loop.

    async def _call(self, message: Any, timeout_s: float, doing: str) -> Any:
        async with self._idle:
            job = self.open()
            try:
                return await job.ask(message, timeout_s, doing)
            finally:
                await job.leave()

    def idlest(self) -> _Worker:
        """Return the worker with the fewest jobs; a new one, if all have jobs and more may run.

        Raises:
            WorkerFailed: the pool was closed.
        """
        while not self._is_closed:
            worker = min(self.workers, key=lambda w: len(w.jobs), default=None)
            if worker is None or (worker.jobs and len(self.workers) < self.num_workers):
                taken = {w.number for w in self.workers}
                number = next(n for n in itertools.count() if n not in taken)
                self.workers.append(_Worker(self, number))
                return self.workers[-1]
            if worker.process.poll() is None:
                return worker
            worker.end("crash", "its process ended")
        raise self._closed()

    async def end_idle(self) -> None:
        """End the workers without jobs; later jobs start new ones."""
        for worker in [w for w in self.workers if not w.jobs]:
            worker.end("lost", "it was idle")

    async def _end_all(self) -> None:
        for worker in list(self.workers):
            worker.end("closed", str(self._closed()))
        # Jobs receive their failure, and those that wait for a worker find the pool closed.
        tasks = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.wait(tasks, timeout=1.0) if tasks else None
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await asyncio.sleep(0)  # sockets are closed
        self._loop.stop()
