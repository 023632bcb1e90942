# SPDX-License-Identifier: Apache-2.0
"""Responses that an inference server with vLLM's API samples (`search.engine`).

Prompts go out as token IDs; token IDs come back with the log-prob of each. The server loads the
weights of a version as a folder of adapters under a new name. A response is sampled with the newest
weights at the time of its request, so all of its tokens have one version.

Invariants: a response has the version of the adapter that it names, and every token a finite
log-prob; a request that fails is sent again, or ends the run.
"""

import contextlib
import dataclasses
import functools
import json
import math
import os
import queue
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.models.architecture import TransformerConfig
from tba_jax.models.hf import adapter_files
from tba_jax.serving.failures import FailureLines

T = TypeVar("T")

_CHECK_TIMEOUT_S = 60.0
_MOST_PAUSE_S = 30.0  # longest pause between two attempts
_MOST_UNUSABLE = 5  # attempts where a server responds, but not usefully
_STEP_S = 0.02  # longest wait of a step
_POLL_S = 0.5
_START = "Start it with vllm serve MODEL --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class ServerError(RuntimeError):
    """The server did not give a usable response in time."""


class _Failed(Exception):
    """An attempt without a usable response.

    Args:
        name: "server_down" (no response now), "server_no_model" (the adapter is not loaded),
            "server_nonsense" (unusable contents) or "server_refused".
        text: what happened.
    """

    def __init__(self, name: str, text: str) -> None:
        super().__init__(text)
        self.name = name
        few = {"server_refused": 1, "server_no_model": _MOST_UNUSABLE}
        few["server_nonsense"] = _MOST_UNUSABLE
        self.most_attempts = few.get(name, math.inf)


@dataclasses.dataclass(eq=False)
class Adapter:
    """An adapter in the server.

    Attributes:
        folder: folder of its files; its name is the adapter's name in the server.
        version: version of the weights.
        users: number of sessions and unfinished requests that sample with the adapter.
    """

    folder: Path
    version: int
    users: int = 0


class InferenceServer:
    """Client of the server; thread-safe, shared by the searchers of a process.

    The environment variable OPENAI_API_KEY has the bearer token of the server, if it needs one.

    Args:
        url: base URL, ending in /v1.
        policy: architecture with adapters.
        base: name of the base model, for the files of adapters.
        folder: parent of the folders of adapters, which the server reads.
        eos_ids: tokens that end a response.
        stop_strings: texts that end a response; None: none.
        longest: tokens that prompt and response may have.
        timeout_s: timeout of an attempt in seconds; attempts are repeated for twice that time.

    Attributes:
        failures: failed attempts, by name.
        stop: set by `close`.
    """

    def __init__(
        self,
        url: str,
        policy: TransformerConfig,
        base: str,
        folder: Path,
        *,
        eos_ids: tuple[int, ...],
        stop_strings: StopStrings | None = None,
        longest: int,
        timeout_s: float,
    ) -> None:
        import urllib3  # slow; other runs need no client

        self.eos_ids, self.stop_strings = eos_ids, stop_strings
        self.failures = FailureLines(f"search.engine {url}")
        self.stop = StopFlag()
        self._url = url.rstrip("/")
        self._policy, self._base, self._folder = policy, base, folder.absolute()
        self._longest, self._timeout_s = longest, timeout_s
        self._http = urllib3.PoolManager(maxsize=256, retries=False)
        self._name = f"tba-{uuid.uuid4().hex[:8]}"
        self._lock = threading.Lock()  # of the counts of users
        self._loading = threading.Lock()
        self._adapters: dict[int, Adapter] = {}

    def check(self) -> None:
        """Ask the server for its model and for one token.

        Raises:
            ValueError: the server or its model cannot be used.
        """
        adapter_files.check(self._policy)
        try:
            cards = self._send("GET", "/models", None, _CHECK_TIMEOUT_S).get("data") or []
            card = next((x for x in cards if not x.get("parent")), None)
            if card is None:
                raise _Failed("server_nonsense", "the server lists no model")
            longest = card.get("max_model_len")
            if longest is not None and longest < self._longest:
                raise _Failed(
                    "server_refused",
                    f"the model {card['id']!r} has max_model_len = {longest}, and prompt and "
                    f"response may have {self._longest} tokens (task.max_prompt_tokens + "
                    "search.max_new_tokens). Lower one of the two settings, or start the server "
                    "with a larger length",
                )
            prompt, key = np.array(self.eos_ids[:1]), np.zeros(2, np.uint32)
            body = _request(str(card["id"]), prompt, key, SamplingSettings(1))
            _read(self._send("POST", "/completions", body, _CHECK_TIMEOUT_S), body)
        except _Failed as error:
            raise ValueError(
                f"config.search.engine = {self._url!r}: {error} ({error.name}). {_START}"
            ) from error

    def unload_earlier(self) -> None:
        """Unload adapters that a killed process of this run left, and delete their folders.

        One process of a run calls this, before another loads adapters.
        """
        for folder in self._folder.glob("tba-*"):
            self._unload(Adapter(folder, 0))

    def session(
        self,
        params: Any,
        *,
        num_slots: int,
        version: int = 0,
        keeps_caches: bool = False,
    ) -> "ServerSession":
        """Return an empty session; `params` are adapters, other arguments as in `Decoder`."""
        del keeps_caches
        return ServerSession(self, num_slots, params, version)

    def acquire(self, version: int, adapters: Any) -> Adapter:
        """Return the adapter of a version; load it if needed, and count one more user.

        Args:
            version: version of the weights.
            adapters: tree of adapters on devices of this process.

        Raises:
            ServerError: the server does not load it.
        """
        with self._loading:
            with self._lock:
                found = self._adapters.get(version)
                if found is not None:
                    found.users += 1
                    return found
            adapter = Adapter(self._folder / f"{self._name}-{version}", version, 1)
            adapter_files.write(adapter.folder, self._policy, adapters, self._base)
            try:
                self._repeat(lambda: self._load(adapter))
            except ServerError:
                shutil.rmtree(adapter.folder, ignore_errors=True)
                raise
            with self._lock:
                self._adapters[version] = adapter
            return adapter

    def share(self, current: Callable[[], Adapter]) -> Adapter:
        """Count one more user of the adapter that `current` returns; return the adapter."""
        with self._lock:
            adapter = current()
            adapter.users += 1
        return adapter

    def release(self, adapter: Adapter) -> None:
        """Subtract one from the users of an adapter; unload an adapter without users."""
        with self._lock:
            adapter.users -= 1
            if adapter.users or self._adapters.pop(adapter.version, None) is None:
                return
        self._unload(adapter)

    def sample(
        self, adapter: Adapter, prompt: np.ndarray, key: np.ndarray, settings: SamplingSettings
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return a response: tokens, int32 [t], log-probs, float32 [t], and whether it has an end.

        Args:
            adapter: the adapter.
            prompt: int32 [s].
            key: uint32 [2]; some servers ignore the seed that it becomes.
            settings: limits, temperature, stop tokens and stop strings.

        Raises:
            ServerError: no attempt gave a usable response.
        """
        most, stops = settings.max_new_tokens, settings.stop_strings
        body = _request(adapter.folder.name, prompt, key, settings)

        def attempt() -> tuple[np.ndarray, np.ndarray, bool]:
            try:
                found = self._send("POST", "/completions", body)
            except _Failed as error:
                if error.name == "server_no_model":  # a restarted server has no adapters
                    with contextlib.suppress(_Failed):  # the next attempt shows whether it is there
                        self._load(adapter)
                raise
            tokens, logprobs = _read(found, body)
            is_stop = np.isin(tokens, body["stop_token_ids"])
            ends = [int(is_stop.argmax()) + 1] if is_stop.any() else []
            if stops is not None and (end := stops.end(tokens, 0)):
                ends.append(end)
            size = min(ends, default=most + 1)
            if size > most > len(tokens):
                raise _Failed(
                    "server_nonsense",
                    f"a response ends after {len(tokens)} of {most} tokens without a stop token "
                    "or stop string of the run",
                )
            return tokens[: min(size, most)], logprobs[: min(size, most)], size <= most

        return self._repeat(attempt)

    def close(self) -> None:
        """Stop retrying requests, and unload the adapters."""
        self.stop.set()
        with self._lock:
            left, self._adapters = list(self._adapters.values()), {}
        for adapter in left:
            self._unload(adapter)

    def _load(self, adapter: Adapter) -> None:
        body = {"lora_name": adapter.folder.name, "lora_path": str(adapter.folder)}
        self._send("POST", "/load_lora_adapter", body)

    def _unload(self, adapter: Adapter) -> None:
        body = {"lora_name": adapter.folder.name}
        try:
            self._send("POST", "/unload_lora_adapter", body, _CHECK_TIMEOUT_S)
        except _Failed as error:
            if error.name != "server_no_model":  # a restarted server has no adapters
                self.failures.report("server_unload", str(error), "request(s) failed as")
        shutil.rmtree(adapter.folder, ignore_errors=True)

    def _repeat(self, attempt: Callable[[], T]) -> T:
        """Return the result of the first attempt that does not fail.

        Raises:
            ServerError: the time is over, or the server refuses.
        """
        start_s, pause_s, attempts = time.monotonic(), 0.5, 0
        while True:
            try:
                return attempt()
            except _Failed as error:
                failed = error
            attempts += 1
            self.failures.report(failed.name, str(failed), "request(s) failed as")
            spent_s = time.monotonic() - start_s
            left_s = 2 * self._timeout_s - spent_s
            if attempts >= failed.most_attempts or left_s <= 0 or self.stop.is_set():
                remedy = _START if failed.name == "server_no_model" else "Repair the server"
                raise ServerError(
                    f"search.engine = {self._url!r}: {failed} ({failed.name}; {attempts} attempts "
                    f"in {spent_s:.0f} s). {remedy}, then run the same command again to continue"
                ) from failed
            self.stop.wait(min(pause_s, left_s))
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the JSON object of a response of status 200; {} for a text.

        Raises:
            _Failed: no response of status 200 has arrived.
        """
        import urllib3

        headers = {"content-type": "application/json"}
        if key := os.environ.get("OPENAI_API_KEY"):
            headers["authorization"] = f"Bearer {key}"
        timeout_s = timeout_s or self._timeout_s
        try:
            found = self._http.request(
                method,
                self._url + path,
                body=None if body is None else json.dumps(body).encode(),
                headers=headers,
                timeout=urllib3.Timeout(connect=min(10.0, timeout_s), read=timeout_s),
            )
        except urllib3.exceptions.ReadTimeoutError:
            raise _Failed("server_down", f"no response within {timeout_s:.0f} s") from None
        except urllib3.exceptions.HTTPError as error:
            raise _Failed("server_down", f"not reachable ({type(error).__name__})") from error
        if found.status == 200:
            try:
                value = json.loads(found.data)
            except ValueError:
                value = None
            return value if isinstance(value, dict) else {}
        text = f"HTTP {found.status} from {path}: {found.data[:300].decode(errors='replace')}"
        if found.status in (408, 429) or found.status >= 500:
            raise _Failed("server_down", text)
        raise _Failed("server_no_model" if found.status == 404 else "server_refused", text)


def _request(
    name: str, prompt: np.ndarray, key: np.ndarray, settings: SamplingSettings
) -> dict[str, Any]:
    """Return the body of a request for one response; it sets every sampling setting."""
    stops = settings.stop_strings
    return {
        "model": name,
        "prompt": prompt.tolist(),
        "n": 1,
        "max_tokens": settings.max_new_tokens,
        "temperature": settings.temperature,
        "seed": (int(key[0]) << 32 | int(key[1])) >> 1,  # servers take 63 bits
        "top_p": 1.0,
        "top_k": -1,
        "min_p": 0.0,
        "presence_penalty": 0.0,
        "frequency_penalty": 0.0,
        "repetition_penalty": 1.0,
        # The stop tokens are these alone, not those of the server's model.
        "ignore_eos": True,
        "stop_token_ids": list(settings.stop_ids or ()),
        "stop": [] if stops is None else list(stops.strings),
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,  # a stop string may be one
        "logprobs": 1,
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
    }


def _read(found: Mapping[str, Any], body: Mapping[str, Any]) -> tuple[np.ndarray, np.ndarray]:
    """Return tokens, int32 [t], and log-probs, float32 [t], of the response to a request.

    Raises:
        _Failed: one of them is missing or does not fit the request.
    """
    choice = (found.get("choices") or [{}])[0]
    ids, sent = choice.get("token_ids"), choice.get("prompt_token_ids")
    values = (choice.get("logprobs") or {}).get("token_logprobs") or []
    wrong = ""
    if found.get("model") != body["model"]:
        wrong = f"is of the model {found.get('model')!r:.80}, not of {body['model']!r}"
    elif sent not in (None, body["prompt"]):
        wrong = "is to a prompt with other tokens"
    elif not isinstance(ids, list) or not all(isinstance(x, int) and x >= 0 for x in ids):
        wrong = "has no token_ids: this server cannot return token IDs"
    elif not ids:
        wrong = "has no tokens"
    elif len(values) != len(ids) or not np.isfinite(np.array(values, float)).all():
        wrong = f"has {len(ids)} tokens without a finite log-prob of each"
    if wrong:
        raise _Failed("server_nonsense", f"the response {wrong}")
    return np.array(ids, np.int32), np.array(values, np.float32)


class ServerSession:
    """Replaces a session on devices: a queue of prompts whose responses come from a server.

    One thread drives it; `num_slots` others send the requests.
    """

    def __init__(self, server: InferenceServer, num_slots: int, params: Any, version: int) -> None:
        self.num_slots, self.version = num_slots, version
        self.statistics = Statistics()
        self._server = server
        self._adapter = server.acquire(version, params)
        self._jobs: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._results: queue.SimpleQueue[Response | Exception] = queue.SimpleQueue()
        self._num_submitted = self._num_open = 0
        for i in range(num_slots):
            Worker(f"server-client-{i}", self._work, server.stop, idle_s=0.0).start()

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
        settings = dataclasses.replace(
            settings,
            stop_ids=self._server.eos_ids if settings.stop_ids is None else settings.stop_ids,
            stop_strings=settings.stop_strings or self._server.stop_strings,
        )
        for j, key in enumerate(keys):
            own = settings.temperature if temperatures is None else float(temperatures[j])
            each = dataclasses.replace(settings, temperature=own)
            self._jobs.put(functools.partial(self._sample, index, j, prompt, key, each))
        return index

    def swap(self, params: Any, version: int) -> None:
        """Sample later requests with other weights."""
        before, self._adapter = self._adapter, self._server.acquire(version, params)
        self.version = version
        self._server.release(before)

    def forget(self, conversation: np.ndarray) -> None:
        """Do nothing: the server decides which caches it keeps."""

    def step(self) -> list[Response]:
        """Wait a short time for responses, and return those that have arrived.

        Raises:
            ServerError: a request got no usable response.
        """
        start_s = time.perf_counter()
        self._server.stop.check()
        found: list[Response] = []
        wait_s = _STEP_S if self._num_open else 0.0
        while True:
            try:
                response = self._results.get(timeout=wait_s)
            except queue.Empty:
                break
            if isinstance(response, Exception):
                raise response
            found.append(response)
            wait_s = 0.0
        self._num_open -= len(found)
        self.statistics.tokens += sum(len(y.tokens) for y in found)
        self.statistics.decode_s += time.perf_counter() - start_s
        return found

    def run(self) -> Iterator[Response]:
        """Yield responses as they arrive, until the session is idle."""
        while not self.is_idle:
            yield from self.step()

    def _work(self) -> bool:
        try:
            self._jobs.get(timeout=_POLL_S)()
        except queue.Empty:
            return False
        return True

    def _sample(
        self, index: int, sample: int, prompt: np.ndarray, key: np.ndarray, own: SamplingSettings
    ) -> None:
        """Put the response to one request, or an error, into the results."""
        adapter = self._server.share(lambda: self._adapter)
        try:
            tokens, logprobs, has_eos = self._server.sample(adapter, prompt, key, own)
            version = adapter.version
            versions = np.full(len(tokens), version, np.int32)
            row = (tokens, logprobs, has_eos, version, version, own.temperature, versions)
            self._results.put(Response(index, sample, *row))
        except Exception as error:  # raised again by the thread of the session
            self._results.put(error)
        finally:
            self._server.release(adapter)
