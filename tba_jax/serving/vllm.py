# SPDX-License-Identifier: Apache-2.0
"""Responses that an inference server with vLLM's API samples (`search.engine`).

Prompts go out as token IDs; token IDs come back with the log-prob of each. The server loads the
weights of a version as a folder of adapters under a new name. A response is sampled with the newest
weights at the time of its request, so all of its tokens have one version.

Failures have the names "server_down" (no response now), "server_no_model" (the adapter is not
loaded), "server_nonsense" (unusable contents) and "server_refused". Invariants: a response has the
version of the adapter that it names, and every token a finite log-prob; a request that fails is
sent again, or ends the run.
"""

import collections
import contextlib
import dataclasses
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

import jax
import numpy as np

from tba_jax.decoding.requests import Response, SamplingSettings, Statistics
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.models import lora
from tba_jax.models.architecture import TransformerConfig
from tba_jax.models.hf import adapter_files
from tba_jax.serving.failures import Failure, FailureLines

T = TypeVar("T")

_CHECK_TIMEOUT_S = 60.0
_MOST_PAUSE_S = 30.0  # longest pause between two attempts
_MOST_ATTEMPTS = {"server_down": math.inf, "server_refused": 1}  # of one name; others: 5
_STATUSES = {404: "server_no_model", 408: "server_down", 429: "server_down"}
_KEPT = 2  # versions in the server: requests under way end with the one that they began with
_STEP_S = 0.02  # longest wait of a step
_START = "Start it with vllm serve MODEL --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"
# Parameters of a request besides its own, so that every sampling setting is set.
_DEFAULTS = {
    "n": 1,
    "top_p": 1.0,
    "top_k": -1,
    "min_p": 0.0,
    "presence_penalty": 0.0,
    "frequency_penalty": 0.0,
    "repetition_penalty": 1.0,
    "ignore_eos": True,  # the stop tokens are those of the run alone
    "skip_special_tokens": False,  # a stop string may be one
    "include_stop_str_in_output": True,
    "return_token_ids": True,
    "return_tokens_as_token_ids": True,
    "logprobs": 1,
}


class ServerError(RuntimeError):
    """The server did not give a usable response in time."""


class InferenceServer:
    """Client of the server; thread-safe, shared by the searchers of a process.

    The environment variable OPENAI_API_KEY has the bearer token of the server, if it needs one.

    Args:
        url: base URL, ending in /v1.
        policy: architecture with adapters.
        base: name of the base model, for the files of adapters.
        folder: parent of the folders of adapters, which the server reads.
        eos_ids, stop_strings: tokens and texts that end a response.
        longest: tokens that prompt and response may have.
        timeout_s: timeout of an attempt in seconds; attempts are repeated for twice that time.
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

        self.eos_ids, self.stop_strings, self._longest = eos_ids, stop_strings, longest
        self.failures, self._is_closed = FailureLines(f"search.engine {url}"), threading.Event()
        self._policy, self._base, self._folder = policy, base, folder.absolute()
        self._url, self._timeout_s = url.rstrip("/"), timeout_s
        self._http = urllib3.PoolManager(maxsize=256, retries=False)
        self._name, self._loading = f"tba-{uuid.uuid4().hex[:8]}", threading.Lock()
        self._adapters: dict[int, Path] = {}  # loaded ones by version, the newest last

    def check(self, *, loads: bool = True) -> None:
        """Ask the server for its model and for one token, and with `loads` for one of an adapter.

        Raises ValueError if the server or its model cannot be used, or an adapter has no effect.
        """
        adapter_files.check(self._policy)
        try:
            cards = self._send("GET", "/models", None, _CHECK_TIMEOUT_S).get("data") or []
            card = next((x for x in cards if not x.get("parent")), None)
            if card is None:
                raise Failure("server_nonsense", "the server lists no model")
            longest = card.get("max_model_len") or self._longest
            if longest < self._longest:
                raise Failure(
                    "server_refused",
                    f"the model {card['id']!r} has max_model_len = {longest}, and prompt and "
                    f"response may have {self._longest} tokens (task.max_prompt_tokens + "
                    "search.max_new_tokens). Lower one of the two settings, or start the server "
                    "with a larger length",
                )
            prompt, key = np.array(self.eos_ids[:1]), np.zeros(2, np.uint32)
            one = (prompt, key, SamplingSettings(1), _CHECK_TIMEOUT_S)
            _, before, _ = self._complete(str(card["id"]), *one)
            if not loads:
                return
            adapters = jax.tree.map(lambda x: x + 0.1, lora.init_adapters(self._policy, 0))
            folder = self._write("check", adapters)
            try:
                self._load(folder)
                _, after, _ = self._complete(folder.name, *one)
            finally:
                self._unload(folder)
            if np.array_equal(before, after):
                raise Failure("server_nonsense", "an adapter changes no log-prob")
        except Failure as error:
            text = f"config.search.engine = {self._url!r}: {error} ({error.name}). {_START}"
            raise ValueError(text) from error

    def session(self, params: Any, *, num_slots: int, version: int, **_: Any) -> "ServerSession":
        """Return an empty session; `params` are adapters, other arguments as in `Decoder`."""
        return ServerSession(self, num_slots, params, version)

    def publish(self, version: int, adapters: Any) -> None:
        """Load a version's adapters (a tree), unless they are loaded; later requests use them.

        Raises ServerError if the server does not load them.
        """
        with self._loading:
            if version in self._adapters:
                return
            folder = self._write(version, adapters)
            try:
                self._repeat(lambda: self._load(folder))
            except ServerError:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self._adapters[version] = folder
            while len(self._adapters) > _KEPT:
                self._unload(self._adapters.pop(next(iter(self._adapters))))

    def sample(
        self, prompt: np.ndarray, key: np.ndarray, settings: SamplingSettings
    ) -> tuple[np.ndarray, np.ndarray, bool, int]:
        """Return tokens, int32 [t], log-probs, float32 [t], whether they have an end, and version.

        The prompt is int32 [s], the key uint32 [2]; some servers ignore the seed that it becomes.
        Raises ServerError if no attempt gave a usable response.
        """

        def attempt() -> tuple[np.ndarray, np.ndarray, bool, int]:
            version, folder = list(self._adapters.items())[-1]
            try:
                return *self._complete(folder.name, prompt, key, settings), version
            except Failure as error:
                if error.name == "server_no_model":  # a restarted server has no adapters
                    with contextlib.suppress(Failure):  # the next attempt shows whether it is there
                        self._load(folder)
                raise

        return self._repeat(attempt)

    def close(self) -> None:
        """Stop retrying requests, and unload the adapters."""
        self._is_closed.set()
        with self._loading:
            while self._adapters:
                self._unload(self._adapters.popitem()[1])

    def _write(self, name: object, adapters: Any) -> Path:
        folder = self._folder / f"{self._name}-{name}"
        adapter_files.write(folder, self._policy, adapters, self._base)
        return folder

    def _load(self, folder: Path) -> None:
        body = {"lora_name": folder.name, "lora_path": str(folder)}
        self._send("POST", "/load_lora_adapter", body)

    def _unload(self, folder: Path) -> None:
        """Unload an adapter, and delete its folder."""
        body = {"lora_name": folder.name}
        try:
            self._send("POST", "/unload_lora_adapter", body, _CHECK_TIMEOUT_S)
        except Failure as error:
            if error.name != "server_no_model":  # a restarted server has no adapters
                self.failures.report("server_unload", str(error), "request(s) failed as")
        shutil.rmtree(folder, ignore_errors=True)

    def _complete(
        self,
        name: str,
        prompt: np.ndarray,
        key: np.ndarray,
        settings: SamplingSettings,
        timeout_s: float = 0.0,
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return one response of the model or adapter of this name, as `_read`."""
        stops = settings.stop_strings
        body = _DEFAULTS | {
            "model": name,
            "prompt": prompt.tolist(),
            "max_tokens": settings.max_new_tokens,
            "temperature": settings.temperature,
            "seed": (int(key[0]) << 32 | int(key[1])) >> 1,  # servers take 63 bits
            "stop_token_ids": list(settings.stop_ids or ()),
            "stop": [] if stops is None else list(stops.strings),
        }
        return _read(self._send("POST", "/completions", body, timeout_s), body, stops)

    def _repeat(self, attempt: Callable[[], T]) -> T:
        """Return the result of the first attempt that does not fail, or raise ServerError."""
        start_s, pause_s = time.monotonic(), 0.5
        attempts = collections.Counter[str]()  # by the name of their failure
        while True:
            try:
                return attempt()
            except Failure as error:
                failed = error
            attempts[failed.name] += 1
            self.failures.report(failed.name, str(failed), "request(s) failed as")
            spent_s = time.monotonic() - start_s
            left_s = 2 * self._timeout_s - spent_s
            is_last = attempts[failed.name] >= _MOST_ATTEMPTS.get(failed.name, 5)
            if is_last or left_s <= 0 or self._is_closed.wait(min(pause_s, left_s)):
                remedy = _START if failed.name == "server_no_model" else "Repair the server"
                raise ServerError(
                    f"search.engine = {self._url!r}: {failed} ({failed.name}; "
                    f"{attempts.total()} attempts in {spent_s:.0f} s). {remedy}, then run the "
                    "same command again to continue"
                ) from failed
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _send(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float = 0.0
    ) -> dict[str, Any]:
        """Return the JSON object of a response of status 200, {} for a text, or raise Failure."""
        import urllib3

        key, timeout_s = os.environ.get("OPENAI_API_KEY"), timeout_s or self._timeout_s
        try:
            found = self._http.request(
                method,
                self._url + path,
                json=body,
                headers={"authorization": f"Bearer {key}"} if key else None,
                timeout=urllib3.Timeout(connect=min(10.0, timeout_s), read=timeout_s),
            )
        except urllib3.exceptions.ReadTimeoutError:
            raise Failure("server_down", f"no response within {timeout_s:.0f} s") from None
        except urllib3.exceptions.HTTPError as error:
            raise Failure("server_down", f"not reachable ({type(error).__name__})") from error
        if found.status == 200:
            with contextlib.suppress(ValueError):  # a text
                return dict(found.json())
            return {}
        text = f"HTTP {found.status} from {path}: {found.data[:300].decode(errors='replace')}"
        other = "server_down" if found.status >= 500 else "server_refused"
        raise Failure(_STATUSES.get(found.status, other), text)


def _read(
    found: Mapping[str, Any], body: Mapping[str, Any], stops: StopStrings | None
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Return tokens, int32 [t], log-probs, float32 [t], and whether the response has an end.

    Raises Failure if they are missing, or do not fit the request.
    """
    choice, most = (found.get("choices") or [{}])[0], body["max_tokens"]
    ids, sent = choice.get("token_ids") or [], choice.get("prompt_token_ids")
    values = (choice.get("logprobs") or {}).get("token_logprobs") or []
    wrong, size = "", most + 1
    if found.get("model") != body["model"]:
        wrong = f"is of the model {found.get('model')!r:.80}, not of {body['model']!r}"
    elif sent not in (None, body["prompt"]):
        wrong = "is to a prompt with other tokens"
    elif not ids or not all(isinstance(x, int) and x >= 0 for x in ids):
        wrong = "has no token_ids: this server cannot return token IDs"
    elif len(values) != len(ids) or not np.isfinite(np.array(values, float)).all():
        wrong = f"has {len(ids)} tokens without a finite log-prob of each"
    else:
        ends = [i + 1 for i, token in enumerate(ids) if token in body["stop_token_ids"]][:1]
        if stops is not None and (end := stops.end(np.array(ids), 0)):
            ends.append(end)
        size = min(ends, default=size)
        if size > most > len(ids):
            wrong = f"ends after {len(ids)} of {most} tokens without a stop token or stop string"
    if wrong:
        raise Failure("server_nonsense", f"the response {wrong}")
    kept = min(size, most)
    return np.array(ids[:kept], np.int32), np.array(values[:kept], np.float32), size <= most


class ServerSession:
    """Replaces `decoding.engine.Session`, whose methods it has: a server samples the responses.

    One thread drives it; each response has a thread that sends its request.
    """

    def __init__(self, server: InferenceServer, num_slots: int, params: Any, version: int) -> None:
        self._server, self.num_slots, self.statistics = server, num_slots, Statistics()
        self._results: queue.SimpleQueue[Response | Exception] = queue.SimpleQueue()
        self._num_submitted = self._num_open = 0
        self.swap(params, version)

    @property
    def is_idle(self) -> bool:
        return not self._num_open

    @property
    def room(self) -> int:
        return self.num_slots - self._num_open

    def swap(self, params: Any, version: int) -> None:
        self._server.publish(version, params)
        self.version = version

    def submit(
        self,
        prompt: np.ndarray,
        keys: np.ndarray,
        settings: SamplingSettings,
        temperatures: np.ndarray,
    ) -> int:
        """Request responses to one prompt; arguments and result as of `Session.submit`."""
        number, server = self._num_submitted, self._server
        self._num_submitted += 1
        self._num_open += len(keys)
        ends: dict[str, Any] = {"stop_strings": settings.stop_strings or server.stop_strings}
        ends["stop_ids"] = server.eos_ids if settings.stop_ids is None else settings.stop_ids
        for j, key in enumerate(keys):
            own = dataclasses.replace(settings, temperature=float(temperatures[j]), **ends)
            row = (number, j, prompt, key, own)
            threading.Thread(target=self._sample, args=row, daemon=True).start()
        return number

    def forget(self, conversation: np.ndarray) -> None:
        """Do nothing: the server decides which caches it keeps."""

    def step(self) -> list[Response]:
        """Wait a short time for responses; return those that have arrived, or raise ServerError."""
        start_s, found = time.perf_counter(), list[Response]()
        with contextlib.suppress(queue.Empty):
            while True:
                response = self._results.get(timeout=_STEP_S if self._num_open and not found else 0)
                if isinstance(response, Exception):
                    raise response
                found.append(response)
        self._num_open -= len(found)
        self.statistics.tokens += sum(len(y.tokens) for y in found)
        self.statistics.decode_s += time.perf_counter() - start_s
        return found

    def run(self) -> Iterator[Response]:
        while not self.is_idle:
            yield from self.step()

    def _sample(
        self, number: int, j: int, prompt: np.ndarray, key: np.ndarray, own: SamplingSettings
    ) -> None:
        """Put the response to one request, or an error, into the results."""
        try:
            tokens, logprobs, has_end, version = self._server.sample(prompt, key, own)
            versions = np.full(len(tokens), version, np.int32)
            row = (tokens, logprobs, has_end, version, version, own.temperature, versions)
            self._results.put(Response(number, j, *row))
        except Exception as error:  # raised again by the thread of the session
            self._results.put(error)
