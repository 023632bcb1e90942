# SPDX-License-Identifier: Apache-2.0
"""Client of an inference server with vLLM's OpenAI-compatible API (`search.engine`).

Prompts go out as token IDs. Responses come back as token IDs with the log-prob of each. The weights
of a version go out as a folder of adapters, which the server loads under a new name.

Invariants: a response has the version of the adapter that it names, and every token a finite
log-prob; a request that fails is sent again, or ends the run.
"""

import dataclasses
import json
import math
import os
import shutil
import threading
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import numpy as np

from tba_jax.devices.worker import StopFlag
from tba_jax.environments.failures import FailureLines
from tba_jax.models.architecture import TransformerConfig
from tba_jax.models.hf import adapter_files

T = TypeVar("T")

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the bearer token of the server."""
_CONNECTIONS = 256
_CHECK_TIMEOUT_S = 60.0
_MOST_PAUSE_S = 30.0
_MOST_TEXT = 300  # characters of a response in a message
_FEW = 5  # attempts where a server responds, but not usefully
_START = "Start it with vllm serve MODEL --enable-lora and VLLM_ALLOW_RUNTIME_LORA_UPDATING=1"


class ServerError(RuntimeError):
    """The server did not give a usable response in time."""


class _Failed(Exception):
    """An attempt without a usable response.

    Args:
        name: name of the failure.
        text: what happened.
        most: maximum number of attempts.
        rest_s: pause before the next attempt; 0: grows with the attempts.
    """

    def __init__(self, name: str, text: str, most: float = math.inf, rest_s: float = 0.0) -> None:
        super().__init__(text)
        self.name, self.most, self.rest_s = name, most, rest_s


class Sampling(NamedTuple):
    """Sampling settings of a response.

    Attributes:
        max_tokens: length limit.
        temperature: divides the logits.
        seed: seed of the random numbers, which some servers ignore.
        stop_ids: tokens that end the response.
        stop: texts that end the response.
    """

    max_tokens: int
    temperature: float
    seed: int
    stop_ids: Sequence[int]
    stop: Sequence[str] = ()


@dataclasses.dataclass(eq=False)
class Loaded:
    """An adapter in the server.

    Attributes:
        name: name of the adapter in the server.
        folder: folder of its files.
        version: version of the weights.
        users: number of searchers and unfinished requests that sample with the adapter.
        loaded_s: time of the last repeated load, by `time.monotonic`; 0: loaded once.
    """

    name: str
    folder: Path
    version: int
    users: int = 0
    loaded_s: float = 0.0


class InferenceServer:
    """Client of the server; thread-safe, shared by the searchers of a process.

    Args:
        url: base URL, ending in /v1.
        policy: architecture with adapters.
        base: name of the base model, for the files of adapters.
        folder: parent of the folders of adapters, which the server reads.
        longest: tokens that prompt and response may have.
        probe_id: ID of a token that the model has, as the prompt of `check`.
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
        longest: int,
        probe_id: int,
        timeout_s: float,
    ) -> None:
        import urllib3  # slow; other runs need no client

        self._url = url.rstrip("/")
        self._policy, self._base, self._folder = policy, base, folder
        self._longest, self._probe_id, self._timeout_s = longest, probe_id, timeout_s
        self._http = urllib3.PoolManager(maxsize=_CONNECTIONS, retries=False)
        self._session = uuid.uuid4().hex[:8]
        self._lock = threading.Lock()  # of the counts of users
        self._loading = threading.Lock()
        self._loaded: dict[int, Loaded] = {}
        self.failures = FailureLines(f"search.engine {self._url}")
        self.stop = StopFlag()

    def check(self) -> None:
        """Ask the server for its model and for one token.

        Raises:
            ValueError: the server or its model cannot be used.
        """
        adapter_files.check(self._policy)
        try:
            found = _read_json(self._once("GET", "/models", None, _CHECK_TIMEOUT_S))
            cards = found.get("data") or []
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
            prompt = np.array([self._probe_id], np.int32)
            body = self._body(str(card["id"]), prompt, Sampling(1, 1.0, 0, ()))
            raw = self._once("POST", "/completions", body, _CHECK_TIMEOUT_S)
            self._read(raw, str(card["id"]), prompt)
        except _Failed as error:
            raise ValueError(
                f"config.search.engine = {self._url!r}: {error} ({error.name}). {_START}"
            ) from error

    def unload_earlier(self) -> None:
        """Unload adapters that a killed process of this run left, and delete their folders.

        One process of a run calls this, before another loads adapters.
        """
        for folder in self._folder.glob("tba-*"):
            self._unload(Loaded(folder.name, folder, 0))

    def acquire(self, version: int, adapters: Any) -> Loaded:
        """Return the adapter of a version; load it if needed, and count one more user.

        Args:
            version: version of the weights.
            adapters: tree of adapters on devices of this process.

        Raises:
            ServerError: the server does not load it.
        """
        with self._loading:
            with self._lock:
                if (found := self._loaded.get(version)) is not None:
                    found.users += 1
                    return found
            name = f"tba-{self._session}-{version}"
            loaded = Loaded(name, (self._folder / name).absolute(), version, 1)
            adapter_files.write(loaded.folder, self._policy, adapters, self._base)
            try:
                self._ask("/load_lora_adapter", _load_request(loaded), lambda raw: raw)
            except ServerError:
                shutil.rmtree(loaded.folder, ignore_errors=True)
                raise
            with self._lock:
                self._loaded[version] = loaded
            return loaded

    def share(self, loaded: Loaded) -> Loaded:
        """Count one more user of an adapter that is in use; return the adapter."""
        with self._lock:
            loaded.users += 1
        return loaded

    def release(self, loaded: Loaded) -> None:
        """Subtract one from the users of an adapter; unload an adapter without users."""
        with self._lock:
            loaded.users -= 1
            if loaded.users or self._loaded.pop(loaded.version, None) is None:
                return
        self._unload(loaded)

    def sample(
        self,
        loaded: Loaded,
        prompt: np.ndarray,
        sampling: Sampling,
        end: Callable[[np.ndarray], int],
    ) -> tuple[np.ndarray, np.ndarray, bool]:
        """Return a response: tokens, int32 [t], log-probs, float32 [t], and whether it has an end.

        Args:
            loaded: the adapter.
            prompt: token IDs.
            sampling: how to sample.
            end: tokens -> their number up to the end of the response; 0 without an end.

        Raises:
            ServerError: no attempt gave a usable response.
        """

        def load_again(since_s: float) -> None:
            with self._loading:
                if loaded.loaded_s > since_s:
                    return  # another request has found it missing
                try:
                    self._once("POST", "/load_lora_adapter", _load_request(loaded))
                except _Failed as error:  # the next attempt shows whether the adapter is there
                    self.failures.report(error.name, str(error), "request(s) failed as")
                loaded.loaded_s = time.monotonic()

        def read(raw: bytes) -> tuple[np.ndarray, np.ndarray, bool]:
            tokens, logprobs = self._read(raw, loaded.name, prompt)
            most, size = sampling.max_tokens, end(tokens)
            if not size and len(tokens) < most:
                raise _Failed(
                    "server_nonsense",
                    f"a response ends after {len(tokens)} of {most} tokens without a stop token "
                    "or stop string of the run",
                    _FEW,
                )
            has_end = 0 < size <= most
            size = size if has_end else most
            return tokens[:size], logprobs[:size], has_end

        body = self._body(loaded.name, prompt, sampling)
        return self._ask("/completions", body, read, load_again)

    def close(self) -> None:
        """Stop retrying requests, and unload the adapters."""
        self.stop.set()
        with self._lock:
            left, self._loaded = list(self._loaded.values()), {}
        for loaded in left:
            self._unload(loaded)

    def _unload(self, loaded: Loaded) -> None:
        try:
            self._once("POST", "/unload_lora_adapter", {"lora_name": loaded.name}, _CHECK_TIMEOUT_S)
        except _Failed as error:
            if error.name != "server_no_model":  # a restarted server has no adapters
                self.failures.report("server_unload", str(error), "request(s) failed as")
        shutil.rmtree(loaded.folder, ignore_errors=True)

    def _ask(
        self,
        path: str,
        body: Mapping[str, Any],
        read: Callable[[bytes], T],
        load_again: Callable[[float], None] | None = None,
    ) -> T:
        """Send a request until its response can be read.

        Args:
            path: path below the base URL.
            body: JSON of the request.
            read: returns the result, or raises `_Failed`.
            load_again: loads the adapter again after an attempt for which the server did not have
                it; its argument is the start time of the attempt.

        Raises:
            ServerError: the time is over, or the server refuses.
        """
        start_s = time.monotonic()
        pause_s, attempts = 0.5, 0
        while True:
            since_s = time.monotonic()
            try:
                return read(self._once("POST", path, body))
            except _Failed as error:
                failed = error
            attempts += 1
            self.failures.report(failed.name, str(failed), "request(s) failed as")
            spent_s = time.monotonic() - start_s
            left_s = 2 * self._timeout_s - spent_s
            if attempts >= failed.most or left_s <= 0 or self.stop.is_set():
                remedy = _START if failed.name == "server_no_model" else "Repair the server"
                raise ServerError(
                    f"search.engine = {self._url!r}: {failed} ({failed.name}; {attempts} attempts "
                    f"in {spent_s:.0f} s). {remedy}, then run the same command again to continue"
                ) from failed
            if load_again is not None and failed.name == "server_no_model":
                load_again(since_s)
            self.stop.wait(min(failed.rest_s or pause_s, left_s))
            pause_s = min(2 * pause_s, _MOST_PAUSE_S)

    def _once(
        self, method: str, path: str, body: Mapping[str, Any] | None, timeout_s: float = 0.0
    ) -> bytes:
        """Return the body of a response of status 200.

        Raises:
            _Failed: no response of status 200 has arrived.
        """
        import urllib3

        headers = {"content-type": "application/json"}
        if key := os.environ.get(KEY_VARIABLE):
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
            text = f"no response within {timeout_s:.0f} s"
            raise _Failed("server_timeout", text) from None
        except urllib3.exceptions.HTTPError as error:
            raise _Failed("server_down", f"not reachable ({type(error).__name__})") from error
        if found.status == 200:
            return found.data
        shown = found.data[:_MOST_TEXT].decode(errors="replace")
        text = f"HTTP {found.status} from {path}: {shown}"
        rest = found.headers.get("retry-after", "")
        rest_s = min(float(rest), _MOST_PAUSE_S) if rest.isdigit() else 0.0
        if found.status == 404:
            raise _Failed("server_no_model", text, _FEW)
        if found.status == 429:
            raise _Failed("server_rate_limit", text, rest_s=rest_s)
        if found.status == 408 or found.status >= 500:
            raise _Failed("server_error", text, rest_s=rest_s)
        raise _Failed("server_refused", text, 1)

    @staticmethod
    def _body(name: str, prompt: np.ndarray, sampling: Sampling) -> dict[str, Any]:
        """Return the body of a request for one response; it sets every sampling setting."""
        return {
            "model": name,
            "prompt": prompt.tolist(),
            "n": 1,
            "max_tokens": sampling.max_tokens,
            "temperature": sampling.temperature,
            "seed": sampling.seed,
            "top_p": 1.0,
            "top_k": -1,
            "min_p": 0.0,
            "presence_penalty": 0.0,
            "frequency_penalty": 0.0,
            "repetition_penalty": 1.0,
            # The stop tokens are these alone, not those of the server's model.
            "ignore_eos": True,
            "stop_token_ids": list(sampling.stop_ids),
            "stop": list(sampling.stop),
            "include_stop_str_in_output": True,
            "skip_special_tokens": False,  # a stop string may be one
            "logprobs": 1,
            "return_token_ids": True,
            "return_tokens_as_token_ids": True,
        }

    @staticmethod
    def _read(raw: bytes, name: str, prompt: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and log-probs of a response.

        Raises:
            _Failed: one of them is missing or does not fit the request.
        """
        found = _read_json(raw)
        choice = (found.get("choices") or [{}])[0]
        if found.get("model") != name:
            text = f"the response is of the model {found.get('model')!r:.80}, not of {name!r}"
            raise _Failed("server_wrong_version", text, _FEW)
        ids = choice.get("token_ids")
        if not isinstance(ids, list):
            text = "the response has no token_ids: this server cannot return token IDs"
            raise _Failed("server_no_token_ids", text, _FEW)
        sent = choice.get("prompt_token_ids")
        if sent is not None and list(sent) != prompt.tolist():
            raise _Failed("server_nonsense", "the server changed the tokens of a prompt", _FEW)
        values = (choice.get("logprobs") or {}).get("token_logprobs") or []
        is_finite = all(isinstance(x, float | int) and math.isfinite(x) for x in values)
        if len(values) != len(ids) or not is_finite:
            text = f"the response has {len(ids)} tokens without a finite log-prob of each"
            raise _Failed("server_no_logprobs", text, _FEW)
        if not ids or not all(isinstance(x, int) and x >= 0 for x in ids):
            raise _Failed("server_nonsense", "the response has no tokens", _FEW)
        return np.array(ids, np.int32), np.array(values, np.float32)


def _load_request(loaded: Loaded) -> dict[str, str]:
    return {"lora_name": loaded.name, "lora_path": str(loaded.folder)}


def _read_json(raw: bytes) -> dict[str, Any]:
    try:
        found = json.loads(raw)
    except ValueError:
        found = None
    if not isinstance(found, dict):
        shown = raw[:_MOST_TEXT].decode(errors="replace")
        raise _Failed("server_nonsense", f"the response is not a JSON object: {shown}", _FEW)
    return found
