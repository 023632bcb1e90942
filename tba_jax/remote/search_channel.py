# SPDX-License-Identifier: Apache-2.0
"""Messages of searchers to the owner over a channel: handlers of the owner, and their client."""

import json
from collections.abc import Callable, Mapping, Sequence

from tba_jax.flow.tickets import EvaluationShard, EvaluationTicket, Result, Ticket
from tba_jax.remote.channel import Channel, Handler, NotReady
from tba_jax.remote.messages import (
    RUN_ENDED,
    Demand,
    Heartbeat,
    JoinRequest,
    JoinResponse,
    Response,
    Sender,
    pack_demand,
    pack_put,
    pack_response,
    pack_shard,
    unpack_demand,
    unpack_put,
    unpack_response,
    unpack_shard,
)
from tba_jax.remote.owner import Owner

# Maximum rate of requests from all searchers without work, in requests per second; a single
# searcher waits at least _RETRY_S seconds between two requests.
_MAX_REQUESTS_PER_S = 400.0
_RETRY_S = 0.02


def search_handlers(owner: Callable[[], Owner | None]) -> Mapping[str, Handler]:
    """Return the channel handlers of an owner.

    Args:
        owner: returns the owner; None before there is one.
    """

    def ready() -> Owner:
        found = owner()
        if found is None:
            raise NotReady("the trainer is starting, or has failed; its output has the cause")
        return found

    def respond(
        found: Owner, sender: Sender, act: Callable[[], Sequence[Ticket | EvaluationTicket]]
    ) -> bytes:
        """Act on a message, unless its sender must join again."""
        if found.has_ended:
            return pack_response(Response("ended", reason=RUN_ENDED))
        if sender.epoch != found.settings.epoch:
            reason = (
                "the trainer was restored from a checkpoint; responses that the checkpoint does "
                "not hold are sampled again"
            )
            return pack_response(Response("rewind", reason=reason))
        try:
            tickets = act()
        except ValueError as error:
            return pack_response(Response("refused", reason=str(error)))
        retry_s = max(_RETRY_S, found.num_connected / _MAX_REQUESTS_PER_S)
        response = Response("ok", found.version, found.evaluations.versions, retry_s)
        return pack_response(response._replace(tickets=tickets))

    def join(data: bytes) -> bytes:
        return json.dumps(ready().join(JoinRequest(*json.loads(data)))).encode()

    def take(data: bytes) -> bytes:
        found, (sender, demand, heartbeat) = ready(), unpack_demand(data)

        def act() -> list[Ticket | EvaluationTicket]:
            found.beat(sender.searcher, heartbeat)
            tickets = found.take(sender.searcher, demand.free, demand.version, demand.held)
            shard = found.take_evaluation(sender.searcher) if demand.evaluates else None
            return [*tickets, *([] if shard is None else [shard])]

        return respond(found, sender, act)

    def put(data: bytes) -> bytes:
        found, (sender, results) = ready(), unpack_put(data)
        return respond(found, sender, lambda: found.put(sender.searcher, results) or ())

    def put_evaluation(data: bytes) -> bytes:
        found, (sender, ticket, shard) = ready(), unpack_shard(data)
        return respond(
            found, sender, lambda: found.put_evaluation(sender.searcher, ticket, shard) or ()
        )

    return {"join": join, "take": take, "put": put, "put_evaluation": put_evaluation}


class RemoteOwner:
    """The owner in another process.

    Every method raises `Unreachable` if no response arrives in time.
    """

    def __init__(self, channel: Channel) -> None:
        self._channel = channel

    def join(self, request: JoinRequest) -> JoinResponse:
        """See `Owner.join`."""
        data = self._channel.call("join", json.dumps(request).encode())
        return JoinResponse(*json.loads(data))

    def take(self, sender: Sender, demand: Demand, heartbeat: Heartbeat) -> Response:
        """Request tickets; see `Owner.take` and `Owner.beat`."""
        return self._call("take", pack_demand(sender, demand, heartbeat))

    def put(self, sender: Sender, results: Sequence[Result]) -> Response:
        """See `Owner.put`."""
        return self._call("put", pack_put(sender, results))

    def put_evaluation(
        self, sender: Sender, ticket: EvaluationTicket, shard: EvaluationShard | None
    ) -> Response:
        """See `Owner.put_evaluation`."""
        return self._call("put_evaluation", pack_shard(sender, ticket.version, ticket.first, shard))

    def _call(self, method: str, data: bytes) -> Response:
        return unpack_response(self._channel.call(method, data))
