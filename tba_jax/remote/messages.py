# SPDX-License-Identifier: Apache-2.0
"""Messages between searchers of other processes and the owner, and their bytes.

A response may be lost, so every message may arrive twice or late. Every message therefore names its
sender and the owner that the sender joined.
"""

import itertools
import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

from tba_jax.flow.array_bytes import pack_arrays, unpack_arrays
from tba_jax.flow.records import pack_groups, unpack_groups
from tba_jax.flow.tickets import (
    DecodeCounts,
    EvaluationShard,
    EvaluationTicket,
    Result,
    Ticket,
    pack_results,
    unpack_results,
)
from tba_jax.flow.trajectory import Group, Prompt

RUN_ENDED = "the run has ended"


class JoinRequest(NamedTuple):
    """Request of a process to run searchers.

    Attributes:
        searchers: IDs of the searchers that the process runs.
        host: name of the machine, for log lines.
        identity: digest of the code, and the run ID, in that process.
    """

    searchers: Sequence[int]
    host: str
    identity: Mapping[str, str]


class JoinResponse(NamedTuple):
    """Response to a join request.

    Attributes:
        epoch: name of the owner, for later messages.
        version: newest complete policy version; -1: there is none.
        run_s: running time of the run in seconds.
        refusal: reason why the process may not search, or RUN_ENDED; "": it may search.
    """

    epoch: str = ""
    version: int = -1
    run_s: float = 0.0
    refusal: str = ""


class Sender(NamedTuple):
    """Sender of a message: the epoch of the owner that the searcher joined, and its ID."""

    epoch: str
    searcher: int


class Heartbeat(NamedTuple):
    """Metrics of a searcher.

    Attributes:
        idle_s: seconds without work since the process joined.
        decoded: counts of the decode session since the last heartbeat.
        wants_stop: whether the process received a stop signal.
    """

    idle_s: float = 0.0
    decoded: DecodeCounts = DecodeCounts()
    wants_stop: bool = False


class Demand(NamedTuple):
    """Request for tickets.

    Attributes:
        free: maximum number of new tickets.
        version: policy version with which they would begin; -1: the searcher has no weights.
        held: numbers of all tickets that the searcher has.
        evaluates: whether the searcher takes an evaluation shard.
    """

    free: int
    version: int
    held: Sequence[int]
    evaluates: bool


Status = Literal["ok", "rewind", "refused", "ended"]


class Response(NamedTuple):
    """Response to a message of a searcher.

    Attributes:
        status: ok; rewind: another owner continues the run from a checkpoint, and the searcher must
            join again; refused: the message is invalid, see `reason`; ended: the run has ended.
        version: newest complete policy version, -1 for none.
        evaluated: policy versions under evaluation, whose weights are still needed.
        retry_s: seconds after which another request may return more tickets.
        reason: explanation for the log.
        tickets: tickets to begin.
    """

    status: Status
    version: int = -1
    evaluated: Sequence[int] = ()
    retry_s: float = 0.0
    reason: str = ""
    tickets: Sequence[Ticket | EvaluationTicket] = ()


def pack_demand(sender: Sender, demand: Demand, heartbeat: Heartbeat) -> bytes:
    """Return a request for tickets as bytes."""
    return json.dumps([sender, demand, heartbeat]).encode()


def unpack_demand(data: bytes) -> tuple[Sender, Demand, Heartbeat]:
    """Inverse of `pack_demand`."""
    sender, demand, (idle_s, decoded, wants_stop) = json.loads(data)
    heartbeat = Heartbeat(idle_s, DecodeCounts(*decoded), wants_stop)
    return Sender(*sender), Demand(*demand), heartbeat


def pack_put(sender: Sender, results: Sequence[Result]) -> bytes:
    """Return results as bytes with a checksum."""
    arrays, meta = pack_results(results)
    return pack_arrays(arrays, {"sender": sender, "results": meta})


def unpack_put(data: bytes) -> tuple[Sender, list[Result]]:
    """Inverse of `pack_put`.

    Raises:
        ValueError: the bytes are damaged, or another version of tba_jax wrote them.
    """
    try:
        arrays, meta = unpack_arrays(data)
        return Sender(*meta["sender"]), unpack_results(arrays, meta["results"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{len(data):,} bytes of responses cannot be read ({type(error).__name__}: {error}): "
            "they were damaged in transit or sent by another version of tba_jax. Install the same "
            "version on every machine"
        ) from error


def pack_shard(sender: Sender, version: int, first: int, shard: EvaluationShard | None) -> bytes:
    """Return an evaluation shard as bytes."""
    return json.dumps([sender, version, first, shard]).encode()


def unpack_shard(data: bytes) -> tuple[Sender, EvaluationTicket, EvaluationShard | None]:
    """Inverse of `pack_shard`; the ticket has no prompts."""
    sender, version, first, shard = json.loads(data)
    found = None if shard is None else EvaluationShard(*shard)
    return Sender(*sender), EvaluationTicket(version, first, ()), found


def pack_response(response: Response) -> bytes:
    """Return a response with its tickets as bytes with a checksum."""
    prompts: list[Prompt] = []
    facts: list[list[Any]] = []
    for each in response.tickets:
        if isinstance(each, EvaluationTicket):
            facts.append([len(each.prompts), each.version, each.first])
            prompts += each.prompts
        else:
            facts.append([0, each.number, [y.tolist() for y in each.responses]])
            prompts.append(each.prompt)
    arrays, meta = pack_groups([Group(prompt, (), {}) for prompt in prompts])
    return pack_arrays(arrays, {"response": response[:-1], "prompts": meta, "tickets": facts})


def unpack_response(data: bytes) -> Response:
    """Inverse of `pack_response`."""
    arrays, meta = unpack_arrays(data)
    prompts = iter([group.prompt for group in unpack_groups(arrays, meta["prompts"])])
    tickets: list[Ticket | EvaluationTicket] = []
    for count, number, rest in meta["tickets"]:
        if count:
            tickets.append(EvaluationTicket(number, rest, tuple(itertools.islice(prompts, count))))
        else:
            responses = tuple(np.array(y, np.int32) for y in rest)
            tickets.append(Ticket(number, next(prompts), responses))
    return Response(*meta["response"], tickets=tickets)
