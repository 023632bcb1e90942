# SPDX-License-Identifier: Apache-2.0
"""Messages between the owner of a run and its other processes, and their bytes.

A response may be lost, so every message may arrive twice or late.
"""

import itertools
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
    Result,
    Ticket,
)
from tba_jax.flow.trajectory import Draw, Group
from tba_jax.replay.records import pack_groups, pack_results, unpack_groups, unpack_results


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


class Joined(NamedTuple):
    """Response to a process that joins.

    Attributes:
        epoch: name of the owner, for later messages.
        version: newest complete policy version; -1: there is none.
        run_s: running time of the run in seconds.
    """

    epoch: str
    version: int
    run_s: float


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


Work = Sequence[Ticket] | Sequence[EvaluationTicket]


def pack_request(request: Mapping[str, Any], results: Sequence[Any]) -> bytes:
    """Return a searcher's request, with JSON-compatible values, and its results as bytes."""
    arrays, tickets = pack_results([each for each in results if isinstance(each, Result)])
    shards = [each for each in results if isinstance(each, EvaluationResult)]
    return pack_arrays(arrays, {"request": request, "tickets": tickets, "shards": shards})


def unpack_request(data: bytes) -> tuple[dict[str, Any], list[Result | EvaluationResult]]:
    """Inverse of `pack_request`.

    Raises:
        ValueError: the bytes are damaged, or another version of tba_jax wrote them.
    """
    try:
        arrays, meta = unpack_arrays(data)
        shards = [
            EvaluationResult(version, first, None if shard is None else EvaluationShard(*shard))
            for version, first, shard in meta["shards"]
        ]
        return meta["request"], [*unpack_results(arrays, meta["tickets"]), *shards]
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{len(data):,} bytes of a request cannot be read ({type(error).__name__}: {error}): "
            "they were damaged in transit or sent by another version of tba_jax. Install the same "
            "version on every machine"
        ) from error


def pack_work(response: Mapping[str, Any], work: Work) -> bytes:
    """Return a response, with JSON-compatible values, and tickets as bytes with a checksum."""
    prompts, facts = [], []
    for each in work:
        if isinstance(each, EvaluationTicket):
            facts.append([len(each.prompts), each.version, each.first])
            prompts += each.prompts
        else:
            facts.append([0, each.number, [y.tolist() for y in each.responses]])
            prompts.append(each.prompt)
    arrays, meta = pack_groups([Group(prompt, (), {}) for prompt in prompts])
    return pack_arrays(arrays, {"response": response, "prompts": meta, "tickets": facts})


def unpack_work(data: bytes) -> tuple[dict[str, Any], list[Any]]:
    """Inverse of `pack_work`."""
    arrays, meta = unpack_arrays(data)
    prompts = iter([group.prompt for group in unpack_groups(arrays, meta["prompts"])])
    work: list[Any] = []
    for count, number, rest in meta["tickets"]:
        if count:
            work.append(EvaluationTicket(number, rest, tuple(itertools.islice(prompts, count))))
        else:
            responses = tuple(np.array(y, np.int32) for y in rest)
            work.append(Ticket(number, next(prompts), responses))
    return meta["response"], work


def pack_decision(decision: Decision) -> bytes:
    """Return plan and batch of a decision as bytes."""
    batch = decision.batch
    arrays = {} if batch is None else {n: x for n, x in batch._asdict().items() if x is not None}
    return pack_arrays(arrays, decision.plan)


def unpack_decision(data: bytes) -> Decision:
    """Return the decision that `pack_decision` converted, without its draws.

    Raises:
        ValueError: the bytes are damaged.
    """
    arrays, plan = unpack_arrays(data)
    return Decision(StepPlan(*plan), Batch(**arrays) if arrays else None)
