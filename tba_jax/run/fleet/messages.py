# SPDX-License-Identifier: Apache-2.0
"""What searchers and the trainer of a fleet say to one another, and responses as bytes.

Calls may fail after they succeeded, so every message may arrive twice, late, or from a searcher
that was replaced long ago; each names who sent it. Nothing here knows how messages travel.
Invariant: what was encoded comes back exactly, and what was damaged on the way is refused.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

from tba_jax.evaluation.evaluator import Part
from tba_jax.flow.array_bytes import pack_arrays, unpack_arrays
from tba_jax.flow.rounds import RoundCommit, pack_commits, unpack_commits
from tba_jax.weights.stored import Stored


class Hello(NamedTuple):
    """A host that wants to search.

    Attributes:
        slots: searchers of the run that it is to be.
        host: its name, for people.
        identity: names of its code and of what the run is made of there.
    """

    slots: tuple[int, ...]
    host: str
    identity: Mapping[str, str]


class Caller(NamedTuple):
    """Who sends a message.

    Attributes:
        epoch: of the trainer that it believes in.
        slot: which searcher it is.
        incarnation: which process that was this searcher, counted from 1.
    """

    epoch: str
    slot: int
    incarnation: int


class Seat(NamedTuple):
    """A searcher's place.

    Attributes:
        caller: how it names itself from now on.
        position: `Outbox.position` that it goes on from.
    """

    caller: Caller
    position: Mapping[str, Any]


# What a process of searchers is told that comes when there is nothing left to do.
RUN_ENDED = "the run has ended"


class Welcome(NamedTuple):
    """The answer to a hello.

    Attributes:
        seats: one for each slot; none where it is refused.
        version: newest complete version of the weights, -1 for none.
        refusal: why it may not search, "" if it may; `RUN_ENDED` is no failure.
    """

    seats: tuple[Seat, ...]
    version: int = -1
    refusal: str = ""


Verdict = Literal["ok", "duplicate", "rewind", "fenced", "refused", "over"]


class Answer(NamedTuple):
    """The answer to everything else.

    Attributes:
        verdict: ok; duplicate: all of it was there already; rewind: this is another trainer, or one
            that was restored, and the searcher must say hello again; fenced: another process is
            this searcher now; refused: the message makes no sense, `why` says what; over: the run
            has ended.
        tickets: that the searcher may begin.
        version: newest complete version of the weights, -1 for none.
        has_room: whether the trainer takes more.
        retry_s: time after which asking again may bring more.
        why: for a person.
        loan: (version, number) of a part of an evaluation to do next and hand in; None for none.
        weights: where versions are that the searcher was not told of, with an object store.
    """

    verdict: Verdict
    tickets: tuple[int, ...] = ()
    version: int = -1
    has_room: bool = True
    retry_s: float = 0.0
    why: str = ""
    loan: tuple[int, int] | None = None
    weights: tuple[Stored, ...] = ()


class Vitals(NamedTuple):
    """What a searcher tells about itself with every question.

    Attributes:
        idle_s: seconds without anything to do.
        put_s: seconds from sending until the acknowledgement of each put since the last question.
        slot_use: tokens drawn and slot-steps made since the last question.
        can_evaluate: it would do a part of an evaluation.
        version: of the weights that it has, with which it would begin; -1 for none.
        told: newest version that it knows the place of, with an object store.
    """

    idle_s: float = 0.0
    put_s: tuple[float, ...] = ()
    slot_use: tuple[int, int] = (0, 0)
    can_evaluate: bool = False
    version: int = -1
    told: int = -1


def encode(commits: Sequence[RoundCommit]) -> bytes:
    """Commits as bytes; nothing is pickled."""
    return pack_arrays(*pack_commits(commits))


def encode_part(part: Part) -> bytes:
    """A part of an evaluation as JSON."""
    return json.dumps(part._asdict()).encode()


def decode_part(data: bytes) -> Part:
    """Inverse of `encode_part`.

    Raises:
        ValueError: the bytes are damaged, or another version wrote them.
    """
    try:
        return Part(**json.loads(data))
    except (TypeError, ValueError) as error:
        raise ValueError(
            f"{len(data):,} bytes of an evaluation cannot be read ({error}); they were damaged on "
            "the way, or sent by another version of tba_jax"
        ) from error


def decode(data: bytes) -> list[RoundCommit]:
    """Inverse of `encode`.

    Raises:
        ValueError: the bytes are damaged, or another version wrote them.
    """
    try:
        return unpack_commits(*unpack_arrays(data))
    except (KeyError, TypeError, ValueError) as error:
        raise ValueError(
            f"{len(data):,} bytes of responses cannot be read ({type(error).__name__}: {error}); "
            "they were damaged on the way, or sent by another version of tba_jax"
        ) from error
