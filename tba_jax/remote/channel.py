# SPDX-License-Identifier: Apache-2.0
"""Channel: request and response bytes between the processes of a run, over HTTP.

A `ChannelServer` runs in the process that owns the data of the run; every other process has a
`Channel`. A request is a method name and bytes, and carries a bearer token. The traffic is not
encrypted: use it inside a private network (docs/security.md).
"""

import asyncio
import concurrent.futures
import hmac
import socket
import threading
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from tba_jax.remote.http_server import HttpServer, bind

Handler = Callable[[bytes], "bytes | concurrent.futures.Future[bytes]"]
"""Returns the response to a request, or a future of the response. The response is empty if the
future takes longer than a second; the client then repeats the request.

Raises:
    NotReady: the owner cannot respond yet; the client tries again.
    ValueError: the request is invalid; the client receives the message.
"""

MAX_REQUEST_BYTES = 2**30
HEARTBEAT_S = 30
"""Seconds without a heartbeat after which a process counts as lost."""
OWNER_TIMEOUT_S = 300.0
"""Seconds without a response of the buffer's owner after which its process counts as lost.

A trainer that compiles or writes a checkpoint may be slow to respond."""
_NUM_THREADS = 8  # threads that run handlers
_FUTURE_S = 1.0  # after this time a response is empty, and the client repeats the request


class Unreachable(Exception):
    """No response arrived in time; the request may have arrived."""


class ChannelError(RuntimeError):
    """The channel cannot be used: wrong token, blocked port, or another program at the address."""


class NotReady(Exception):
    """The process at the other end of the channel is starting, or has failed."""


class Endpoint(NamedTuple):
    """Address of a channel server.

    Attributes:
        addresses: HOST:PORT candidates, in the order in which clients try them.
        token: bearer token of the run.
    """

    addresses: tuple[str, ...]
    token: str


class ChannelServer:
    """HTTP server of the process that owns the data of a run.

    Args:
        handlers: method name -> handler. Handlers run on several threads.
        is_local: whether to listen on the loopback interface only.
    """

    def __init__(
        self,
        handlers: Mapping[str, Handler],
        token: str,
        *,
        is_local: bool = False,
    ) -> None:
        self._handlers = dict(handlers)
        self._authorization = f"Bearer {token}".encode()
        self._token, self._is_local = token, is_local
        host = "127.0.0.1" if is_local else "0.0.0.0"
        self._server = HttpServer(self._respond, "channel-server", bind(host, 0))
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "channel-handler")

    def start(self) -> "ChannelServer":
        """Start listening; return self."""
        self._server.start()
        return self

    @property
    def port(self) -> int:
        """The port that the server listens on."""
        return self._server.port

    @property
    def endpoint(self) -> Endpoint:
        """Addresses and token for the other processes."""
        hosts = ["127.0.0.1"] if self._is_local else own_addresses()
        return Endpoint(tuple(f"{host}:{self.port}" for host in hosts), self._token)

    def close(self) -> None:
        """Stop listening; give unfinished requests a short time to end."""
        self._server.close()
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _respond(self, scope: Any, receive: Any, send: Any) -> None:
        """Handle one request, as an ASGI application."""
        if scope["type"] != "http":
            return
        status, body = await self._result(scope, receive)
        headers = [(b"content-length", str(len(body)).encode())]
        await send({"type": "http.response.start", "status": status, "headers": headers})
        await send({"type": "http.response.body", "body": body})

    async def _result(self, scope: Any, receive: Any) -> tuple[int, bytes]:
        headers = dict(scope["headers"])
        # Checked before the body is read: a sender without the token must not fill the memory.
        if not hmac.compare_digest(headers.get(b"authorization", b""), self._authorization):
            return 401, b"wrong token"
        handler = self._handlers.get(scope["path"].strip("/"))
        if handler is None or scope["method"] != "POST":
            return 404, f"there is no method {scope['path']!r}".encode()
        if int(headers.get(b"content-length", b"0")) > MAX_REQUEST_BYTES:
            return 413, f"a request may have {MAX_REQUEST_BYTES:,} bytes".encode()
        chunks = []
        while True:
            message = await receive()
            if message["type"] == "http.disconnect":
                return 499, b""
            chunks.append(message.get("body", b""))
            if not message.get("more_body"):
                break
        try:
            loop = asyncio.get_running_loop()
            found = await loop.run_in_executor(self._threads, handler, b"".join(chunks))
            if isinstance(found, concurrent.futures.Future):
                found = await _result_in_time(asyncio.wrap_future(found))
            return 200, found
        except (NotReady, asyncio.CancelledError) as error:
            return 503, str(error).encode()
        except (ValueError, KeyError, TypeError, IndexError) as error:
            return 400, f"{type(error).__name__}: {error}".encode()


class Channel:
    """Requests to the channel server of a run; thread-safe.

    Args:
        locate: returns the endpoint; called again after a failure, because a restarted buffer owner
            may have another address. Raises `Unreachable` if no buffer owner is running.
        timeout_s: longest wait for a response, in seconds.
    """

    def __init__(self, locate: Callable[[], Endpoint], *, timeout_s: float) -> None:
        import urllib3  # slow; runs of one process need no client

        self._locate = locate
        self._timeout = urllib3.Timeout(connect=min(5.0, timeout_s), read=timeout_s)
        self._pool = urllib3.PoolManager(maxsize=64, retries=False, timeout=self._timeout)
        self._lock = threading.Lock()
        self._connected: tuple[str, str] | None = None  # address, token

    def call(self, method: str, body: bytes = b"") -> bytes:
        """Return the response to a request.

        Raises:
            Unreachable: no response arrived; the message names every address and its error.
            ChannelError: the token is wrong, or another program answers.
            ValueError: the server refused the request as invalid.
        """
        with self._lock:
            connected = self._connected
        if connected is not None:
            try:
                return self._post(*connected, method, body)
            except Unreachable:
                with self._lock:
                    self._connected = None
                raise
        endpoint = self._locate()
        failures = []
        for address in endpoint.addresses:
            try:
                response = self._post(address, endpoint.token, method, body)
            except Unreachable as error:
                failures.append(str(error))
                continue
            with self._lock:
                self._connected = address, endpoint.token
            return response
        raise Unreachable("; ".join(failures) or "the address of the trainer is not known yet")

    def _post(self, address: str, token: str, method: str, body: bytes) -> bytes:
        import urllib3

        try:
            response = self._pool.request(
                "POST",
                f"http://{address}/{method}",
                body=body,
                headers={"authorization": f"Bearer {token}"},
            )
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"{address}: {_brief(error)}") from error
        if response.status == 200:
            return response.data
        text = response.data[:500].decode(errors="replace")
        if response.status == 401:
            raise ChannelError(
                f"{address} refuses the token of this run (HTTP 401). Another run listens there: "
                "start the same command on every machine"
            )
        if response.status == 400:
            raise ValueError(text)
        if response.status in (499, 503):
            raise Unreachable(f"{address}: {text or 'not ready'}")
        raise ChannelError(
            f"{address} answers HTTP {response.status} to {method!r} ({text!r}): another program "
            "or another version of tba_jax listens there. Install the same version on every machine"
        )


async def _result_in_time(future: asyncio.Future[bytes]) -> bytes:
    """Return the result of a future; b"" after a timeout."""
    try:
        return await asyncio.wait_for(future, _FUTURE_S)
    except TimeoutError:
        return b""


def _brief(error: BaseException) -> str:
    """Return the innermost cause of an error, which urllib3 wraps in several exceptions."""
    while error.__cause__ is not None or error.__context__ is not None:
        inner = error.__cause__ or error.__context__
        assert inner is not None
        error = inner
    return f"{type(error).__name__}: {error}"[:200]


def own_addresses() -> list[str]:
    """Return the addresses of this machine; the address of the default route comes first."""
    found = []
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # sends nothing: the kernel chooses the interface
            found.append(probe.getsockname()[0])
        except OSError:
            pass  # this machine has no default route
    try:
        entries = socket.getaddrinfo(socket.gethostname(), None, socket.AF_INET)
    except OSError:
        entries = []  # the host name has no address
    found += [str(entry[4][0]) for entry in entries]
    return list(dict.fromkeys([*found, "127.0.0.1"]))
