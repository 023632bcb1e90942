# SPDX-License-Identifier: Apache-2.0
"""Outbox: finished rounds of a searcher, until the trainer takes them.

Each searcher has one outbox, and writes nothing else. Invariant: a round is a transaction. Its
groups, its number and the state of the prompt iterator after it change together or not at all, so
a resumed run repeats unfinished rounds only. Rounds may finish out of order; each number is
committed once.
"""

import threading
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from tba_jax.flow.rounds import RoundCommit, check_commit, pack_commits, unpack_commits
from tba_jax.flow.state import PartState


class OutboxCounts(NamedTuple):
    """Counts of responses, including rejected ones.

    Attributes:
        generated: responses that were committed or lost; responses in progress are not counted.
        pending: responses that wait in the outbox.
        lost: responses that were begun and lost.
    """

    generated: int
    pending: int
    lost: int = 0


class Outbox:
    """Thread-safe queue of finished rounds, in the order of commits.

    Args:
        max_bytes: size of the waiting commits from which `has_room` is False; a round in progress
            may still be committed.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes = max_bytes
        self._lock = threading.Lock()
        self._pending: deque[RoundCommit] = deque()
        self._num_bytes = 0
        self._next_round = 0
        self._prompt_state: Mapping[str, Any] | None = None
        self._ahead: dict[int, Mapping[str, Any]] = {}  # committed numbers after a missing one
        self._num_pending = 0
        self._num_generated = 0
        self._num_lost = 0

    def put(self, commit: RoundCommit) -> None:
        """Commit one finished round.

        Raises:
            ValueError: the number was committed before, or `check_commit` refuses the commit.
        """
        check_commit(commit)
        with self._lock:
            if self._is_committed(commit.round):
                raise ValueError(
                    f"searcher {commit.searcher} committed round {commit.round} again; wanted "
                    f"round {self._next_round} or an unfinished one after it. Start searchers "
                    "at the number that Outbox.committed returns"
                )
            self._pending.append(commit)
            self._num_bytes += commit.num_bytes
            self._num_pending += commit.generated
            self._num_generated += commit.generated
            self._ahead[commit.round] = commit.prompt_state
            while self._next_round in self._ahead:
                self._prompt_state = self._ahead.pop(self._next_round)
                self._next_round += 1

    def _is_committed(self, number: int) -> bool:
        return number < self._next_round or number in self._ahead

    def is_committed(self, number: int) -> bool:
        """Return whether the round of this number is finished."""
        with self._lock:
            return self._is_committed(number)

    def lose(self, count: int) -> None:
        """Count responses that were begun and lost; a negative number corrects an earlier count."""
        with self._lock:
            self._num_generated += count
            self._num_lost += count

    def has_room(self) -> bool:
        """Return whether a searcher may begin another round."""
        with self._lock:
            return self._num_bytes < self._max_bytes

    def take(self, max_rounds: int | None = None) -> list[RoundCommit]:
        """Remove and return the oldest pending commits: all, or at most `max_rounds`."""
        with self._lock:
            count = len(self._pending)
            if max_rounds is not None:
                count = min(count, max_rounds)
            commits = [self._pending.popleft() for _ in range(count)]
            for commit in commits:
                self._num_bytes -= commit.num_bytes
                self._num_pending -= commit.generated
            return commits

    @property
    def committed(self) -> tuple[int, Mapping[str, Any] | None]:
        """Return the lowest uncommitted round number, and the prompt state before that round."""
        with self._lock:
            return self._next_round, self._prompt_state

    @property
    def counts(self) -> OutboxCounts:
        """Return the counts for the ledger, all read at the same time."""
        with self._lock:
            return OutboxCounts(self._num_generated, self._num_pending, self._num_lost)

    @property
    def num_rounds(self) -> int:
        """Number of waiting commits."""
        with self._lock:
            return len(self._pending)

    @property
    def num_groups(self) -> int:
        """Number of groups in waiting commits."""
        with self._lock:
            return sum(len(commit.groups) for commit in self._pending)

    def position(self) -> dict[str, Any]:
        """Return the committed round numbers and the prompt states after them, JSON-compatible."""
        with self._lock:
            return self._position()

    def _position(self) -> dict[str, Any]:
        return {
            "next_round": self._next_round,
            "prompt_state": None if self._prompt_state is None else dict(self._prompt_state),
            "ahead": [[n, dict(state)] for n, state in sorted(self._ahead.items())],
        }

    def start_from(self, position: Mapping[str, Any]) -> None:
        """Empty the outbox, and continue from the `position` of another outbox."""
        with self._lock:
            self._pending = deque()
            self._num_bytes = self._num_pending = self._num_generated = self._num_lost = 0
            self._go_to(position)

    def _go_to(self, position: Mapping[str, Any]) -> None:
        self._next_round = position["next_round"]
        self._prompt_state = position["prompt_state"]
        self._ahead = {number: prompts for number, prompts in position["ahead"]}

    def state(self) -> PartState:
        """Return pending commits and committed numbers at one instant: arrays, JSON metadata."""
        with self._lock:
            pending = list(self._pending)
            position = {
                **self._position(),
                "num_generated": self._num_generated,
                "num_lost": self._num_lost,
            }
        arrays, meta = pack_commits(pending)
        return PartState(arrays, {**meta, "position": position})

    def restore(self, state: PartState) -> None:
        """Replace the contents by a saved `state`."""
        arrays, meta = state
        pending = deque(unpack_commits(arrays, meta))
        position = meta["position"]
        with self._lock:
            self._pending = pending
            self._num_bytes = sum(c.num_bytes for c in pending)
            self._num_pending = sum(c.generated for c in pending)
            self._go_to(position)
            self._num_generated = position["num_generated"]
            self._num_lost = position["num_lost"]
