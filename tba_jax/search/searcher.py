# SPDX-License-Identifier: Apache-2.0
"""The searcher: one round is prompts -> responses -> rewards and reference log-probs -> outbox.

A round is a transaction: the prompt-stream state and the round number are committed with its
groups, so a round that did not finish is simply redone after a resume. A searcher holds whatever
weights were newest when its round began, or, with in-flight swaps, when a decode chunk began; it
waits only when its outbox is full, or before the first publication, and whoever drives it counts
that as idle. Its first rounds may have given responses instead of drawn ones; the prompt stream
stands still in those. It does no learning and cannot see the trainer.
"""

import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from tba_jax.decoding.engine import Decoded
from tba_jax.flow.padding import Padding
from tba_jax.flow.rounds import PhaseTimes, RoundCommit, RoundReport
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Prompt
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.grader import Grader
from tba_jax.search.groups import (
    ReferenceScorer,
    assemble_groups,
    dispatch_reference,
    grade_rollouts,
    measure,
)
from tba_jax.search.rollout import Drawn, Rollout, Sampler, rollout, rollouts_of
from tba_jax.weights.transport import Published


class PromptSource(Protocol):
    """What a searcher needs of a prompt stream."""

    def take(self, num_prompts: int) -> list[Prompt]:
        """Next prompts."""
        ...

    def state(self) -> dict[str, Any]:
        """JSON-compatible position after the last `take`."""
        ...

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from there."""
        ...


class GivenRounds(Protocol):
    """Responses that take the place of drawn ones in the first rounds.

    Attributes:
        num_rounds: so many rounds.
        num_responses: in all of them.
    """

    num_rounds: int
    num_responses: int

    def decoded(self, params: Any, number: int, version: int) -> tuple[list[Prompt], Decoded]:
        """p prompts and [p S] responses of a round; a length of 0 is no response."""
        ...


class Searcher:
    """One searcher. `step()` does one round.

    Args:
        index: which searcher of the run.
        stream: its prompts.
        weights: the newest published weights on its devices, None before the first.
        sampler: draws responses; has the settings of searchers.
        grader: texts and rewards.
        reference: scores log pi_ref, or None where the trainer does.
        padding: of what the reference is given.
        outbox: where finished rounds go.
        clock: seconds since the run began.
        given: the responses of the first rounds, if any are given.

    Attributes:
        decoded_tokens: tokens drawn so far.
        idle_s: seconds that it had nothing to do; counted by whoever drives it.
        num_given: responses that are given.
    """

    def __init__(
        self,
        *,
        index: int,
        stream: PromptSource,
        weights: Callable[[], Published | None],
        sampler: Sampler,
        grader: Grader,
        reference: ReferenceScorer | None,
        padding: Padding,
        outbox: Outbox,
        clock: Callable[[], float],
        given: GivenRounds | None = None,
    ) -> None:
        self.index = index
        self.weights = weights
        self.num_given = 0 if given is None else given.num_responses
        self.decoded_tokens = 0
        self.idle_s = 0.0
        self._settings = sampler.settings
        self._stream = stream
        self._sampler = sampler
        self._grader = grader
        self._reference = reference
        self._padding = padding
        self._outbox = outbox
        self._clock = clock
        self._given = given

    def state(self) -> PartState:
        """Its counters; the outbox has the position of the last committed round."""
        return PartState({}, {"decoded_tokens": self.decoded_tokens, "idle_s": self.idle_s})

    def restore(self, state: PartState) -> None:
        """Count on, and let the prompts come again that followed the last committed round.

        The outbox is restored before.
        """
        self.decoded_tokens = state.meta["decoded_tokens"]
        self.idle_s = state.meta["idle_s"]
        _, position = self._outbox.committed
        if position is not None:
            self._stream.restore(position)

    @property
    def num_given_rounds_left(self) -> int:
        """Rounds of given responses that are not committed yet."""
        total = 0 if self._given is None else self._given.num_rounds
        return max(0, total - self._outbox.committed[0])

    def step(self) -> bool:
        """One round; False when it has to wait: for weights, or for room in its outbox."""
        if not self._outbox.has_room():
            return False
        published = self.weights()
        if published is None:
            return False
        in_flight = self._settings.swap == "in_flight"
        self.do_round(published, (lambda chunk: self.weights()) if in_flight else None)
        return True

    def do_round(
        self,
        published: Published,
        newest: Callable[[int], Published | None] | None = None,
    ) -> None:
        """One whole round, committed to the outbox.

        Args:
            published: the weights it begins with.
            newest: asked before each decode chunk, by its number, for weights to go on with.
        """
        start = self._clock()
        number, _ = self._outbox.committed
        swaps: list[tuple[int, int]] = []
        rollouts, num_tokens = self._respond(published, number, newest, swaps)
        decoded_at = self._clock()
        reference = None
        if self._reference is not None:
            size = self._settings.samples_per_prompt
            reference = dispatch_reference(self._reference, rollouts, size, self._padding)
        grades = grade_rollouts(self._grader, rollouts)
        graded_at = self._clock()
        # The device has worked on the reference meanwhile; only the rest of it is waited for.
        reference_logprob = None if reference is None else np.asarray(reference)
        end = self._clock()
        groups = assemble_groups(
            rollouts, grades, reference_logprob, searcher=self.index, round=number
        )
        self.decoded_tokens += num_tokens
        times = PhaseTimes(
            start_s=start,
            end_s=end,
            decode_s=decoded_at - start,
            reward_s=graded_at - decoded_at,
            reference_s=end - graded_at,
        )
        self._outbox.put(
            RoundCommit(
                searcher=self.index,
                round=number,
                version=published.version,
                swaps=tuple(swaps),
                groups=groups,
                prompt_state=self._stream.state(),
                generated=sum(len(r.transcripts) for r in rollouts),
                report=RoundReport(measure(rollouts, grades, num_tokens), times),
            )
        )

    def _respond(
        self,
        published: Published,
        number: int,
        newest: Callable[[int], Published | None] | None,
        swaps: list[tuple[int, int]],
    ) -> tuple[list[Rollout], int]:
        """The rollouts of a round, given or drawn, and how many tokens were drawn."""
        if self._given is not None and number < self._given.num_rounds:
            prompts, decoded = self._given.decoded(published.params, number, published.version)
            temperatures = np.full(decoded.lengths.shape, self._settings.sampling_temperature)
            return rollouts_of(prompts, Drawn(decoded, temperatures)), 0
        prompts = self._stream.take(self._settings.prompts_per_round)
        ask = None if newest is None else _logged(newest, published.version, swaps)
        draw = functools.partial(self._sampler.draw, round=number, published=published, newest=ask)
        rollouts = rollout(prompts, draw)
        return rollouts, sum(len(y.tokens) for r in rollouts for y in r.transcripts)


def _logged(
    newest: Callable[[int], Published | None], version: int, swaps: list[tuple[int, int]]
) -> Callable[[], Published | None]:
    """`newest` as the decoder asks for it; every change of version is noted in `swaps`."""
    chunks = itertools.count()

    def ask() -> Published | None:
        chunk = next(chunks)
        published = newest(chunk)
        current = swaps[-1][1] if swaps else version
        if published is None or published.version <= current:
            return None
        swaps.append((chunk, published.version))
        return published

    return ask
