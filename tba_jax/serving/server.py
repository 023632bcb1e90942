# SPDX-License-Identifier: Apache-2.0
"""HTTP routes over a decode session, for OpenAI clients and token-exact training clients.

    POST /inference/v1/generate   token IDs in, token IDs and log-probs out
    POST /v1/completions          text or token IDs
    POST /v1/chat/completions     messages, tools
    GET  /v1/models, /health

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
import queue
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tba_jax.decoding.engine import Session
from tba_jax.serving.protocol import NOTHING, ApiError, Call, Kind, Served, Update, parse

MAX_BODY_BYTES = 4 * 2**20
_ROUTES: dict[Kind, str] = {
    "generate": "/inference/v1/generate",
    "completions": "/v1/completions",
    "chat": "/v1/chat/completions",
}

_OBJECT = TypeAdapter(dict[str, Any])

Updates = AsyncIterator[tuple[int, Update]]
"""Updates of the samples of a call with their numbers, until each sample has ended."""
Scope = Callable[[Kind, Mapping[str, Any]], Awaitable[tuple[Call, Updates]]]
"""Parses and begins a request: (kind, JSON object) -> call and updates; raises `ApiError`."""


class RequestQueue:
    """Queue of requests for one session; as a `Scope` it is called on the server's thread."""

    def __init__(self, served: Served) -> None:
        self._served = served
        # New calls with the receiver of their updates; None: the call has ended.
        self._arrived = queue.SimpleQueue[tuple[Call, Callable[..., Any] | None]]()
        # Call and receiver by the session's number of a request; for the session's thread only.
        self._live: dict[int, tuple[Call, Callable[..., Any]]] = {}

    async def __call__(self, kind: Kind, body: Mapping[str, Any]) -> tuple[Call, Updates]:
        """Return the call of a request, and its updates, which begin it."""
        call = parse(kind, body, self._served, int.from_bytes(os.urandom(7), "big"))
        return call, self._updates(call)

    async def _updates(self, call: Call) -> Updates:
        loop = asyncio.get_running_loop()
        arrived: asyncio.Queue[tuple[int, Update | ApiError]] = asyncio.Queue()
        left = call.request.n
        try:
            notify = functools.partial(loop.call_soon_threadsafe, arrived.put_nowait)
            self._arrived.put((call, notify))
            while left:
                i, update = await arrived.get()
                if isinstance(update, ApiError):
                    raise update
                left -= bool(update.finish)
                yield i, update
        finally:
            self._arrived.put((call, None))

    def step(self, session: Session) -> bool:
        """Take in requests and decode one chunk; return False if there is nothing to decode."""
        self._take_in(session)
        if session.is_idle:
            return False
        for y in session.step():
            finish = "stop" if y.has_eos else "length"
            self._live[y.request][1]((y.sample, Update(y.tokens, y.token_logprobs, finish)))
        for number, (call, notify) in self._live.items():
            if call.request.stream:
                for sample, row in session.unfinished(number).items():
                    notify((sample, Update(*row)))
        return True

    def _take_in(self, session: Session) -> None:
        """Submit new calls to the session and drop those that ended; their slots become free."""
        while not self._arrived.empty():
            call, notify = self._arrived.get_nowait()
            for number in [n for n, (own, *_) in self._live.items() if own is call]:
                session.cancel(number)
                del self._live[number]
            if notify is None:
                continue
            try:
                number = session.submit(call.prompt, call.keys, call.settings)
            except ValueError as error:
                notify((0, ApiError(str(error))))
            else:
                self._live[number] = call, notify


def make_application(
    scopes: Callable[[str], Scope], served: Served, *, prefix: str = "", token: str = ""
) -> Starlette:
    """Return the ASGI application of the routes.

    Args:
        scopes: returns the scope of an episode; "" without episodes.
        served: the model.
        prefix: path before the routes, with the parameter `episode`, or "".
        token: bearer token that every request must have; "": no token is needed.
    """

    def scope_of(request: Request) -> Scope:
        own = request.headers.get("authorization", "").encode()
        if token and not hmac.compare_digest(own, f"Bearer {token}".encode()):
            text = "the request has no valid token. Send the header Authorization: Bearer TOKEN"
            raise ApiError(text, status=401, code="invalid_api_key")
        is_json = "json" in request.headers.get("content-type", "")
        if not (token or is_json or request.method == "GET"):
            # A web page may send other content types to this machine (CORS).
            raise ApiError("the content type is not JSON. Send Content-Type: application/json")
        return scopes(request.path_params.get("episode", ""))

    async def sample(kind: Kind, request: Request) -> Response:
        scope, body = scope_of(request), await request.body()
        return await _unless_disconnected(request, _respond(scope, kind, body))

    async def models(request: Request) -> Response:
        scope_of(request)
        card = {"id": served.model, "object": "model", "created": 0, "owned_by": "tba_jax"}
        card["max_model_len"] = served.max_length
        return JSONResponse({"object": "list", "data": [card]})

    routes = [
        Route(prefix + path, functools.partial(sample, kind), methods=["POST"])
        for kind, path in _ROUTES.items()
    ]
    health = Route("/health", JSONResponse({"status": "ok"}))
    routes += [Route(f"{prefix}/v1/models", models), health]
    handlers = dict.fromkeys((ApiError, HTTPException, ClientDisconnect), _refusal)
    return Starlette(routes=routes, exception_handlers=dict[Any, Any](handlers))


async def _refusal(request: Request, error: Any) -> Response:
    if isinstance(error, HTTPException):
        what = f"{request.method} {request.url.path:.200}"
        text = f"there is no route {what}. Known: {', '.join(_ROUTES.values())}"
        error = ApiError(text, status=error.status_code)
    if isinstance(error, ClientDisconnect):
        error = ApiError("the client disconnected", status=499)
    return JSONResponse(error.body, error.status)


async def _unless_disconnected(request: Request, work: Awaitable[Response]) -> Response:
    """Return the result of `work`; if the client disconnects first, cancel it and raise."""
    working = asyncio.ensure_future(work)
    watching = asyncio.ensure_future(request.receive())  # the body has ended: a disconnect is next
    try:
        await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
        if not working.done():
            raise ClientDisconnect
        return working.result()
    finally:
        watching.cancel()
        working.cancel()


async def _respond(scope: Scope, kind: Kind, body: bytes) -> Response:
    if len(body) > MAX_BODY_BYTES:
        raise ApiError(f"a request may have {MAX_BODY_BYTES:,} bytes. Send less", status=413)
    try:
        call, updates = await scope(kind, _OBJECT.validate_json(body))
    except ValidationError as error:
        raise ApiError(f"the body is no JSON object: {error.errors()[0]['msg']}") from error
    if not call.request.stream:
        found = {i: update async for i, update in updates if update.finish}
        return JSONResponse(call.response([found[i] for i in sorted(found)]))
    first = await anext(updates)  # an earlier error has its own HTTP status
    return StreamingResponse(_events(call, first, updates), media_type="text/event-stream")


async def _events(call: Call, first: tuple[int, Update], updates: Any) -> AsyncIterator[str]:
    """Yield server-sent events as tokens are sampled."""
    newest: dict[int, Update] = {}
    arrived: tuple[int, Update] | None = first
    try:
        async with contextlib.aclosing(updates):
            while arrived is not None:
                i, update = arrived
                before, newest[i] = newest.get(i, NOTHING), update
                if update.finish or len(update.tokens) > len(before.tokens):
                    yield _event(call.envelope([call.choice(i, update, before)]))
                arrived = await anext(updates, None)
        if call.request.stream_options.get("include_usage"):
            yield _event(call.envelope([], list(newest.values())))
        yield "data: [DONE]\n\n"
    except ApiError as error:  # the status was sent before, so the error is an event
        yield _event(error.body)


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, allow_nan=False)}\n\n"
