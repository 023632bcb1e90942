# SPDX-License-Identifier: Apache-2.0
"""The searcher: from prompts to responses, rewards and reference log-probs in the outbox.

A round is a transaction: the prompt-stream state and the round number are committed with its
groups, so an unfinished round is repeated after a resume. A searcher loads the newest weights at
the start of a round. Its first rounds may have given responses (from a file) instead of sampled
ones, and do not advance the prompt stream. Searchers that run concurrently with a trainer use the
same parts without rounds (`continuous`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tba_jax.flow.padding import Padding
from tba_jax.flow.rounds import PhaseTimes, RoundCommit, RoundReport
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Group, Prompt
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.grader import Grader, Grades
from tba_jax.search.groups import (
    ReferenceScorer,
    assemble_groups,
    dispatch_reference,
    grade_groups,
    measure,
)
from tba_jax.search.sampler import SampledGroup, Sampler
from tba_jax.search.state_values import advantages_of, values_of
from tba_jax.weights.transport import Published


class PromptSource(Protocol):
    """Interface of a prompt stream."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts."""
        ...

    def state(self) -> dict[str, Any]:
        """Return the position after the last `take`, JSON-compatible."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from a saved position."""
        ...


class GivenRounds(Protocol):
    """Given responses (from a file), used instead of sampled ones in the first rounds.

    Attributes:
        num_rounds: number of rounds with given responses.
        num_responses: number of given responses in all rounds.
    """

    num_rounds: int
    num_responses: int

    def groups(self, params: Any, number: int, version: int) -> list[SampledGroup]:
        """Return the prompts of a round, each with at most S given responses."""
        ...


@dataclasses.dataclass(frozen=True)
class SearchParts:
    """Parts of a searcher.

    Attributes:
        weights: returns the newest weights on the searcher's devices; None before the first
            publication.
        sampler: samples responses; has the settings of searchers.
        grader: computes texts and rewards.
        reference: computes log pi_ref; None if the trainer computes it.
        padding: padding for the reference.
        shares_prompts: as in `dispatch_reference`.
    """

    index: int
    stream: PromptSource
    weights: Callable[[], Published | None]
    sampler: Sampler
    grader: Grader
    reference: ReferenceScorer | None
    padding: Padding
    outbox: Outbox
    clock: Callable[[], float]
    shares_prompts: bool = False

    def finish(
        self, sampled: Sequence[SampledGroup], numbers: Sequence[int]
    ) -> tuple[tuple[Group, ...], Grades, float, float]:
        """Compute reference, rewards and trajectories of sampled groups.

        Args:
            sampled: groups of a round, or of several tickets.
            numbers: round or ticket number of each.

        Returns:
            Groups, grades, seconds for the rewards, and seconds of waiting for the reference.
        """
        start = self.clock()
        scored = None
        if self.reference is not None:
            size = self.sampler.settings.samples_per_prompt
            scored = dispatch_reference(
                self.reference, sampled, size, self.padding, shares_prompts=self.shares_prompts
            )
        grades = grade_groups(self.grader, sampled)
        advantages = self._advantages(sampled, grades)
        graded = self.clock()
        # The device has computed the reference concurrently; wait only for the rest.
        reference_logprob = None if scored is None else scored.sums()
        end = self.clock()
        groups = assemble_groups(
            sampled,
            grades,
            reference_logprob,
            searcher=self.index,
            numbers=numbers,
            advantages=advantages,
        )
        return groups, grades, graded - start, end - graded

    def _advantages(
        self, sampled: Sequence[SampledGroup], grades: Grades
    ) -> list[list[np.ndarray]] | None:
        """Return the advantages of each response's tokens; None if no values are estimated."""
        every = self.sampler.states.tokens
        if not every:
            return None
        found, start = [], 0
        for group in sampled:
            rewards = grades.rewards[start : start + len(group.episodes)]
            start += len(group.episodes)
            values = values_of(self.grader, group.prompt, group.continuations)
            found.append(advantages_of([y.tokens for y in group.episodes], rewards, values, every))
        return found


class Searcher:
    """One searcher. `step()` does one round.

    Args:
        given: responses of the first rounds; None: all rounds are sampled.

    Attributes:
        decoded_tokens: tokens of the responses committed so far.
        idle_s: seconds without work, counted by the driver.
        num_given, num_given_rounds: numbers of given responses and of their rounds.
    """

    def __init__(self, parts: SearchParts, given: GivenRounds | None = None) -> None:
        self.parts = parts
        self.index = parts.index
        self.num_given = 0 if given is None else given.num_responses
        self.num_given_rounds = 0 if given is None else given.num_rounds
        self.decoded_tokens = 0
        self.idle_s = 0.0
        self._given = given

    @property
    def outbox(self) -> Outbox:
        """Return the outbox of the searcher's finished rounds."""
        return self.parts.outbox

    def state(self) -> PartState:
        """Return the searcher's counters; the outbox has the committed rounds."""
        return PartState({}, {"decoded_tokens": self.decoded_tokens, "idle_s": self.idle_s})

    def restore(self, state: PartState) -> None:
        """Restore the counters and the prompt stream's position after the last committed round.

        The outbox must be restored before this call.
        """
        vars(self).update(state.meta)
        _, position = self.parts.outbox.committed
        if position is not None:
            self.parts.stream.restore(position)

    @property
    def num_given_rounds_left(self) -> int:
        """Number of rounds of given responses that are not committed yet."""
        return max(0, self.num_given_rounds - self.parts.outbox.committed[0])

    def step(self) -> bool:
        """Do one round; return False if weights are missing or the outbox has no room."""
        if not self.parts.outbox.has_room():
            return False
        published = self.parts.weights()
        if published is None:
            return False
        self.do_round(published)
        return True

    def do_round(self, published: Published) -> None:
        """Do one whole round with these weights, and commit it to the outbox."""
        parts = self.parts
        start = parts.clock()
        number, _ = parts.outbox.committed
        sampled, num_tokens = self._respond(published, number)
        decode_s = parts.clock() - start
        groups, grades, reward_s, reference_s = parts.finish(sampled, [number] * len(sampled))
        self.decoded_tokens += num_tokens
        times = PhaseTimes(start, parts.clock(), decode_s, reward_s, reference_s)
        parts.outbox.put(
            RoundCommit(
                searcher=self.index,
                round=number,
                version=published.version,
                groups=groups,
                prompt_state=parts.stream.state(),
                generated=sum(len(group.episodes) for group in sampled),
                report=RoundReport(measure(sampled, grades, num_tokens), times),
            )
        )

    def _respond(self, published: Published, number: int) -> tuple[list[SampledGroup], int]:
        """Return the given or sampled groups of a round, and the number of sampled tokens."""
        if self._given is not None and number < self._given.num_rounds:
            return self._given.groups(published.params, number, published.version), 0
        sampler = self.parts.sampler
        prompts = self.parts.stream.take(sampler.settings.prompts_per_round)
        groups = sampler.sample(prompts, number, published)
        return groups, sum(y.num_sampled for group in groups for y in group.episodes)
