# SPDX-License-Identifier: Apache-2.0
"""Messages between the owner of a run and its other processes, and their bytes.

A response may be lost, so every request may arrive twice or late. `decode` is the exact inverse of
`encode`, except that a mapping becomes a dictionary. Nothing is pickled.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import msgpack
import numpy as np

from tba_jax.flow.layout import Batch
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

Work = Sequence[Ticket] | Sequence[EvaluationTicket]
"""Tickets to begin, or one evaluation shard."""


class Mail(NamedTuple):
    """Results, demand and metrics of one searcher: arguments of the methods of `Owner`."""

    searcher: int
    free: int = -1  # no work is wanted
    version: int = -1
    idle_s: float = 0.0
    decoded: DecodeCounts = DecodeCounts()
    results: tuple[Result | EvaluationResult, ...] = ()


class Plan(NamedTuple):
    """Decision on one step, the same for every trainer process; without batch and stop: wait."""

    stop: bool = False  # whether the run ends before this step
    publish: bool = True  # whether a publication that is due after this step is made
    batch: Batch | None = None
    draws: Sequence[Draw] = ()  # empty in processes that did not draw the batch


_KINDS: dict[str, Any] = {
    kind.__name__: kind
    for kind in (
        *(Prompt, Trajectory, Group, Ticket, Report, Result),
        *(EvaluationTicket, EvaluationShard, EvaluationResult, DecodeCounts),
        *(Mail, Plan, Batch),
    )
}
_MAKERS = _KINDS | {"int": int, "tuple": lambda *values: values}
_MAKERS["array"] = lambda dtype, shape, data: np.frombuffer(data, dtype).reshape(shape)
_NAME = "\x00"  # key of an entry that stands for a value that msgpack does not know


def encode(message: Any) -> bytes:
    """Return a message as bytes: JSON-compatible values, arrays, tuples, and the classes above."""
    packer = msgpack.Packer(default=_plain, strict_types=True, unicode_errors="surrogatepass")
    return packer.pack(message)


def _plain(x: Any) -> dict[str, Any]:
    name = type(x).__name__
    if _KINDS.get(name) is type(x):
        is_tuple = isinstance(x, tuple)
        fields = x if is_tuple else [getattr(x, each.name) for each in dataclasses.fields(x)]
        return {_NAME: name, "of": list(fields)}
    if isinstance(x, np.ndarray | np.generic):
        x = np.asarray(x)
        return {_NAME: "array", "of": [x.dtype.str, list(x.shape), x.tobytes()]}
    if isinstance(x, tuple):
        return {_NAME: "tuple", "of": list(x)}
    if isinstance(x, Mapping):
        return dict(x)
    if isinstance(x, int):  # of more than 64 bits
        return {_NAME: "int", "of": [str(x)]}
    raise TypeError(f"a message has a value of the type {name}")


def decode(data: bytes, kind: type = object) -> Any:
    """Inverse of `encode`, for a message of one kind.

    Raises:
        ValueError: the bytes are damaged, or another version of tba_jax wrote them.
    """

    def value(entry: dict[Any, Any]) -> Any:
        return _MAKERS[entry[_NAME]](*entry["of"]) if _NAME in entry else entry

    try:
        message = msgpack.unpackb(
            data, object_hook=value, strict_map_key=False, unicode_errors="surrogatepass"
        )
        if not isinstance(message, kind):
            raise TypeError(f"it is a {type(message).__name__}, wanted {kind.__name__}")
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{len(data):,} bytes of a message cannot be read ({type(error).__name__}: {error}): "
            "they were damaged in transit or sent by another version of tba_jax. Install the same "
            "version on every machine"
        ) from error
    return message
