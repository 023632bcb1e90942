# SPDX-License-Identifier: Apache-2.0
"""HTTP server of an ASGI application, on a separate thread."""

import logging
import socket
from collections.abc import Awaitable, Callable
from typing import Any

from tba_jax.devices.worker import StopFlag, Worker

Application = Callable[[Any, Any, Any], Awaitable[None]]
"""An ASGI application: (scope, receive, send)."""

_START_S = 30.0
_STOP_S = 10.0


def bind(host: str, port: int) -> socket.socket:
    """Return a socket that is bound to an address.

    Args:
        port: port; 0: any free port.

    Raises:
        OSError: the port is in use, not permitted, or no port number.
    """
    found = socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET)
    found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        found.bind((host, port))
    except (OSError, OverflowError) as error:
        found.close()
        raise OSError(str(error)) from error
    return found


class HttpServer:
    """HTTP server of one application; accepts requests after `start`.

    Args:
        bound: result of `bind`; the server closes this socket.

    Attributes:
        port: the port that the server listens on.
    """

    def __init__(self, application: Application, name: str, bound: socket.socket) -> None:
        import uvicorn  # slow; runs of one process need no server

        self._name, self._socket, self.port = name, bound, bound.getsockname()[1]
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
        self._stop = StopFlag()
        self._worker = Worker(name, self._serve, self._stop)

    def _serve(self) -> bool:
        self._server.run(sockets=[self._socket])
        self._stop.set()
        return True

    def start(self) -> None:
        """Start the thread that accepts requests.

        Raises:
            TimeoutError: the server did not start in time.
        """
        self._worker.start()
        for _ in range(int(_START_S / 0.01)):
            self._stop.check()
            if self._server.started:
                return
            self._stop.wait(0.01)
        raise TimeoutError(
            f"the {self._name} did not start within {_START_S:.0f} s: the machine is overloaded. "
            "Run the same command again"
        )

    def close(self) -> None:
        """Stop listening; give unfinished requests a short time to end."""
        self._server.should_exit = True
        self._worker.join(_STOP_S)
        self._socket.close()
