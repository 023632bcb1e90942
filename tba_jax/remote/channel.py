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

from tba_jax.devices.worker import StopFlag
from tba_jax.remote.http_server import HttpServer, bind

Handler = Callable[[bytes], bytes]
"""Returns the response to a request; it may block for about a second.

`NotReady`, `Rewind`, `RunEnded` and `ValueError` reach the client; any other error ends the run."""

MAX_REQUEST_BYTES = 2**30
HEARTBEAT_S = 30
"""Seconds without a heartbeat after which a process counts as lost."""
_NUM_THREADS = 64  # threads that run handlers; each trainer process may block one


class Unreachable(Exception):
    """No response arrived in time; the request may have arrived."""


class ChannelError(RuntimeError):
    """The channel cannot be used: wrong token, blocked port, or another program at the address."""


class NotReady(Exception):
    """The process at the other end of the channel is starting, or has failed."""


class Rewind(Exception):
    """Another owner continues the run: the searcher must join again and drop its tickets."""


class RunEnded(Exception):
    """The run has ended: searchers have no more work."""


class Refused(ValueError):
    """The owner refuses a message; raised in the client."""


_STATUS = {NotReady: 503, Rewind: 409, RunEnded: 410, ValueError: 400}
_ERRORS = {409: Rewind, 410: RunEnded, 400: Refused, 401: ChannelError, 404: ChannelError}


class Endpoint(NamedTuple):
    """HOST:PORT candidates in the order in which clients try them, and the token of the run."""

    addresses: tuple[str, ...]
    token: str


class ChannelServer:
    """HTTP server of the process that owns the data of a run.

    Args:
        handlers: method name -> handler. Handlers run on several threads.
        is_local: whether to listen on the loopback interface only.

    Attributes:
        port: the port that the server listens on.
        failure: `failure.check()` raises the first unexpected error of a handler.
    """

    def __init__(
        self, handlers: Mapping[str, Handler], token: str, *, is_local: bool = False
    ) -> None:
        self._handlers = dict(handlers)
        self._token, self._is_local = token, is_local
        self.failure = StopFlag()
        bound = bind("127.0.0.1" if is_local else "0.0.0.0", 0)
        self._server = HttpServer(self._respond, "channel-server", bound)
        self._threads = concurrent.futures.ThreadPoolExecutor(_NUM_THREADS, "channel-handler")
        self.port = self._server.port

    def start(self) -> "ChannelServer":
        """Start listening; return self."""
        self._server.start()
        return self

    def endpoint(self, host: str = "") -> Endpoint:
        """Return addresses and token for the other processes; `host` comes first."""
        hosts = ["127.0.0.1"] if self._is_local else own_addresses()
        hosts = dict.fromkeys([host, *hosts] if host else hosts)
        return Endpoint(tuple(f"{each}:{self.port}" for each in hosts), self._token)

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
        given, wanted = headers.get(b"authorization", b""), f"Bearer {self._token}".encode()
        if not hmac.compare_digest(given, wanted):
            return 401, b"wrong token. Start the same command on every machine"
        handler = self._handlers.get(scope["path"].strip("/"))
        if handler is None or scope["method"] != "POST":
            return 404, b"no such method. Install the same version on every machine"
        if int(headers.get(b"content-length", b"0")) > MAX_REQUEST_BYTES:
            return 400, f"a request may have {MAX_REQUEST_BYTES:,} bytes".encode()
        chunks, message = [], {"more_body": True}
        while message.get("more_body"):
            message = await receive()
            if message["type"] == "http.disconnect":
                return 503, b""
            chunks.append(message.get("body", b""))
        try:
            loop = asyncio.get_running_loop()
            return 200, await loop.run_in_executor(self._threads, handler, b"".join(chunks))
        except asyncio.CancelledError:
            return 503, b""
        except (*_STATUS,) as error:
            kind = next(kind for kind in _STATUS if isinstance(error, kind))
            return _STATUS[kind], str(error).encode()
        except Exception as error:  # broad: the trainer's thread raises it
            self.failure.fail("channel-server", error)
            return 500, f"the trainer failed: {type(error).__name__}: {error}".encode()


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
        timeout = urllib3.Timeout(connect=min(5.0, timeout_s), read=timeout_s)
        self._pool = urllib3.PoolManager(maxsize=64, retries=False, timeout=timeout)
        self._lock = threading.Lock()
        self._connected: tuple[str, str] | None = None  # address, token

    def call(self, method: str, body: bytes = b"") -> bytes:
        """Return the response to a request.

        Raises:
            Unreachable: no response arrived; the message names every address and its error.
            ChannelError: the token is wrong, or another program answers.
            Rewind, RunEnded: raised by the handler. Refused: it raised a ValueError.
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

        url, headers = f"http://{address}/{method}", {"authorization": f"Bearer {token}"}
        try:
            response = self._pool.request("POST", url, body=body, headers=headers)
        except urllib3.exceptions.HTTPError as error:
            raise Unreachable(f"{address}: {_brief(error)}") from error
        if response.status == 200:
            return response.data
        text = response.data[:500].decode(errors="replace")
        if response.status in (500, 503):
            raise Unreachable(f"{address}: {text or 'not ready'}")
        kind = _ERRORS.get(response.status, ChannelError)
        if kind is ChannelError:
            text = (
                f"{address} answers HTTP {response.status} to {method!r} ({text}): another run, "
                "another program or another version of tba_jax listens there"
            )
        raise kind(text)


def _brief(error: BaseException) -> str:
    """Return the innermost cause of an error, which urllib3 wraps in several exceptions."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {error}"[:200]


def own_addresses() -> list[str]:
    """Return the addresses of this machine for other machines; that of the default route first.

    Loopback addresses are left out: a client of another machine would show the token to a program
    of its own machine.
    """
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
    return list(dict.fromkeys(each for each in found if not each.startswith("127.")))
