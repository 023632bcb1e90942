# SPDX-License-Identifier: Apache-2.0
"""Messages between searchers and the search server, and their bytes.

A response may be lost, so every message may arrive twice, late, or from a searcher that was
replaced. Every message therefore names its sender.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from types import NoneType, UnionType
from typing import Any, Literal, NamedTuple, get_args, get_origin, get_type_hints

from tba_jax.flow.array_bytes import pack_arrays, unpack_arrays
from tba_jax.flow.evaluation_shard import Lease
from tba_jax.flow.rounds import NO_COUNTS, DecodeCounts, RoundCommit, pack_commits, unpack_commits

RUN_ENDED = "the run has ended"


class JoinRequest(NamedTuple):
    """Request of a process to run searchers.

    Attributes:
        searchers: IDs of the searchers that the process runs.
        host: name of the machine, for log lines.
        identity: digest of the code, and the run ID, in that process.
        given: for each searcher, (number of given responses, number of rounds with them). These
            are the first rounds of the searcher. Empty without given responses.
    """

    searchers: tuple[int, ...]
    host: str
    identity: Mapping[str, str]
    given: tuple[tuple[int, int], ...] = ()


class SearcherKey(NamedTuple):
    """Sender of a message.

    Attributes:
        epoch: name of the search server that the searcher joined.
        incarnation: number of the process that runs this searcher, from 1.
    """

    epoch: str
    searcher: int
    incarnation: int


class SearcherStart(NamedTuple):
    """Start state of a searcher.

    Attributes:
        key: sender of the searcher's later messages.
        position: `Outbox.position` from which the searcher continues.
    """

    key: SearcherKey
    position: Mapping[str, Any]


class JoinResponse(NamedTuple):
    """Response to a join request.

    Attributes:
        starts: start state of each searcher; empty if the process is refused.
        version: newest complete policy version; -1: there is none.
        refusal: reason why the process may not search, or RUN_ENDED; "": it may search.
        run_s: running time of the run in seconds.
    """

    starts: tuple[SearcherStart, ...]
    version: int = -1
    refusal: str = ""
    run_s: float = 0.0


Status = Literal["ok", "duplicate", "rewind", "fenced", "refused", "ended"]


class Response(NamedTuple):
    """Response to every message of a searcher except a join request.

    Attributes:
        status: ok; duplicate: all tickets of the message had arrived before; rewind: the trainer
            was restored, and the searcher must join again; fenced: another process runs this
            searcher; refused: the message is invalid, see `reason`; ended: the run has ended.
        tickets: tickets that the searcher may start.
        version: newest complete policy version, -1 for none.
        retry_s: seconds after which another ticket request may return more tickets.
        reason: explanation for the log.
        lease: evaluation shard to work on next; None: there is none.
        evaluated: policy versions under evaluation, whose weights are still needed.
    """

    status: Status
    tickets: tuple[int, ...] = ()
    version: int = -1
    retry_s: float = 0.0
    reason: str = ""
    lease: Lease | None = None
    evaluated: tuple[int, ...] = ()


class Heartbeat(NamedTuple):
    """Metrics that a searcher sends with every ticket request.

    Attributes:
        idle_s: seconds without work since the searcher joined.
        put_s: seconds from sending to acknowledgement of each put since the last heartbeat.
        decoded: counts of the decode session since the last heartbeat.
        can_evaluate: whether the searcher takes an evaluation shard.
        version: policy version with which the next ticket would start, -1 for none.
        wants_stop: whether the process of the searcher received a stop signal.
    """

    idle_s: float = 0.0
    put_s: tuple[float, ...] = ()
    decoded: DecodeCounts = NO_COUNTS
    can_evaluate: bool = False
    version: int = -1
    wants_stop: bool = False


def pack_put(key: SearcherKey, commits: Sequence[RoundCommit]) -> bytes:
    """Return a put request as bytes with a checksum."""
    arrays, meta = pack_commits(commits)
    return pack_arrays(arrays, {"key": key, "commits": meta})


def unpack_put(data: bytes) -> tuple[SearcherKey, list[RoundCommit]]:
    """Return the put request that `pack_put` converted to bytes.

    Raises:
        ValueError: the bytes are damaged, or another version of tba_jax wrote them.
    """
    try:
        arrays, meta = unpack_arrays(data)
        return SearcherKey(*meta["key"]), unpack_commits(arrays, meta["commits"])
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{len(data):,} bytes of responses cannot be read ({type(error).__name__}: {error}): "
            "they were damaged in transit or sent by another version of tba_jax. Install the same "
            "version on every machine"
        ) from error


def pack_json(value: Any) -> bytes:
    """Return a message as JSON bytes; named tuples become lists."""
    return json.dumps(value).encode()


def from_json(kind: Any, value: Any) -> Any:
    """Return the value of type `kind` that `pack_json` converted.

    Args:
        kind: named tuple, tuple, or a type of JSON values; may also allow None.

    Raises:
        ValueError, TypeError: the value has another form.
    """
    if value is None:
        return None
    kinds = [each for each in get_args(kind) if each is not NoneType]
    if get_origin(kind) is UnionType:
        return from_json(kinds[0], value)
    if get_origin(kind) is tuple:
        kinds = kinds[:1] * len(value) if kinds[-1] is Ellipsis else kinds
        return tuple(from_json(each, x) for each, x in zip(kinds, value, strict=True))
    if not hasattr(kind, "_fields"):
        return value
    return kind(*(from_json(each, x) for each, x in zip(_types(kind), value, strict=True)))


@functools.cache
def _types(kind: Any) -> list[Any]:
    """Return the types of a named tuple's fields."""
    hints = get_type_hints(kind)
    return [hints[name] for name in kind._fields]
