# SPDX-License-Identifier: Apache-2.0
"""HTTP server of an ASGI application, on a separate thread."""

import logging
import socket
import threading
from collections.abc import Awaitable, Callable
from typing import Any

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application: (scope, receive, send)."""

_STOP_S = 10.0  # longest wait for the end of requests


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that listens at an address (port 0: any free port), or raise OSError."""
    if not 0 <= port < 2**16:
        raise OSError("a port is a number from 0 to 65535")
    return socket.create_server(
        (host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET
    )


class HttpServer:
    """HTTP server of one application at a socket of `bind`, which queues early requests."""

    def __init__(self, application: Application, name: str, bound: socket.socket) -> None:
        import uvicorn  # slow; runs of one process need no server

        self._socket, self.port = bound, bound.getsockname()[1]
        logging.getLogger("uvicorn.error").setLevel(logging.CRITICAL)
        self._server = uvicorn.Server(
            uvicorn.Config(
                application,
                interface="asgi3",
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=600,
                timeout_graceful_shutdown=1,
            )
        )
        self._thread = threading.Thread(None, self._server.run, name, ([bound],), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop listening; give unfinished requests a short time to end."""
        self._server.should_exit = True
        self._thread.join(_STOP_S)
        self._socket.close()
