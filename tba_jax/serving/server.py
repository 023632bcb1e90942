# SPDX-License-Identifier: Apache-2.0
"""HTTP routes over a decode session, for OpenAI clients and token-exact training clients.

    POST /inference/v1/generate   token IDs in, token IDs and log-probs out
    POST /v1/completions          text or token IDs
    POST /v1/chat/completions     messages, tools
    GET  /v1/models, /health, /server_info;  POST /pause, /resume

Invariant: a request without a valid token is refused before its body is read. A web page cannot
send a write: without a token, a write needs the content type JSON. A client that disconnects frees
its slots.
"""

import asyncio
import contextlib
import functools
import hmac
import json
import os
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import tba_jax
from tba_jax.decoding.engine import Session
from tba_jax.serving.protocol import (
    ApiError,
    Call,
    Choice,
    Generation,
    Kind,
    Served,
    Update,
    parse,
)

MAX_BODY_BYTES = 4 * 2**20
_ROUTES: dict[Kind, str] = {
    "generate": "/inference/v1/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


class Scope(Protocol):
    """Requests below one base URL: a `RequestQueue`, or the turns of one agent."""

    def parse(self, kind: Kind, body: Mapping[str, Any]) -> Call: ...

    def submit(self, generation: Generation) -> None: ...

    def cancel(self, generation: Generation) -> None: ...


class RequestQueue:
    """Queue of generations for one session, and the scope of independent requests.

    `parse`, `submit` and `cancel` are thread-safe. Invariant: every submitted generation ends with
    one final update for each sample or with one error, unless it is cancelled.

    Args:
        served: the model.

    Attributes:
        is_paused: whether decoding is paused.
    """

    def __init__(self, served: Served) -> None:
        self.is_paused = False
        self._served = served
        self._lock = threading.Lock()
        self._new: list[Generation] = []
        self._cancelled: list[Generation] = []
        self._failure: Exception | None = None
        # Generation and its number of unfinished samples, by the session's number of the request;
        # used on the session's thread only.
        self._live: dict[int, tuple[Generation, int]] = {}

    def parse(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        """Return the call of a request.

        Raises:
            ApiError: the request is refused.
        """
        return parse(kind, body, self._served, int.from_bytes(os.urandom(7), "big"))

    def submit(self, generation: Generation) -> None:
        """Queue a generation.

        Raises:
            Exception: the session's thread has failed with this error.
        """
        with self._lock:
            if self._failure is not None:
                raise self._failure
            self._new.append(generation)

    def cancel(self, generation: Generation) -> None:
        """Drop a generation that has not ended; its slots become free."""
        with self._lock:
            self._cancelled.append(generation)

    def step(self, session: Session) -> bool:
        """Take in requests and decode one chunk; return False if there is nothing to decode."""
        self._take_in(session)
        if self.is_paused or session.is_idle:
            return False
        try:
            for response in session.step():
                generation, left = self._live.pop(response.request)
                if left > 1:
                    self._live[response.request] = generation, left - 1
                finish = "stop" if response.has_eos else "length"
                row = (response.sample, response.tokens, response.token_logprobs, finish)
                generation.notify(Update(*row))
            for number, (generation, _) in self._live.items():
                if generation.is_streamed:
                    for sample, (tokens, logprobs) in session.unfinished(number).items():
                        generation.notify(Update(sample, tokens, logprobs))
        except Exception as error:  # every waiting client receives the error of the device
            self.fail(error)
            raise
        return True

    def fail(self, error: Exception) -> None:
        """End every generation with an error, and refuse later ones with the same error."""
        with self._lock:
            self._failure = error
            new, self._new = self._new, []
        for generation in [*new, *(each for each, _ in self._live.values())]:
            generation.notify(error)
        self._live.clear()

    def _take_in(self, session: Session) -> None:
        """Submit new generations to the session and drop cancelled ones."""
        with self._lock:
            new, self._new = self._new, []
            cancelled, self._cancelled = self._cancelled, []
        for generation in new:
            if generation in cancelled:
                continue
            try:
                number = session.submit(generation.prompt, generation.keys, generation.settings)
            except ValueError as error:
                generation.notify(error)
                continue
            self._live[number] = generation, len(generation.keys)
        for number, (generation, _) in list(self._live.items()):
            if generation in cancelled:
                session.cancel(number)
                del self._live[number]


class Application:
    """ASGI application of the routes.

    Args:
        scopes: returns the scope of an episode; "" without episodes.
        served: the model.
        prefix: path before the routes, with the parameter `episode`, or "".
        queue: queue that /pause and /resume control; None: these routes do not exist.
        token: bearer token that every request must have; "": no token is needed.
        info: fields of /server_info.
    """

    def __init__(
        self,
        scopes: Callable[[str], Scope],
        served: Served,
        *,
        prefix: str = "",
        queue: RequestQueue | None = None,
        token: str = "",
        info: Mapping[str, Any] | None = None,
    ) -> None:
        self._scopes, self._served, self._queue = scopes, served, queue
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._info = {"version": tba_jax.__version__, **(info or {})}
        routes = [
            Route(f"{prefix}{path}", self._sampler(kind), methods=["POST"])
            for kind, path in _ROUTES.items()
        ]
        routes += [
            Route(f"{prefix}/v1/models", self._models),
            Route("/health", self._health),
            Route("/server_info", self._server_info),
        ]
        if queue is not None:
            routes += [Route(path, self._pause, methods=["POST"]) for path in ("/pause", "/resume")]
        handlers = {ApiError: _refusal, HTTPException: _no_route}
        self._app = Starlette(routes=routes, exception_handlers=handlers)

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        own = dict(scope["headers"]).get(b"authorization", b"")
        if self._authorization and not hmac.compare_digest(own, self._authorization):
            text = "the request has no valid token. Send the header Authorization: Bearer TOKEN"
            error = ApiError(text, status=401, code="invalid_api_key")
            await _refusal(None, error)(scope, receive, send)
            return
        with contextlib.suppress(ClientDisconnect, OSError):
            await self._app(scope, receive, send)

    async def _health(self, request: Request) -> Response:
        is_paused = self._queue is not None and self._queue.is_paused
        return JSONResponse({"status": "paused" if is_paused else "ok"})

    async def _server_info(self, request: Request) -> Response:
        return JSONResponse(self._info)

    async def _pause(self, request: Request) -> Response:
        assert self._queue is not None
        self._check_write(request)
        self._queue.is_paused = request.url.path == "/pause"
        return JSONResponse({"is_paused": self._queue.is_paused})

    async def _models(self, request: Request) -> Response:
        self._scopes(request.path_params.get("episode", ""))  # refuses an episode that has ended
        card = {
            "id": self._served.model,
            "object": "model",
            "created": 0,
            "owned_by": "tba_jax",
            "max_model_len": self._served.max_length,
        }
        return JSONResponse({"object": "list", "data": [card]})

    def _check_write(self, request: Request) -> None:
        """Refuse content types that a web page may send to this machine (CORS)."""
        if not self._authorization and "json" not in request.headers.get("content-type", ""):
            raise ApiError("the content type is not JSON. Send Content-Type: application/json")

    def _sampler(self, kind: Kind) -> Callable[[Request], Any]:
        """Return the handler of a route that samples."""

        async def sample(request: Request) -> Response:
            scope = self._scopes(request.path_params.get("episode", ""))
            self._check_write(request)
            call = scope.parse(kind, await _body(request))
            updates = _updates(request, scope, call)
            if not call.request.stream:
                found = {i: update async for i, update in updates if update.finish}
                return JSONResponse(call.response([found[i] for i in sorted(found)]))
            first = await anext(updates)  # an earlier error has its own HTTP status
            return StreamingResponse(_events(call, first, updates), media_type="text/event-stream")

        return sample


async def _updates(
    request: Request, scope: Scope, call: Call
) -> AsyncGenerator[tuple[int, Update]]:
    """Submit the generations of a call; yield (index of the sample, update) until all have ended.

    At the end, also an early one, generations that have not ended are cancelled.

    Raises:
        ClientDisconnect: the client has disconnected.
        ApiError: a generation was refused or failed.
    """
    loop = asyncio.get_running_loop()
    arrived: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()

    async def until_disconnected() -> None:
        while (await request.receive())["type"] != "http.disconnect":
            pass
        arrived.put_nowait((0, ClientDisconnect()))

    def notify(i: int, update: Update | Exception) -> None:
        loop.call_soon_threadsafe(arrived.put_nowait, (i, update))

    generations = [
        call.generation(i, functools.partial(notify, i)) for i in range(len(call.prompts))
    ]
    watcher = asyncio.ensure_future(until_disconnected())
    try:
        for generation in generations:
            scope.submit(generation)
        left = call.num_samples
        while left:
            i, update = await arrived.get()
            if isinstance(update, ApiError | ClientDisconnect):
                raise update
            if isinstance(update, ValueError):
                raise ApiError(str(update))
            if isinstance(update, Exception):
                raise ApiError(f"decoding failed: {type(update).__name__}", status=500)
            left -= bool(update.finish)
            yield i * call.request.n + update.sample, update
    finally:
        watcher.cancel()
        for generation in generations:
            scope.cancel(generation)


async def _events(
    call: Call, first: tuple[int, Update], updates: AsyncGenerator[tuple[int, Update]]
) -> AsyncIterator[str]:
    """Yield server-sent events as tokens are sampled."""
    choices = [Choice(call, i) for i in range(call.num_samples)]
    newest: dict[int, Update] = {}
    arrived: tuple[int, Update] | None = first
    async with contextlib.aclosing(updates):
        try:
            while arrived is not None:
                i, newest[i] = arrived
                if (choice := choices[i].next(newest[i])) is not None:
                    yield _event(call.envelope([choice]))
                arrived = await anext(updates, None)
        except ApiError as error:  # the status was sent before, so the error is an event
            yield _event(error.body())
            return
    if call.request.stream_options.include_usage:
        usage = call.usage(list(newest.values()))
        yield _event({**call.envelope([]), "usage": usage})
    yield "data: [DONE]\n\n"


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, allow_nan=False)}\n\n"


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        ApiError: the body is too large, or not a JSON object.
        ClientDisconnect: the client disconnected before the end of the body.
    """
    chunks, size = [], 0
    async for chunk in request.stream():
        size += len(chunk)
        if size <= MAX_BODY_BYTES:
            chunks.append(chunk)
        elif size > 16 * MAX_BODY_BYTES:  # the end of a smaller body is dropped, so that its
            break  # client can read the refusal
    if size > MAX_BODY_BYTES:
        raise ApiError(f"a request may have {MAX_BODY_BYTES:,} bytes. Send less", status=413)
    try:
        found = json.loads(b"".join(chunks))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error!s:.200})") from error
    if not isinstance(found, dict):
        raise ApiError("the body is not a JSON object")
    return found


def _refusal(request: Any, error: Any) -> Response:
    return JSONResponse(error.body(), error.status)


def _no_route(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path:.200}"
    text = f"there is no route {what}. Known: {', '.join(_ROUTES.values())}"
    return _refusal(request, ApiError(text, status=error.status_code))
