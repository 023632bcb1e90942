# SPDX-License-Identifier: Apache-2.0
"""Requests to a search server over a channel: the handlers of the server, and their client."""

import json
from collections.abc import Callable, Mapping, Sequence

from tba_jax.flow.evaluation_shard import EvaluationShard, Lease
from tba_jax.flow.rounds import RoundCommit
from tba_jax.remote.channel import Channel, Handler, NotReady
from tba_jax.remote.messages import (
    Heartbeat,
    JoinRequest,
    JoinResponse,
    Response,
    SearcherKey,
    from_json,
    pack_json,
    pack_put,
    unpack_put,
)
from tba_jax.remote.search_server import SearchServer

_TicketRequest = tuple[SearcherKey, int, int, Heartbeat]
_LeaseResult = tuple[SearcherKey, Lease, EvaluationShard | None]


def search_handlers(server: Callable[[], SearchServer | None]) -> Mapping[str, Handler]:
    """Return the channel handlers of a search server.

    Args:
        server: returns the search server; None before there is one.
    """

    def ready() -> SearchServer:
        found = server()
        if found is None:
            raise NotReady("the trainer is starting, or has failed; its output has the cause")
        return found

    def join(data: bytes) -> bytes:
        return pack_json(ready().join(from_json(JoinRequest, json.loads(data))))

    def request_tickets(data: bytes) -> bytes:
        return pack_json(ready().request_tickets(*from_json(_TicketRequest, json.loads(data))))

    def put(data: bytes) -> bytes:
        found = ready()
        try:
            key, commits = unpack_put(data)
        except ValueError as error:
            return pack_json(Response("refused", reason=str(error)))
        return pack_json(found.put(key, commits, num_bytes=len(data)))

    def return_lease(data: bytes) -> bytes:
        return pack_json(ready().return_lease(*from_json(_LeaseResult, json.loads(data))))

    return {
        "join": join,
        "request_tickets": request_tickets,
        "put": put,
        "return_lease": return_lease,
    }


class RemoteSearchServer:
    """A search server in another process."""

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def join(self, request: JoinRequest) -> JoinResponse:
        """See `SearchServer.join`."""
        return from_json(JoinResponse, json.loads(self._channel.call("join", pack_json(request))))

    def request_tickets(
        self, key: SearcherKey, max_tickets: int, first_unseen: int, heartbeat: Heartbeat
    ) -> Response:
        """See `SearchServer.request_tickets`."""
        return self._send("request_tickets", pack_json([key, max_tickets, first_unseen, heartbeat]))

    def put(self, key: SearcherKey, commits: Sequence[RoundCommit]) -> Response:
        """See `SearchServer.put`."""
        return self._send("put", pack_put(key, commits))

    def return_lease(
        self, key: SearcherKey, lease: Lease, shard: EvaluationShard | None
    ) -> Response:
        """See `SearchServer.return_lease`."""
        return self._send("return_lease", pack_json([key, lease, shard]))

    def _send(self, method: str, data: bytes) -> Response:
        return from_json(Response, json.loads(self._channel.call(method, data)))


SearchRequests = SearchServer | RemoteSearchServer
"""Search server of this process, or a channel to one.

Every method of a channel raises `Unreachable` if no response arrives in time.
"""
