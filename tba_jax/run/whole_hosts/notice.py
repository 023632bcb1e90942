# SPDX-License-Identifier: Apache-2.0
"""What the host that keeps the buffer says to those that search for it: one small notice.

It is written anew whenever something in it changed and at least every second, so that whoever reads
it knows that its author lives. Everything in it is a state, not an event: who misses one notice
misses nothing.
"""

from collections.abc import Callable, Mapping
from typing import Any, Literal, NamedTuple

from tba_jax.devices.cluster import CONTINUE, PeerError

BEAT_S = 1.0
"""Longest time between two signs of life, of either side."""

KEEPER = "the process that keeps the replay buffer"
"""What the others call the author of notices."""

Phase = Literal["search", "evaluate", "end"]


class Notice(NamedTuple):
    """The state of the run, for the hosts that search.

    Attributes:
        beat: counts the notices.
        phase: search: go on; evaluate: begin nothing but evaluations; end: leave.
        step, version: updates done, newest weights published.
        step_s: seconds of the newest step, waiting not counted; 0 before the first.
        num_fresh: groups in the buffer that wait for their first use.
        received: messages received, by process.
        merged: groups that left the outboxes, by process.
        rounds: synchronous driver: rounds that each searcher shall have done, by index.
        round_version: the weights that they use.
        evaluations: [version, whether that is the start model] of all that were asked for.
    """

    beat: int = 0
    phase: Phase = "search"
    step: int = 0
    version: int = 0
    step_s: float = 0.0
    num_fresh: int = 0
    received: Mapping[str, int] = {}
    merged: Mapping[str, int] = {}
    rounds: Mapping[str, int] = {}
    round_version: int = -1
    evaluations: tuple[tuple[int, bool], ...] = ()

    def record(self) -> dict[str, Any]:
        """JSON-compatible."""
        return self._asdict()

    @classmethod
    def from_record(cls, record: Mapping[str, Any]) -> "Notice":
        """Inverse of `record`."""
        evaluations = tuple((version, is_start) for version, is_start in record["evaluations"])
        return cls(**{**record, "evaluations": evaluations})


class Silence:
    """Notices that another process says nothing any more.

    Args:
        who: it is, in the message.
        limit_s: longest silence.
        clock: seconds that only go on.
    """

    def __init__(self, who: str, limit_s: float, clock: Callable[[], float]) -> None:
        self._who, self._limit_s, self._clock = who, limit_s, clock
        self._last = clock()

    def heard(self) -> None:
        """It said something."""
        self._last = self._clock()

    def check(self) -> None:
        """Raise where it has been silent for too long.

        Raises:
            PeerError: it has.
        """
        silent_s = self._clock() - self._last
        if silent_s > self._limit_s:
            raise PeerError(
                f"{self._who} has said nothing in the work directory for {silent_s:.0f} s "
                f"(config.log.watchdog_s = {self._limit_s:.0f}): it hangs, or does not see the "
                f"same directory. Its output has the cause. {CONTINUE}"
            )
