# SPDX-License-Identifier: Apache-2.0
"""HTTP routes over a queue of generations, for OpenAI clients and token-exact training clients.

    POST /inference/v1/generate   token IDs in, token IDs and log-probs out
    POST /v1/completions          text or token IDs
    POST /v1/chat/completions     messages, tools
    GET  /v1/models, /health, /server_info;  POST /pause, /resume

Invariant: a request without a valid token, or beyond the limit of concurrent requests, is refused
before its body is read. A web page cannot send a write: without a token, a write needs the content
type JSON. A client that disconnects frees its slots.
"""

import asyncio
import hmac
import json
import os
from collections.abc import AsyncIterator, Callable, Mapping
from typing import Any, NamedTuple, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

import tba_jax
from tba_jax.serving.protocol import ApiError, Call, Deltas, Kind, Served, parse
from tba_jax.serving.queue import Generation, RequestQueue, Update

MAX_BODY_BYTES = 4 * 2**20
# A refused body up to this size is read and dropped, so that the client can read the refusal.
_MAX_DISCARDED_BYTES = 64 * 2**20
_BODY_TIMEOUT_S = 30.0
_ROUTES: dict[Kind, str] = {
    "generate": "/inference/v1/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}


class Scope(Protocol):
    """Requests below one base URL: independent requests, or the turns of one episode."""

    def parse(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        """Return the call of a request.

        Raises:
            ApiError: the request is refused.
        """
        ...

    def submit(self, generation: Generation) -> None:
        """Queue one generation of a call."""
        ...

    def cancel(self, generation: Generation) -> None:
        """Drop a generation, if it has not ended."""
        ...


class PlainScope(NamedTuple):
    """Scope of independent requests."""

    served: Served
    queue: RequestQueue

    def parse(self, kind: Kind, body: Mapping[str, Any]) -> Call:
        return parse(kind, body, self.served, int.from_bytes(os.urandom(7), "big"))

    def submit(self, generation: Generation) -> None:
        self.queue.submit(generation)

    def cancel(self, generation: Generation) -> None:
        self.queue.cancel(generation)


class Application:
    """ASGI application of the routes.

    Args:
        scopes: returns the scope of an episode; "" without episodes.
        served: the model.
        prefix: path before the routes, with the parameter `episode`, or "".
        queue: queue that /pause and /resume control; None: these routes do not exist.
        token: bearer token that every request must have; "": no token is needed.
        max_requests: maximum number of concurrent requests; others are refused with status 429.
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
        max_requests: int = 256,
        info: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._scopes, self._served, self._queue = scopes, served, queue
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._max_requests, self._num_requests = max_requests, 0
        self._info = info
        routes = [
            Route(f"{prefix}{path}", self._sampler(kind), methods=["POST"])
            for kind, path in _ROUTES.items()
        ]
        routes += [
            Route(f"{prefix}/v1/models", self._models),
            Route(f"{prefix}/v1/models/{{model:path}}", self._models),
            Route("/health", self._health),
            Route("/server_info", self._server_info),
        ]
        if queue is not None:
            routes += [Route(path, self._pause, methods=["POST"]) for path in ("/pause", "/resume")]
        self._app = Starlette(
            routes=routes, exception_handlers={ApiError: _refusal, HTTPException: _no_route}
        )

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        headers = dict(scope["headers"])
        own = headers.get(b"authorization", b"")
        if self._authorization and not hmac.compare_digest(own, self._authorization):
            error = ApiError(
                "the request has no valid token. Send the header Authorization: Bearer TOKEN",
                status=401,
                code="invalid_api_key",
            )
            await _refusal(None, error)(scope, receive, send)
            return
        try:
            await self._app(scope, receive, send)
        except (ClientDisconnect, OSError):
            """The client has disconnected."""

    async def _health(self, request: Request) -> Response:
        is_paused = self._queue is not None and self._queue.is_paused
        return JSONResponse({"status": "paused" if is_paused else "ok"})

    async def _server_info(self, request: Request) -> Response:
        return JSONResponse({"version": tba_jax.__version__, **self._info()})

    async def _pause(self, request: Request) -> Response:
        assert self._queue is not None
        self._check_write(request)
        self._queue.pause(request.url.path == "/pause")
        return JSONResponse({"is_paused": self._queue.is_paused})

    async def _models(self, request: Request) -> Response:
        self._scopes(request.path_params.get("episode", ""))
        card = {
            "id": self._served.model,
            "object": "model",
            "created": 0,
            "owned_by": "tba_jax",
            "max_model_len": self._served.max_length,
        }
        name = request.path_params.get("model")
        if name is None:
            return JSONResponse({"object": "list", "data": [card]})
        if name != self._served.model:
            raise ApiError(f"there is no model {name!r:.80}", status=404, code="model_not_found")
        return JSONResponse(card)

    def _check_write(self, request: Request) -> None:
        """Refuse content types that a web page may send to this machine (CORS).

        Raises:
            ApiError: the request has no token, and another content type than JSON.
        """
        if not self._authorization and "json" not in request.headers.get("content-type", ""):
            raise ApiError("the content type is not JSON. Send Content-Type: application/json")

    def _sampler(self, kind: Kind) -> Callable[[Request], Any]:
        """Return the handler of a route that samples."""

        async def sample(request: Request) -> Response:
            if self._num_requests >= self._max_requests:
                raise ApiError(
                    f"the server has {self._num_requests} requests, its maximum. Try again later",
                    status=429,
                    code="rate_limit_exceeded",
                )
            self._num_requests += 1
            generations, is_streaming = _Generations(self, request), False
            try:
                scope = self._scopes(request.path_params.get("episode", ""))
                self._check_write(request)
                call = scope.parse(kind, await _body(request))
                generations.submit(scope, call)
                first = await generations.next()  # an earlier error has its own HTTP status
                if call.request.stream:
                    is_streaming = True  # the stream closes them
                    events = _events(call, generations, first)
                    return StreamingResponse(events, media_type="text/event-stream")
                return JSONResponse(call.response(await _collect(call, generations, first)))
            finally:
                if not is_streaming:
                    generations.close()

        return sample

    def leave(self) -> None:
        """Count a request that has ended."""
        self._num_requests -= 1


class _Generations:
    """The generations of one request, and their updates."""

    def __init__(self, application: Application, request: Request) -> None:
        self._application, self._request = application, request
        self._updates: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
        self._generations: list[Generation] = []
        self._gone: asyncio.Future[None] | None = None
        self._is_closed = False

    def submit(self, scope: Scope, call: Call) -> None:
        """Queue the generations of a call."""
        loop = asyncio.get_running_loop()
        self._scope = scope
        for i, (prompt, settings) in enumerate(zip(call.prompts, call.settings, strict=True)):

            def notify(update: Update | Exception, i: int = i) -> None:
                loop.call_soon_threadsafe(self._updates.put_nowait, (i, update))

            generation = Generation(prompt, call.keys(i), settings, call.request.stream, notify)
            self._generations.append(generation)
            scope.submit(generation)
        self._gone = asyncio.ensure_future(self._until_disconnected())

    async def next(self) -> tuple[int, Update]:
        """Return the next update and the number of its prompt.

        Raises:
            ClientDisconnect: the client has disconnected.
            ApiError: the generation was refused or failed.
        """
        assert self._gone is not None
        waiting = asyncio.ensure_future(self._updates.get())
        await asyncio.wait((waiting, self._gone), return_when=asyncio.FIRST_COMPLETED)
        if not waiting.done():
            waiting.cancel()
            raise ClientDisconnect
        i, update = waiting.result()
        if isinstance(update, ApiError):
            raise update
        if isinstance(update, ValueError):
            raise ApiError(str(update))
        if isinstance(update, Exception):
            raise ApiError(f"decoding failed: {type(update).__name__}", status=500)
        return i, update

    def close(self) -> None:
        """Cancel what has not ended."""
        if self._is_closed:
            return
        self._is_closed = True
        if self._gone is not None:
            self._gone.cancel()
        for generation in self._generations:
            self._scope.cancel(generation)
        self._application.leave()

    async def _until_disconnected(self) -> None:
        while (await self._request.receive())["type"] != "http.disconnect":
            pass


def _refusal(request: Any, error: Any) -> Response:
    headers = {"retry-after": "1"} if error.status == 429 else None
    return JSONResponse(error.body(), error.status, headers)


def _no_route(request: Request, error: Any) -> Response:
    what = f"{request.method} {request.url.path:.200}"
    if error.status_code == 405:
        text = f"{what} is not supported"
    else:
        text = f"there is no route {what}. Known: {', '.join(_ROUTES.values())}"
    return _refusal(request, ApiError(text, status=error.status_code))


async def _body(request: Request) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        ApiError: the body is too large, too slow, or not a JSON object.
        ClientDisconnect: the client disconnected before the end of the body.
    """
    too_large = ApiError(f"a request may have {MAX_BODY_BYTES:,} bytes. Send less", status=413)
    length = request.headers.get("content-length", "0")
    if not length.isdigit() or int(length) > _MAX_DISCARDED_BYTES:
        raise too_large
    chunks, size = [], 0
    try:
        async with asyncio.timeout(_BODY_TIMEOUT_S):
            async for chunk in request.stream():
                size += len(chunk)
                if size > _MAX_DISCARDED_BYTES:
                    raise too_large
                if size <= MAX_BODY_BYTES:
                    chunks.append(chunk)
    except TimeoutError:
        text = f"the body did not arrive within {_BODY_TIMEOUT_S:.0f} s"
        raise ApiError(text, status=413) from None
    if size > MAX_BODY_BYTES:
        raise too_large
    try:
        found = json.loads(b"".join(chunks))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error!s:.200})") from error
    if not isinstance(found, dict):
        raise ApiError("the body is not a JSON object")
    return found


async def _collect(
    call: Call, generations: _Generations, newest: tuple[int, Update]
) -> list[Update]:
    """Return all samples of a call, prompt by prompt."""
    found: dict[int, Update] = {}
    while True:
        i, update = newest
        if update.finish:
            found[i * call.num_samples + update.sample] = update
        if len(found) == len(call.prompts) * call.num_samples:
            return [update for _, update in sorted(found.items())]
        newest = await generations.next()


async def _events(
    call: Call, generations: _Generations, newest: tuple[int, Update]
) -> AsyncIterator[str]:
    """Yield server-sent events as tokens are sampled."""
    samples = [(i, j) for i in range(len(call.prompts)) for j in range(call.num_samples)]
    deltas = {at: Deltas(call, at[1], at[0]) for at in samples}
    ended: dict[tuple[int, int], Update] = {}
    try:
        while True:
            i, update = newest
            choice = deltas[i, update.sample].next(update)
            if update.finish:
                ended[i, update.sample] = update
            if choice is not None:
                yield _event({**call.envelope(is_chunk=True), "choices": [choice]})
            if len(ended) == len(samples):
                break
            newest = await generations.next()
        if call.request.stream_options.include_usage:
            usage = call.usage(sum(len(x.tokens) for x in ended.values()))
            yield _event({**call.envelope(is_chunk=True), "choices": [], "usage": usage})
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status was sent before, so the error is an event
        yield _event(error.body())
    finally:
        generations.close()


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, allow_nan=False)}\n\n"
