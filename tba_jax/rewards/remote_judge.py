# SPDX-License-Identifier: Apache-2.0
"""Rewards over the network: an HTTP service, or a language model that judges.

A user's file makes a judge, and the run names it: `--config.task.reward=my_rewards.py:judge`.

    judge = Judge("http://127.0.0.1:8000/v1", model="qwen", prompt="Rate: {prompt} {completion}")

The judge runs in the reward processes, which share nothing: each process has its own limits and
cache. Invariant: a request that fails gives no reward and is counted by name.
"""

import collections
import concurrent.futures
import json
import os
import re
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import urllib3

from tba_jax.rewards.functions import Missing
from tba_jax.rewards.messages import text_of

_MOST_TEXT = 300  # characters of an answer in a message
_RETRIED = frozenset({408, 409, 425, 429, 500, 502, 503, 504})
_MOST_REST_S = 60.0


def last_number(text: str) -> float:
    """Return the last number of a judge's answer.

    Raises:
        ValueError: the answer contains no number.
    """
    found = re.findall(r"[-+]?\d+(?:\.\d+)?", text)
    if not found:
        raise ValueError("the response contains no number")
    return float(found[-1])


class HttpReward:
    """A reward function that sends requests to an HTTP service, several at a time.

    Args:
        url: URL that receives a POST request with JSON for each completion.
        body: (prompt, completion, columns) -> JSON of the request.
        read: JSON of the response -> reward; raises an error for an invalid response.
        headers: HTTP headers of each request.
        concurrency: maximum number of concurrent requests of a process.
        timeout_s: timeout of a request.
        retries: maximum number of retries after an error, a temporary refusal or a timeout.
        per_second: maximum number of requests per second of a process; 0: no limit.
        cache_size: number of responses that a process keeps, so that equal requests are sent once.
    """

    def __init__(
        self,
        url: str,
        body: Callable[[str, str, Mapping[str, Any]], Any],
        read: Callable[[Any], float],
        *,
        headers: Mapping[str, str] | None = None,
        concurrency: int = 16,
        timeout_s: float = 30.0,
        retries: int = 3,
        per_second: float = 0.0,
        cache_size: int = 10_000,
    ) -> None:
        self._url, self._body, self._read = url, body, read
        self._headers = {"content-type": "application/json", **(headers or {})}
        self._retries, self._cache_size = retries, cache_size
        self._pause_s = 1 / per_second if per_second else 0.0
        self._http = urllib3.PoolManager(
            maxsize=concurrency, retries=False, timeout=urllib3.Timeout(timeout_s)
        )
        self._threads = concurrent.futures.ThreadPoolExecutor(concurrency, "judge")
        self._lock = threading.Lock()
        self._next_s = 0.0
        self._cache: collections.OrderedDict[bytes, float] = collections.OrderedDict()

    def __call__(
        self, prompts: Sequence[Any], completions: Sequence[Any], **columns: Sequence[Any]
    ) -> list[float | Missing]:
        """Return a reward or a named failure for each response."""

        def one(i: int) -> float | Missing:
            values = {name: column[i] for name, column in columns.items()}
            body = self._body(text_of(prompts[i]), text_of(completions[i]), values)
            return self._ask(json.dumps(body, sort_keys=True).encode())

        return list(self._threads.map(one, range(len(completions))))

    def _ask(self, body: bytes) -> float | Missing:
        with self._lock:
            if body in self._cache:
                self._cache.move_to_end(body)
                return self._cache[body]
        found = Missing("judge_down", "")
        for attempt in range(self._retries + 1):
            self._wait()
            answer = self._once(body)
            if isinstance(answer, int | float):
                with self._lock:
                    self._cache[body] = answer
                    if len(self._cache) > self._cache_size:
                        self._cache.popitem(last=False)
                return answer
            found, rest_s = answer
            if rest_s is None or attempt == self._retries:
                break
            time.sleep(min(rest_s or 0.5 * 2**attempt, _MOST_REST_S))
        return found

    def _wait(self) -> None:
        """Wait until the rate limit permits a request."""
        with self._lock:
            now = time.monotonic()
            start_s = max(now, self._next_s)
            self._next_s = start_s + self._pause_s
        time.sleep(start_s - now)

    def _once(self, body: bytes) -> float | tuple[Missing, float | None]:
        """Return the reward, or (failure, seconds to wait before a retry; None: no retry)."""
        try:
            answer = self._http.request("POST", self._url, body=body, headers=self._headers)
        except urllib3.exceptions.TimeoutError as error:
            is_slow = isinstance(error, urllib3.exceptions.ReadTimeoutError)
            return Missing("judge_timeout" if is_slow else "judge_down", f"{error}"), 0.0
        except urllib3.exceptions.HTTPError as error:
            return Missing("judge_down", f"{error}"), 0.0
        shown = answer.data[:_MOST_TEXT].decode(errors="replace")
        if answer.status != 200:
            text = f"{self._url} answers HTTP {answer.status}: {shown}"
            reason = "judge_rate_limit" if answer.status == 429 else "judge_error"
            if answer.status not in _RETRIED:
                return Missing(reason, text), None
            rest = answer.headers.get("retry-after", "")
            return Missing(reason, text), float(rest) if rest.isdigit() else 0.0
        try:
            return float(self._read(json.loads(answer.data)))
        except Exception as error:  # the user's parser failed, or the answer is not JSON
            text = f"{type(error).__name__}: {error}; the answer was {shown!r}"
            return Missing("judge_nonsense", text), None


class Judge(HttpReward):
    """A language model behind an OpenAI-compatible address that rates each response.

    Args:
        url: address of the API, ending in /v1.
        model: name of the model at that address.
        prompt: text of a request, with {prompt}, {completion} and {COLUMN} filled in.
        parse: answer of the model -> reward; raises an exception if the answer has no reward.
        system: system message of each request; "": none.
        key_variable: environment variable with the API key.
        sampling: further fields of each request.
        options: arguments of `HttpReward`.
    """

    def __init__(
        self,
        url: str,
        *,
        model: str,
        prompt: str,
        parse: Callable[[str], float] = last_number,
        system: str = "",
        key_variable: str = "OPENAI_API_KEY",
        sampling: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> None:
        def body(text: str, completion: str, columns: Mapping[str, Any]) -> Any:
            facts = {**columns, "prompt": text, "completion": completion}
            asked = re.sub(r"\{(\w+)\}", lambda x: str(facts.get(x[1], x[0])), prompt)
            messages = [{"role": "system", "content": system}] if system else []
            messages.append({"role": "user", "content": asked})
            return {"model": model, "messages": messages, "temperature": 0, **(sampling or {})}

        def read(answer: Any) -> float:
            return parse(answer["choices"][0]["message"]["content"])

        key = os.environ.get(key_variable)
        headers = {"authorization": f"Bearer {key}"} if key else None
        super().__init__(f"{url}/chat/completions", body, read, headers=headers, **options)
