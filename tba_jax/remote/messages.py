# SPDX-License-Identifier: Apache-2.0
"""Messages between the owner of a run and its other processes, and their bytes.

A response may be lost, so every request may arrive twice or late. `decode` is the exact inverse of
`encode`, except that keys of mappings become text.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.layout import Batch
from tba_jax.flow.state import pack_arrays, unpack_arrays
from tba_jax.flow.tickets import (
    DecodeCounts,
    EvaluationResult,
    EvaluationShard,
    EvaluationTicket,
    Report,
    Result,
    Ticket,
)
from tba_jax.flow.trajectory import Draw, Group, Prompt, Trajectory


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


class Request(NamedTuple):
    """Results and demand of a searcher.

    Attributes:
        place: name of the owner and of the join of this process.
        number: counts the requests of a place; a repeated one gets the same response.
        free: maximum number of tickets in the response; -1: no work.
        version: version of the searcher's weights; -1: it has none.
    """

    place: str
    searcher: int
    number: int
    free: int
    version: int
    heartbeat: Heartbeat
    results: tuple[Result | EvaluationResult, ...]


class Response(NamedTuple):
    """Work for a searcher.

    Attributes:
        version: newest complete policy version; -1: there is none.
        evaluated: versions under evaluation.
        retry_s: seconds after which a searcher without work may ask again.
    """

    version: int
    evaluated: tuple[int, ...]
    retry_s: float
    work: Sequence[Ticket] | Sequence[EvaluationTicket]


class StepPlan(NamedTuple):
    """Decision on one step, the same for every trainer process.

    Attributes:
        wait: whether there is no batch yet.
        stop: whether the run ends before this step.
        sync: whether to merge, and publish if `publish` is set, after this step.
        save: whether to write a checkpoint after this step.
        publish: whether a sync publishes. While a process still writes the last version, this is
            False unless every version is needed.
    """

    wait: bool = False
    stop: bool = False
    sync: bool = False
    save: bool = False
    publish: bool = True


class Decision(NamedTuple):
    """Plan and batch of a step.

    Attributes:
        batch: batch to train on; None if the plan waits or stops.
        draws: draws in the batch; empty in processes that did not draw the batch.
    """

    plan: StepPlan
    batch: Batch | None = None
    draws: Sequence[Draw] = ()


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Prompt, Trajectory, Group, Ticket, Report, Result),
        *(EvaluationTicket, EvaluationShard, EvaluationResult, DecodeCounts, Heartbeat),
        *(Request, Response, StepPlan, Decision, Batch),
    )
}
_NAME = "\x00"  # key of an entry that stands for an array, a tuple or an object of these kinds


def encode(message: Any) -> bytes:
    """Return a message as bytes: JSON-compatible values, arrays, tuples, and the classes above."""
    arrays: dict[str, np.ndarray] = {}

    def plain(x: Any) -> Any:
        if isinstance(x, np.ndarray | np.generic):
            arrays[str(len(arrays))] = np.asarray(x)
            return {_NAME: "array", "at": str(len(arrays) - 1)}
        name = type(x).__name__
        if _KINDS.get(name) is type(x):
            names = getattr(x, "_fields", None) or x.__dataclass_fields__
            return {_NAME: name, "of": [plain(getattr(x, field)) for field in names]}
        if isinstance(x, tuple):
            return {_NAME: "tuple", "of": [plain(each) for each in x]}
        if isinstance(x, list):
            return [plain(each) for each in x]
        if isinstance(x, Mapping):
            return {str(key): plain(value) for key, value in x.items()}
        return x

    # `plain` fills the arrays.
    tree = plain(message)
    return pack_arrays(arrays, tree)


def decode(data: bytes, kind: type = object) -> Any:
    """Inverse of `encode`, for a message of one kind.

    Raises:
        ValueError: the bytes are damaged, or another version of tba_jax wrote them.
    """

    def value(x: Any) -> Any:
        if isinstance(x, list):
            return [value(each) for each in x]
        if not isinstance(x, dict):
            return x
        name = x.get(_NAME)
        if name is None:
            return {key: value(each) for key, each in x.items()}
        if name == "array":
            return arrays[x["at"]]
        fields = [value(each) for each in x["of"]]
        return tuple(fields) if name == "tuple" else _KINDS[name](*fields)

    try:
        arrays, tree = unpack_arrays(data)
        message = value(tree)
        if not isinstance(message, kind):
            raise TypeError(f"it is a {type(message).__name__}, wanted {kind.__name__}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{len(data):,} bytes of a message cannot be read ({type(error).__name__}: {error}): "
            "they were damaged in transit or sent by another version of tba_jax. Install the same "
            "version on every machine"
        ) from error
    return message
