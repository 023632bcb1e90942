# SPDX-License-Identifier: Apache-2.0
"""StepServer: sends every training step to the trainer processes that do not own the buffer.

The first trainer process decides each step and draws its batch. Each other process sends a
step request with the number of the step, and receives the decision as bytes. A step request also
reports whether its sender received a stop signal, and whether it still writes a publication.

Invariant: every process receives the same bytes for a step, however often it requests them
(tests/remote/test_step_server.py).
"""

import concurrent.futures
import json
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import NamedTuple

from tba_jax.devices.cluster import PeerError
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.remote.channel import Channel, Handler, Unreachable

_CHECK_S = 0.1  # seconds between two checks for a failure while a process waits
_RETRY_S = 0.2  # seconds between two requests to a process that does not respond


class StepRequest(NamedTuple):
    """Request of a trainer process for a step.

    Attributes:
        process: number of the sender in the job.
        step: number of the step, from 0.
        wants_stop: whether the sender received a stop signal.
        is_publishing: whether the sender still writes the weights of the last publication.
    """

    process: int
    step: int
    wants_stop: bool
    is_publishing: bool


class StepServer:
    """Thread-safe server of plans and batches for the other trainer processes.

    Args:
        processes: numbers of the other trainer processes.
        timeout_s: longest wait for the requests of these processes, in seconds.
    """

    def __init__(self, processes: Sequence[int], *, timeout_s: float) -> None:
        self._processes = tuple(processes)
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._requests: dict[int, StepRequest] = {}
        self._waiting: list[tuple[int, concurrent.futures.Future[bytes]]] = []
        self._answered, self._answer = -1, b""

    def request(self, request: StepRequest) -> concurrent.futures.Future[bytes]:
        """Return a future of the decision on a step.

        Raises:
            ValueError: the process is not part of the job, or the step is over.
        """
        future: concurrent.futures.Future[bytes] = concurrent.futures.Future()
        with self._changed:
            if request.process not in self._processes:
                raise ValueError(
                    f"process {request.process} requests a step, but the other trainer processes "
                    f"are {list(self._processes)}. Start every process with the same command"
                )
            if request.step < self._answered:
                raise ValueError(
                    f"process {request.process} requests step {request.step}, but the newest "
                    f"decision is of step {self._answered}. Stop all processes, and start each "
                    "with the same command"
                )
            self._requests[request.process] = request
            if request.step == self._answered:
                future.set_result(self._answer)
            else:
                self._waiting = [(s, f) for s, f in self._waiting if not f.done()]
                self._waiting.append((request.step, future))
            self._changed.notify_all()
        return future

    @property
    def wants_stop(self) -> bool:
        """Return whether the newest step request of any process reports a stop signal."""
        with self._changed:
            return any(request.wants_stop for request in self._requests.values())

    @property
    def is_publishing(self) -> bool:
        """Return whether the newest step request of any process reports unfinished writes."""
        with self._changed:
            return any(request.is_publishing for request in self._requests.values())

    def wait(self, step: int) -> None:
        """Wait until every process has requested this step.

        Raises:
            PeerError: a process did not request the step within the timeout.
        """
        deadline = time.monotonic() + self._timeout_s
        with self._changed:
            while missing := [p for p in self._processes if self._step_of(p) < step]:
                if not self._changed.wait(_CHECK_S) and time.monotonic() > deadline:
                    raise PeerError(
                        f"process(es) {', '.join(map(str, missing))} did not request step {step} "
                        f"within {self._timeout_s:.0f} s (config.log.watchdog_s). Look at their "
                        "output; the same command on every host resumes the run"
                    )

    def _step_of(self, process: int) -> int:
        request = self._requests.get(process)
        return -1 if request is None else request.step

    def answer(self, step: int, decision: bytes) -> None:
        """Send the decision on a step to every process that requests it."""
        with self._changed:
            self._answered, self._answer = step, decision
            ready = [future for s, future in self._waiting if s == step]
            self._waiting = [(s, future) for s, future in self._waiting if s != step]
        for future in ready:
            if future.set_running_or_notify_cancel():
                future.set_result(decision)


def step_handlers(server: StepServer) -> Mapping[str, Handler]:
    """Return the channel handlers of a step server."""

    def step(data: bytes) -> concurrent.futures.Future[bytes]:
        return server.request(StepRequest(*json.loads(data)))

    return {"step": step}


class StepClient:
    """Client that requests plans and batches from the process that owns the buffer.

    A worker thread sends the requests, so that `wait` notices failures of this process. The worker
    starts with the first step, because processes that only search use the channel alone.

    Args:
        timeout_s: seconds without a response after which the owner counts as lost.

    Attributes:
        channel: channel to the owner.
        host: name of this process and its machine, for log lines.
        check: raises an error if this process has failed; called while waiting for a step.
    """

    def __init__(self, channel: Channel, process: int, *, timeout_s: float) -> None:
        self.channel = channel
        self.host = f"process {process} on {socket.gethostname()}"
        self.check: Callable[[], None] = lambda: None
        self._process = process
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._wanted: tuple[int, Callable[[], tuple[bool, bool]]] | None = None
        self._decision: bytes | None = None
        self._last_response_s = time.monotonic()
        self._stop = StopFlag()
        self._worker: Worker | None = None

    def wait(self, step: int, facts: Callable[[], tuple[bool, bool]]) -> bytes:
        """Return the owner's decision on a step.

        Args:
            facts: returns (wants_stop, is_publishing); called before every request.

        Raises:
            WorkerError: the owner does not respond; the error's cause has the reason.
        """
        if self._worker is None:
            self._worker = Worker("step-client", self._request, self._stop)
            self._worker.start()
        with self._changed:
            self._wanted, self._decision = (step, facts), None
            self._last_response_s = time.monotonic()
            self._changed.notify_all()
            while self._decision is None:
                self._changed.wait(_CHECK_S)
                self._stop.check()
                self.check()
            return self._decision

    def _request(self) -> bool:
        with self._changed:
            if not self._changed.wait_for(lambda: self._wanted is not None, _CHECK_S):
                return True
            assert self._wanted is not None
            step, facts = self._wanted
        body = json.dumps(StepRequest(self._process, step, *facts())).encode()
        try:
            decision = self.channel.call("step", body)
        except Unreachable as error:
            silent_s = time.monotonic() - self._last_response_s
            if silent_s > self._timeout_s:
                raise PeerError(
                    f"the first trainer process has not responded for {silent_s:.0f} s ({error}). "
                    "The same command on every host resumes the run"
                ) from error
            self._stop.wait(_RETRY_S)
            return True
        self._last_response_s = time.monotonic()
        if decision:  # an empty response: the step is not decided yet
            with self._changed:
                self._wanted, self._decision = None, decision
                self._changed.notify_all()
        return True

    def close(self) -> None:
        """Stop the worker."""
        self._stop.set()
        if self._worker is not None:
            self._worker.join(2 * _CHECK_S)
