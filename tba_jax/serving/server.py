# SPDX-License-Identifier: Apache-2.0
"""HTTP routes over a decode session, for OpenAI clients and token-exact training clients.

Invariants: a request without a valid token is refused before its body is read. Without a token, a
POST needs the content type JSON, which no web page of another site can send. A client that
disconnects frees its slots. Every failure has the form of OpenAI's errors (`_refusal`).
"""

import asyncio
import contextlib
import functools
import hmac
import json
import os
import queue
import traceback
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Mapping
from typing import Any

from pydantic import TypeAdapter, ValidationError
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response, StreamingResponse
from starlette.routing import Route

from tba_jax.decoding.engine import Session
from tba_jax.serving.chat import Served
from tba_jax.serving.failures import ApiError
from tba_jax.serving.protocol import NOTHING, Call, Kind, Update, parse

MAX_BODY_BYTES = 4 * 2**20
_ROUTES: dict[Kind, str] = {
    "generate": "/inference/v1/generate",  # token IDs in, token IDs and log-probs out
    "completions": "/v1/completions",  # a text or token IDs in
    "chat": "/v1/chat/completions",  # messages and tools in
}
_OBJECT = TypeAdapter(dict[str, Any])

Updates = AsyncGenerator[tuple[Call, int, Update]]
"""Updates of the samples of a call, each with the call and the number of its sample."""
Sample = Callable[[Kind, Mapping[str, Any]], Updates]
"""Samples the response to a request: (route, JSON object) -> updates; they may raise ApiError."""


class RequestQueue:
    """Queue of requests from the server's thread to the thread of a session."""

    def __init__(self, served: Served) -> None:
        self._served = served
        # New calls with the functions that take their updates; None: the call has ended.
        self._arrived = queue.SimpleQueue[tuple[Call, Callable[..., Any] | None]]()
        # The same by the session's number of the request; only the session's thread uses it.
        self._live: dict[int, tuple[Call, Callable[..., Any]]] = {}

    async def __call__(self, kind: Kind, body: Mapping[str, Any]) -> Updates:
        """Yield updates until all samples have ended; closing the generator cancels the request."""
        call = parse(kind, body, self._served, int.from_bytes(os.urandom(7), "big"))
        loop, arrived = asyncio.get_running_loop(), asyncio.Queue[tuple[int, Update | ApiError]]()
        notify = functools.partial(loop.call_soon_threadsafe, arrived.put_nowait)
        num_unfinished = call.request.n
        self._arrived.put((call, notify))
        try:
            while num_unfinished:
                i, update = await arrived.get()
                if isinstance(update, ApiError):
                    raise update
                num_unfinished -= bool(update.finish)
                yield call, i, update
        finally:
            self._arrived.put((call, None))

    def step(self, session: Session) -> bool:
        """Take in requests and decode one chunk; return False if there is nothing to decode."""
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


def make_application(
    samples: Callable[[str], Sample], served: Served, *, prefix: str = "", token: str = ""
) -> Starlette:
    """Return the ASGI application of the routes.

    `samples` returns the `Sample` of an episode, by the parameter `episode` of `prefix`, the start
    of the paths; or of "". Every request must have the bearer token, unless it is "".
    """

    def admit(request: Request) -> Sample:
        own = request.headers.get("authorization", "").encode()
        if token and not hmac.compare_digest(own, f"Bearer {token}".encode()):
            text = "the request has no valid token. Send the header Authorization: Bearer TOKEN"
            raise ApiError(text, status=401, code="invalid_api_key")
        is_json = "json" in request.headers.get("content-type", "")
        if not (token or is_json or request.method == "GET"):
            # A web page may send other content types to this machine (CORS).
            raise ApiError("the content type is not JSON. Send Content-Type: application/json")
        return samples(request.path_params.get("episode", ""))

    async def respond(kind: Kind, request: Request) -> Response:
        sample, body = admit(request), await request.body()
        working = asyncio.ensure_future(_respond(sample, kind, body))
        watching = asyncio.ensure_future(request.receive())  # after the body: a disconnect
        try:
            await asyncio.wait([working, watching], return_when=asyncio.FIRST_COMPLETED)
            if not working.done():
                raise ClientDisconnect
            return working.result()
        finally:
            watching.cancel()
            working.cancel()

    async def models(request: Request) -> Response:
        admit(request)
        card = {"id": served.model, "object": "model", "created": 0, "owned_by": "tba_jax"}
        card["max_model_len"] = served.max_length
        return JSONResponse({"object": "list", "data": [card]})

    async def refuse(request: Request, error: Exception) -> Response:
        refusal = _refusal(error, f"{request.method} {request.url.path:.200}")
        return JSONResponse(refusal.body, refusal.status)

    routes = [
        Route(prefix + path, functools.partial(respond, kind), methods=["POST"])
        for kind, path in _ROUTES.items()
    ]
    health = Route("/health", JSONResponse({"status": "ok"}))
    routes += [Route(f"{prefix}/v1/models", models), health]
    kinds: Any = (ApiError, HTTPException, ClientDisconnect, ValidationError, Exception)
    return Starlette(routes=routes, exception_handlers=dict.fromkeys(kinds, refuse))


def _refusal(error: Exception, method_and_path: str = "") -> ApiError:
    """Return what a client receives for a failure; an unexpected one is printed, too."""
    match error:
        case ApiError():
            return error
        case HTTPException():
            text = f"there is no route {method_and_path}. Known: {', '.join(_ROUTES.values())}"
            return ApiError(text, status=error.status_code)
        case ClientDisconnect():
            return ApiError("the client disconnected", status=499)
        case ValidationError():  # of `_OBJECT`; `parse` names parameters
            return ApiError(f"the body is no JSON object: {error.errors()[0]['msg']}")
    traceback.print_exception(error)
    text = f"the request failed with {type(error).__name__}: {error}. The server printed the rest"
    return ApiError(text, status=500)


async def _respond(sample: Sample, kind: Kind, body: bytes) -> Response:
    if len(body) > MAX_BODY_BYTES:
        raise ApiError(f"a request may have {MAX_BODY_BYTES:,} bytes. Send less", status=413)
    updates = sample(kind, _OBJECT.validate_json(body))
    first = call, i, update = await anext(updates)  # its error has an HTTP status, in a stream, too
    if call.request.stream:
        return StreamingResponse(_events(first, updates), media_type="text/event-stream")
    newest = {i: update} | {i: update async for _, i, update in updates}
    return JSONResponse(call.response([newest[i] for i in sorted(newest)]))


async def _events(first: tuple[Call, int, Update], later: Updates) -> AsyncIterator[str]:
    """Yield the server-sent events of updates, and of the end of the stream."""
    call, newest = first[0], dict[int, Update]()
    arrived: tuple[Call, int, Update] | None = first
    try:
        async with contextlib.aclosing(later):
            while arrived is not None:
                _, i, update = arrived
                before, newest[i] = newest.get(i, NOTHING), update
                if update.finish or len(update.tokens) > len(before.tokens):
                    yield _event(call.envelope([call.choice(i, update, before)]))
                arrived = await anext(later, None)
        if call.request.stream_options.get("include_usage"):
            yield _event(call.envelope([], list(newest.values())))
        yield "data: [DONE]\n\n"
    except Exception as error:  # the status was sent before, so the error is an event
        yield _event(_refusal(error).body)


def _event(data: Any) -> str:
    return f"data: {json.dumps(data, allow_nan=False)}\n\n"
