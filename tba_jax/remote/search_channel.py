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
    Trace,
    pack_json,
    pack_lease_result,
    pack_put,
    unpack_heartbeat,
    unpack_join_request,
    unpack_join_response,
    unpack_lease_result,
    unpack_put,
    unpack_response,
)
from tba_jax.remote.search_server import SearchServer


def search_handlers(server: Callable[[], SearchServer | None]) -> Mapping[str, Handler]:
    """Return the channel handlers of a search server.

    Args:
        server: returns the search server, None while there is none.
    """

    def ready() -> SearchServer:
        found = server()
        if found is None:
            raise NotReady("the trainer is starting, or has failed")
        return found

    def join(data: bytes) -> bytes:
        return pack_json(ready().join(unpack_join_request(data)))

    def request_tickets(data: bytes) -> bytes:
        key, max_tickets, first_unseen, heartbeat = json.loads(data)
        return pack_json(
            ready().request_tickets(
                SearcherKey(*key), max_tickets, first_unseen, unpack_heartbeat(heartbeat)
            )
        )

    def put(data: bytes) -> bytes:
        found = ready()
        try:
            key, commits, trace = unpack_put(data)
        except ValueError as error:
            return pack_json(Response("refused", reason=str(error)))
        return pack_json(found.put(key, commits, trace, num_bytes=len(data)))

    def return_lease(data: bytes) -> bytes:
        found = ready()
        try:
            result = unpack_lease_result(data)
        except ValueError as error:
            return pack_json(Response("refused", reason=str(error)))
        return pack_json(found.return_lease(*result))

    return {
        "join": join,
        "request_tickets": request_tickets,
        "put": put,
        "return_lease": return_lease,
    }


class RemoteSearchServer:
    """A search server in another process.

    Args:
        channel: to that process.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def join(self, request: JoinRequest) -> JoinResponse:
        """See `SearchServer.join`."""
        return unpack_join_response(self._channel.call("join", pack_json(request)))

    def request_tickets(
        self, key: SearcherKey, max_tickets: int, first_unseen: int, heartbeat: Heartbeat
    ) -> Response:
        """See `SearchServer.request_tickets`."""
        data = pack_json([key, max_tickets, first_unseen, heartbeat])
        return unpack_response(self._channel.call("request_tickets", data))

    def put(self, key: SearcherKey, commits: Sequence[RoundCommit], trace: Trace) -> Response:
        """See `SearchServer.put`."""
        return unpack_response(self._channel.call("put", pack_put(key, commits, trace)))

    def return_lease(
        self, key: SearcherKey, lease: Lease, shard: EvaluationShard | None
    ) -> Response:
        """See `SearchServer.return_lease`."""
        data = pack_lease_result(key, lease, shard)
        return unpack_response(self._channel.call("return_lease", data))
