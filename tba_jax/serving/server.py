# SPDX-License-Identifier: Apache-2.0
"""HTTP routes over a queue of generations, for OpenAI clients and token-exact training clients.

    POST /inference/v1/generate   token IDs in, token IDs and log-probs out
    POST /v1/completions          text or token IDs
    POST /v1/chat/completions     messages, tools
    GET  /v1/models, /health, /server_info;  POST /pause, /resume

Invariant: a request without a valid token, or beyond the limit of concurrent requests, is refused
before its body is read. A client that disconnects frees its slots.
"""

import asyncio
import hmac
import json
import os
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple, Protocol

import tba_jax
from tba_jax.serving.protocol import ApiError, Call, Deltas, Kind, Served, parse
from tba_jax.serving.queue import Generation, RequestQueue, Update

MAX_BODY_BYTES = 4 * 2**20
# A refused body up to this size is read and dropped, so that the client can read the refusal.
_MAX_DISCARDED_BYTES = 64 * 2**20
_BODY_TIMEOUT_S = 30.0
_ROUTES: dict[str, Kind] = {
    "/inference/v1/generate": "generate",
    "/v1/completions": "completions",
    "/v1/chat/completions": "chat",
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


class Disconnected(Exception):
    """The client has disconnected."""


class Application:
    """ASGI application of the routes.

    Args:
        scopes: returns the scope for a request path, and the path below the base URL.
        served: the model.
        queue: queue that /pause and /resume control; None: these routes do not exist.
        token: bearer token that every request must have; "": no token is needed.
        max_requests: maximum number of concurrent requests; others are refused with status 429.
        info: fields of /server_info.
    """

    def __init__(
        self,
        scopes: Callable[[str], tuple[Scope, str]],
        served: Served,
        *,
        queue: RequestQueue | None = None,
        token: str = "",
        max_requests: int = 256,
        info: Callable[[], Mapping[str, Any]] = dict,
    ) -> None:
        self._scopes, self._served, self._queue = scopes, served, queue
        self._authorization = f"Bearer {token}".encode() if token else b""
        self._max_requests, self._num_requests = max_requests, 0
        self._info = info

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request."""
        if scope["type"] != "http":
            return
        try:
            try:
                await self._handle(scope, receive, send)
            except ApiError as error:
                more = [(b"retry-after", b"1")] if error.status == 429 else []
                await _send(send, error.status, error.body(), more)
            except (Disconnected, OSError):
                pass
        except Disconnected:
            pass

    async def _handle(self, scope: Any, receive: Any, send: Any) -> None:
        headers = dict(scope["headers"])
        own = headers.get(b"authorization", b"")
        if self._authorization and not hmac.compare_digest(own, self._authorization):
            raise ApiError(
                "the request has no valid token. Send the header Authorization: Bearer TOKEN",
                status=401,
                code="invalid_api_key",
            )
        method, path = scope["method"], scope["path"]
        if method == "GET":
            await _send(send, 200, self._look_up(path))
        elif method != "POST":
            raise ApiError(f"{method} is not supported", status=405)
        elif self._queue is not None and path in ("/pause", "/resume"):
            self._queue.pause(path == "/pause")
            await _send(send, 200, {"is_paused": self._queue.is_paused})
        elif self._num_requests >= self._max_requests:
            raise ApiError(
                f"the server has {self._num_requests} requests, its maximum. Try again later",
                status=429,
                code="rate_limit_exceeded",
            )
        else:
            self._num_requests += 1
            try:
                await self._post(path, await _body(headers, receive), receive, send)
            finally:
                self._num_requests -= 1

    def _look_up(self, path: str) -> dict[str, Any]:
        if path == "/health":
            is_paused = self._queue is not None and self._queue.is_paused
            return {"status": "paused" if is_paused else "ok"}
        if path == "/server_info":
            return {"version": tba_jax.__version__, **self._info()}
        _, rest = self._scopes(path)
        card = {
            "id": self._served.model,
            "object": "model",
            "created": 0,
            "owned_by": "tba_jax",
            "max_model_len": self._served.max_length,
        }
        if rest == "/v1/models":
            return {"object": "list", "data": [card]}
        if rest == f"/v1/models/{self._served.model}":
            return card
        raise _no_route("GET", path)

    async def _post(self, path: str, body: dict[str, Any], receive: Any, send: Any) -> None:
        scope, rest = self._scopes(path)
        kind = _ROUTES.get(rest)
        if kind is None:
            raise _no_route("POST", path)
        call = scope.parse(kind, body)
        updates: asyncio.Queue[tuple[int, Update | Exception]] = asyncio.Queue()
        generations = [self._generation(call, i, updates) for i in range(len(call.prompts))]
        gone = asyncio.ensure_future(_until_disconnected(receive))
        try:
            for generation in generations:
                scope.submit(generation)
            if call.is_streamed:
                await _stream(call, updates, gone, send)
            else:
                found = await _collect(call, updates, gone)
                await _send(send, 200, call.response(found))
        finally:
            gone.cancel()
            for generation in generations:
                scope.cancel(generation)

    def _generation(
        self, call: Call, i: int, updates: "asyncio.Queue[tuple[int, Update | Exception]]"
    ) -> Generation:
        loop = asyncio.get_running_loop()

        def notify(update: Update | Exception) -> None:
            loop.call_soon_threadsafe(updates.put_nowait, (i, update))

        settings, keys = call.settings[i], call.keys(i)
        return Generation(call.prompts[i], keys, settings, call.is_streamed, notify)


def _no_route(method: str, path: str) -> ApiError:
    routes = ", ".join(_ROUTES)
    return ApiError(f"there is no route {method} {path:.200}. Known: {routes}", status=404)


async def _body(headers: Mapping[bytes, bytes], receive: Any) -> dict[str, Any]:
    """Return the JSON object of a request.

    Raises:
        ApiError: the body is too large, too slow, or not a JSON object.
        Disconnected: the client disconnected before the end of the body.
    """
    too_large = ApiError(f"a request may have {MAX_BODY_BYTES:,} bytes. Send less", status=413)
    length = headers.get(b"content-length", b"0")
    if not length.isdigit() or int(length) > _MAX_DISCARDED_BYTES:
        raise too_large
    chunks, size = [], 0
    while True:
        try:
            message = await asyncio.wait_for(receive(), _BODY_TIMEOUT_S)
        except TimeoutError:
            wait_s = _BODY_TIMEOUT_S
            raise ApiError(f"the body did not arrive within {wait_s:.0f} s", status=408) from None
        if message["type"] == "http.disconnect":
            raise Disconnected
        size += len(message.get("body", b""))
        if size > _MAX_DISCARDED_BYTES:
            raise too_large
        if size <= MAX_BODY_BYTES:
            chunks.append(message.get("body", b""))
        if not message.get("more_body"):
            break
    if size > MAX_BODY_BYTES:
        raise too_large
    if b"json" not in headers.get(b"content-type", b""):
        # A web page may send other content types to this machine without permission (CORS).
        raise ApiError("the content type is not JSON. Send Content-Type: application/json")
    try:
        found = json.loads(b"".join(chunks))
    except (ValueError, RecursionError) as error:
        raise ApiError(f"the body is not JSON ({error!s:.200})") from error
    if not isinstance(found, dict):
        raise ApiError("the body is not a JSON object")
    return found


async def _until_disconnected(receive: Any) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


async def _next(
    updates: "asyncio.Queue[tuple[int, Update | Exception]]", gone: "asyncio.Future[None]"
) -> tuple[int, Update]:
    """Return the next update and the number of its prompt.

    Raises:
        Disconnected: the client has disconnected.
        ApiError: the generation was refused or failed.
    """
    waiting = asyncio.ensure_future(updates.get())
    await asyncio.wait((waiting, gone), return_when=asyncio.FIRST_COMPLETED)
    if not waiting.done():
        waiting.cancel()
        raise Disconnected
    i, update = waiting.result()
    if isinstance(update, ApiError):
        raise update
    if isinstance(update, ValueError):
        raise ApiError(str(update))
    if isinstance(update, Exception):
        raise ApiError(f"decoding failed: {type(update).__name__}", status=500)
    return i, update


async def _collect(
    call: Call,
    updates: "asyncio.Queue[tuple[int, Update | Exception]]",
    gone: "asyncio.Future[None]",
) -> list[Update]:
    """Return all samples of a call, prompt by prompt."""
    found: dict[int, Update] = {}
    while len(found) < len(call.prompts) * call.num_samples:
        i, update = await _next(updates, gone)
        if update.finish:
            found[i * call.num_samples + update.sample] = update
    return [update for _, update in sorted(found.items())]


async def _stream(
    call: Call,
    updates: "asyncio.Queue[tuple[int, Update | Exception]]",
    gone: "asyncio.Future[None]",
    send: Any,
) -> None:
    """Send server-sent events as tokens are sampled."""
    first = await _next(updates, gone)  # an earlier error is sent with its own HTTP status
    headers = [(b"content-type", b"text/event-stream"), (b"cache-control", b"no-cache")]
    await send({"type": "http.response.start", "status": 200, "headers": headers})

    async def event(data: Any, *, is_last: bool = False) -> None:
        text = data if isinstance(data, str) else _dumps(data)
        body = f"data: {text}\n\n".encode()
        await send({"type": "http.response.body", "body": body, "more_body": not is_last})

    samples = [(i, j) for i in range(len(call.prompts)) for j in range(call.num_samples)]
    deltas = {at: Deltas(call, at[1], at[0]) for at in samples}
    ended: dict[tuple[int, int], Update] = {}
    try:
        i, update = first
        while True:
            choice = deltas[i, update.sample].next(update)
            if update.finish:
                ended[i, update.sample] = update
            if choice is not None:
                await event({**call.envelope(is_chunk=True), "choices": [choice]})
            if len(ended) == len(samples):
                break
            i, update = await _next(updates, gone)
        if call.has_usage:
            usage = call.usage(sum(len(x.tokens) for x in ended.values()))
            await event({**call.envelope(is_chunk=True), "choices": [], "usage": usage})
        await event("[DONE]", is_last=True)
    except ApiError as error:  # the status was sent before, so the error is an event
        await event(error.body(), is_last=True)


def _dumps(data: Any) -> str:
    return json.dumps(data, allow_nan=False)


async def _send(
    send: Any, status: int, data: Any, more: list[tuple[bytes, bytes]] | None = None
) -> None:
    body = _dumps(data).encode()
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(body)).encode()),
        *(more or []),
    ]
    await send({"type": "http.response.start", "status": status, "headers": headers})
    await send({"type": "http.response.body", "body": body})
