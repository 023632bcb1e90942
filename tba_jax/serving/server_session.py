# SPDX-License-Identifier: Apache-2.0
"""Decode sessions whose responses an inference server samples, in place of sessions on devices.

Threads send the requests, as many at a time as the session has slots. A response is sampled with
the newest weights at the time of its request, so all of its tokens have one version.
"""

import queue
import threading
import time
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.devices.worker import Worker
from tba_jax.serving.inference_server import InferenceServer, Loaded, Sampling

_STEP_S = 0.02  # longest wait of a step
_POLL_S = 0.5


class _Job(NamedTuple):
    """A response to sample, with the request and sample that it belongs to."""

    request: int
    sample: int
    prompt: np.ndarray
    key: np.ndarray
    settings: SamplingSettings
    temperature: float
    results: "queue.SimpleQueue[Response | Exception]"


class ServerDecoder:
    """Source of the sessions of one searcher, one session at a time.

    Args:
        server: samples the responses.
        eos_ids: tokens that end a response.
        stop_strings: texts that end a response; None: none.
    """

    def __init__(
        self, server: InferenceServer, eos_ids: tuple[int, ...], stop_strings: StopStrings | None
    ) -> None:
        self._server, self._eos_ids, self._stop_strings = server, eos_ids, stop_strings
        self._jobs: queue.SimpleQueue[_Job] = queue.SimpleQueue()
        self._workers: list[Worker] = []
        self._lock = threading.Lock()
        self._current: Loaded | None = None

    def session(
        self,
        params: Any,
        *,
        num_slots: int,
        prefill_prompts: int = 1,
        version: int = 0,
        keeps_caches: bool = False,
    ) -> "ServerSession":
        """Return an empty session; `params` are adapters, other arguments as in `Decoder`."""
        del prefill_prompts, keeps_caches
        self.use(params, version)
        for i in range(len(self._workers), num_slots):
            worker = Worker(f"server-client-{i}", self._step, self._server.stop, idle_s=0.0)
            self._workers.append(worker.start())
        return ServerSession(self, num_slots, version)

    def use(self, params: Any, version: int) -> None:
        """Sample later requests with these adapters."""
        loaded = self._server.acquire(version, params)
        with self._lock:
            before, self._current = self._current, loaded
        if before is not None:
            self._server.release(before)

    def put(self, job: _Job) -> None:
        """Queue a request."""
        self._jobs.put(job)

    def check(self) -> None:
        """Raise the failure of a thread, if one failed."""
        self._server.stop.check()

    def _step(self) -> bool:
        """Send one request, and put its response into the results."""
        try:
            job = self._jobs.get(timeout=_POLL_S)
        except queue.Empty:
            return False
        with self._lock:
            assert self._current is not None, "a session begins with weights"
            loaded = self._server.share(self._current)
        try:
            job.results.put(self._sample(job, loaded))
        except Exception as error:  # raised again by the thread of the session
            job.results.put(error)
        finally:
            self._server.release(loaded)
        return True

    def _sample(self, job: _Job, loaded: Loaded) -> Response:
        settings = job.settings
        stops = settings.stop_strings or self._stop_strings
        stop_ids = self._eos_ids if settings.stop_ids is None else settings.stop_ids
        seed = (int(job.key[0]) << 32 | int(job.key[1])) >> 1  # servers take 63 bits
        sampling = Sampling(
            settings.max_new_tokens,
            job.temperature,
            seed,
            stop_ids,
            () if stops is None else stops.strings,
        )

        def end(tokens: np.ndarray) -> int:
            is_stop = np.isin(tokens, stop_ids)
            ends = [int(is_stop.argmax()) + 1] if is_stop.any() else []
            if stops is not None and (found := stops.end(tokens, 0)):
                ends.append(found)
            return min(ends, default=0)

        tokens, logprobs, has_eos = self._server.sample(loaded, job.prompt, sampling, end)
        return Response(
            job.request,
            job.sample,
            tokens,
            logprobs,
            has_eos,
            loaded.version,
            loaded.version,
            job.temperature,
            np.full(len(tokens), loaded.version, np.int32),
        )


class ServerSession:
    """A queue of prompts whose responses come from a server; one thread drives it.

    Args:
        decoder: sends the requests.
        num_slots: maximum number of concurrent requests.
        version: version of the weights.
    """

    def __init__(self, decoder: ServerDecoder, num_slots: int, version: int) -> None:
        self.num_slots, self.version = num_slots, version
        self.statistics = Statistics()
        self._decoder = decoder
        self._results: queue.SimpleQueue[Response | Exception] = queue.SimpleQueue()
        self._num_submitted = self._num_open = 0

    @property
    def is_idle(self) -> bool:
        """Whether every response has been returned."""
        return not self._num_open

    @property
    def room(self) -> int:
        """Free slots minus queued responses; negative if more are queued."""
        return self.num_slots - self._num_open

    def submit(
        self,
        prompt: np.ndarray,
        keys: np.ndarray,
        settings: SamplingSettings,
        temperatures: np.ndarray | None = None,
    ) -> int:
        """Queue one prompt; arguments and result as of `Session.submit`."""
        index = self._num_submitted
        self._num_submitted += 1
        self._num_open += len(keys)
        for j, key in enumerate(keys):
            temperature = settings.temperature if temperatures is None else float(temperatures[j])
            job = _Job(index, j, np.asarray(prompt), key, settings, temperature, self._results)
            self._decoder.put(job)
        return index

    def swap(self, params: Any, version: int) -> None:
        """Sample later requests with other weights."""
        self._decoder.use(params, version)
        self.version = version

    def forget(self, conversation: np.ndarray) -> None:
        """Do nothing: the server decides which caches it keeps."""

    def step(self) -> list[Response]:
        """Wait a short time for responses, and return those that have arrived.

        Raises:
            ServerError: a request got no usable response.
        """
        start_s = time.perf_counter()
        self._decoder.check()
        found: list[Response | Exception] = []
        try:
            if self._num_open:
                found.append(self._results.get(timeout=_STEP_S))
            while True:
                found.append(self._results.get_nowait())
        except queue.Empty:
            """All that have arrived are found."""
        responses: list[Response] = []
        for each in found:
            if isinstance(each, Exception):
                raise each
            responses.append(each)
        self._num_open -= len(responses)
        self.statistics.tokens += sum(len(y.tokens) for y in responses)
        self.statistics.chunk_s += time.perf_counter() - start_s
        return responses

    def run(self) -> Iterator[Response]:
        """Yield responses as they arrive, until the session is idle."""
        while not self.is_idle:
            yield from self.step()
