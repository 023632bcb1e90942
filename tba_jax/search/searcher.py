# SPDX-License-Identifier: Apache-2.0
"""The searcher: a round goes from prompts to responses, rewards, reference log-probs and outbox.

A round is a transaction: the prompt-stream state and the round number are committed with its
groups, so an unfinished round is repeated after a resume. A searcher uses the newest weights at the
start of a round. Its first rounds may have given responses instead of drawn ones; the prompt stream
does not advance in those. Searchers that run concurrently with a trainer use the same parts without
rounds (`continuous`).
"""

import collections
import dataclasses
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from tba_jax.decoding.engine import Decoded
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
    grade_rollouts,
    measure,
)
from tba_jax.search.rollout import Drawn, Rollout, Sampler, rollout, rollouts_of
from tba_jax.search.vine import Vine
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
    """Responses that replace drawn ones in the first rounds.

    Attributes:
        num_rounds: number of these rounds.
        num_responses: responses in all of them.
    """

    num_rounds: int
    num_responses: int

    def decoded(self, params: Any, number: int, version: int) -> tuple[list[Prompt], Decoded]:
        """Return p prompts and [p S] responses of a round; a length of 0 is no response."""
        ...


@dataclasses.dataclass(frozen=True)
class SearchParts:
    """Parts of a searcher.

    Attributes:
        index: searcher ID.
        stream: its prompts.
        weights: returns the newest weights on its devices, None before the first publication.
        sampler: draws responses; has the settings of searchers.
        grader: texts and rewards.
        reference: computes log pi_ref; None if the trainer does.
        padding: padding for the reference.
        shares_prompts: as in `dispatch_reference`.
        vine: estimates state values, or None.
        outbox: destination of finished rounds.
        clock: seconds since the run began.
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
    vine: Vine | None = None

    def finish(
        self,
        rollouts: Sequence[Rollout],
        numbers: Sequence[int],
        weights: Sequence[Published | None],
    ) -> tuple[tuple[Group, ...], Grades, float, float]:
        """Compute reference, rewards and groups of finished rollouts.

        Args:
            rollouts: of a round, or of several tickets.
            numbers: round or ticket number of each.
            weights: weights that drew each, for estimates of state values.

        Returns:
            Groups, grades, seconds of the rewards (and continuations), and seconds of waiting for
            the reference.
        """
        start = self.clock()
        scored = None
        if self.reference is not None:
            size = self.sampler.settings.samples_per_prompt
            scored = dispatch_reference(
                self.reference, rollouts, size, self.padding, shares_prompts=self.shares_prompts
            )
        grades = grade_rollouts(self.grader, rollouts)
        advantages = self._advantages(rollouts, grades, numbers, weights)
        graded = self.clock()
        # The device has computed the reference concurrently; wait only for the rest.
        reference_logprob = None if scored is None else scored.sums()
        end = self.clock()
        groups = assemble_groups(
            rollouts,
            grades,
            reference_logprob,
            searcher=self.index,
            numbers=numbers,
            advantages=advantages,
        )
        return groups, grades, graded - start, end - graded

    def _advantages(
        self,
        rollouts: Sequence[Rollout],
        grades: Grades,
        numbers: Sequence[int],
        weights: Sequence[Published | None],
    ) -> list[list[np.ndarray]] | None:
        """Return the advantages of each response's tokens; None without a vine."""
        if self.vine is None:
            return None
        found, start, seen = [], 0, collections.Counter[int]()
        for one, number, published in zip(rollouts, numbers, weights, strict=True):
            assert published is not None, "a vine needs the weights that drew the responses"
            own = grades.between(start, start + len(one.transcripts))
            start += len(one.transcripts)
            found.append(
                self.vine.advantages(one, own, published, number=number, place=seen[number])
            )
            seen[number] += 1
        return found


class Searcher:
    """One searcher. `step()` does one round.

    Args:
        parts: its parts.
        given: responses of the first rounds, if any are given.

    Attributes:
        decoded_tokens: tokens of the responses committed so far.
        idle_s: seconds without work; counted by its driver.
        num_chunks: decode chunks done without rounds.
        num_given, num_given_rounds: given responses, and their rounds.
    """

    def __init__(self, parts: SearchParts, given: GivenRounds | None = None) -> None:
        self.parts = parts
        self.index = parts.index
        self.num_given = 0 if given is None else given.num_responses
        self.num_given_rounds = 0 if given is None else given.num_rounds
        self.decoded_tokens = 0
        self.idle_s = 0.0
        self.num_chunks = 0
        self._given = given

    @property
    def outbox(self) -> Outbox:
        """Return the outbox of the searcher's finished rounds."""
        return self.parts.outbox

    def state(self) -> PartState:
        """Return its counters; the outbox has the committed rounds."""
        counts = {name: getattr(self, name) for name in ("decoded_tokens", "idle_s", "num_chunks")}
        return PartState({}, counts)

    def restore(self, state: PartState) -> None:
        """Restore counters, and the prompts after the last committed round.

        The outbox must be restored before.
        """
        vars(self).update(state.meta)
        _, position = self.parts.outbox.committed
        if position is not None:
            self.parts.stream.restore(position)

    @property
    def num_given_rounds_left(self) -> int:
        """Rounds of given responses that are not committed yet."""
        return max(0, self.num_given_rounds - self.parts.outbox.committed[0])

    def step(self) -> bool:
        """Do one round; return False if it must wait for weights or for room in its outbox."""
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
        rollouts, num_tokens = self._respond(published, number)
        decode_s = parts.clock() - start
        each = len(rollouts)
        groups, grades, reward_s, reference_s = parts.finish(
            rollouts, [number] * each, [published] * each
        )
        self.decoded_tokens += num_tokens
        times = PhaseTimes(start, parts.clock(), decode_s, reward_s, reference_s)
        parts.outbox.put(
            RoundCommit(
                searcher=self.index,
                round=number,
                version=published.version,
                groups=groups,
                prompt_state=parts.stream.state(),
                generated=sum(len(r.transcripts) for r in rollouts),
                report=RoundReport(measure(rollouts, grades, num_tokens), times),
            )
        )

    def _respond(self, published: Published, number: int) -> tuple[list[Rollout], int]:
        """Return the rollouts of a round, given or drawn, and the number of drawn tokens."""
        parts = self.parts
        settings = parts.sampler.settings
        if self._given is not None and number < self._given.num_rounds:
            prompts, decoded = self._given.decoded(published.params, number, published.version)
            temperatures = np.full(decoded.lengths.shape, settings.sampling_temperature)
            return rollouts_of(prompts, Drawn(decoded, temperatures)), 0
        prompts = parts.stream.take(settings.prompts_per_round)
        if parts.sampler.episodes is not None:
            rollouts = parts.sampler.rollouts(prompts, round=number, published=published)
            return rollouts, sum(y.num_sampled for r in rollouts for y in r.transcripts)
        draw = functools.partial(parts.sampler.draw, round=number, published=published)
        rollouts = rollout(prompts, draw)
        return rollouts, sum(len(y.tokens) for r in rollouts for y in r.transcripts)
