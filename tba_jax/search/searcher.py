# SPDX-License-Identifier: Apache-2.0
"""The searcher: one round is prompts -> responses -> rewards and reference log-probs -> outbox.

A round is a transaction: the prompt-stream state and the round number are committed with its
groups, so a round that did not finish is simply redone after a resume. A searcher holds whatever
weights were newest when its round began, or, with in-flight swaps, when a decode chunk began; it
waits only when its outbox is full, or before the first publication, and whoever drives it counts
that as idle. Its first rounds may have given responses instead of drawn ones; the prompt stream
stands still in those. It does no learning and cannot see the trainer.
"""

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import jax
import numpy as np

from tba_jax.decoding.engine import Decoded, Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.flow.padding import Padding
from tba_jax.flow.rounds import PhaseTimes, RoundCommit, RoundMetrics, RoundReport, mean_known
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Group, Prompt, Trajectory
from tba_jax.replay.outbox import Outbox
from tba_jax.rewards.source import RewardSource, ScoreResult, part_means
from tba_jax.weights.transport import Published, Transport

# First fold of the root key: keeps searcher draws apart from any other use of the seed.
SEARCHER_ROLE = 1


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


class ReferenceScorer(Protocol):
    """Summed reference log-probs of padded responses."""

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
    ) -> jax.Array:
        """[p S s], [p S], [p S] -> [p S], dispatched without waiting."""
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
        reader: which reader of the transport: its place among this process's searchers.
        stream: its prompts.
        decoder: the engine; programs compile for the devices the weights live on.
        transport: source of versioned weights.
        outbox: where finished rounds go.
        rewards: computes rewards.
        reference: scores log pi_ref, or None where the trainer does.
        decode_text: token ids -> text of each response, special tokens dropped.
        response_kind: names a response's kind for the `kind_share` metric.
        first_kind: the kind whose share is logged, "" for none.
        key: root key of the run.
        prompts_per_round, samples_per_prompt: prompts of a round and responses to each.
        settings: how responses are drawn.
        explore_share: probability that a response is drawn at a temperature of its own.
        explore_temperatures: that temperature is uniform between these, rounded to hundredths.
        num_slots: decoder slots; None: one per response of a round.
        in_flight: take up newer weights between decode chunks, not only between rounds.
        padding: the shapes that the reference is compiled for.
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
        reader: int,
        stream: PromptSource,
        decoder: Decoder,
        transport: Transport,
        outbox: Outbox,
        rewards: RewardSource,
        reference: ReferenceScorer | None,
        decode_text: Callable[[Sequence[np.ndarray]], list[str]],
        response_kind: Callable[[str], str | None],
        first_kind: str,
        key: jax.Array,
        prompts_per_round: int,
        samples_per_prompt: int,
        settings: SamplingSettings,
        explore_share: float = 0.0,
        explore_temperatures: tuple[float, float] = (1.0, 1.0),
        num_slots: int | None,
        in_flight: bool,
        padding: Padding,
        clock: Callable[[], float],
        given: GivenRounds | None = None,
    ) -> None:
        self.index = index
        self.reader = reader
        self._stream = stream
        self._decoder = decoder
        self._transport = transport
        self._outbox = outbox
        self._rewards = rewards
        self._reference = reference
        self._decode_text = decode_text
        self._response_kind = response_kind
        self._first_kind = first_kind
        self._key = jax.random.fold_in(jax.random.fold_in(key, SEARCHER_ROLE), index)
        self._prompts_per_round = prompts_per_round
        self._samples_per_prompt = samples_per_prompt
        self._settings = settings
        self._explore_share = explore_share
        self._explore_temperatures = explore_temperatures
        self._num_slots = num_slots
        self._in_flight = in_flight
        self._padding = padding
        self._clock = clock
        self._given = given
        self.num_given = 0 if given is None else given.num_responses
        self.decoded_tokens = 0
        self.idle_s = 0.0

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
        published = self._transport.latest(self.reader)
        if published is None:
            return False
        self.do_round(published, self._newest if self._in_flight else None)
        return True

    def _newest(self, chunk: int) -> Published | None:
        return self._transport.latest(self.reader)

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
        if self._given is not None and number < self._given.num_rounds:
            prompts, decoded = self._given.decoded(published.params, number, published.version)
            temperatures = np.full(decoded.lengths.shape, self._settings.temperature)
            num_tokens = 0  # none was drawn
        else:
            prompts = self._stream.take(self._prompts_per_round)
            key = jax.random.fold_in(self._key, number)
            temperatures = self._temperatures(key)
            decoded = self._decoder.decode(
                published.params,
                [p.tokens for p in prompts],
                num_samples=self._samples_per_prompt,
                key=key,
                settings=self._settings,
                temperatures=temperatures,
                num_slots=self._num_slots,
                version=published.version,
                newest=None if newest is None else _logged(newest, published.version, swaps),
            )
            num_tokens = int(decoded.lengths.sum())
        decoded_at = self._clock()
        reference = self._dispatch_reference(prompts, decoded)
        where = [(int(i), int(j)) for i, j in np.argwhere(decoded.lengths)]
        responses = [decoded.tokens[i, j, : decoded.lengths[i, j]] for i, j in where]
        texts = self._decode_text(responses)
        has_eos = [bool(decoded.has_eos[at]) for at in where]
        scores = self._score([prompts[i] for i, _ in where], responses, texts, has_eos)
        scored_at = self._clock()
        # The device has worked on the reference meanwhile; only the rest of it is waited for.
        reference_logprob = (
            np.full(decoded.lengths.shape, np.nan, np.float32)
            if reference is None
            else np.asarray(reference)
        )
        end = self._clock()
        groups = self._groups(
            prompts, decoded, where, responses, scores, reference_logprob, temperatures, number
        )
        self.decoded_tokens += num_tokens
        known = [r for r in scores.rewards if r is not None]
        kinds = [self._response_kind(text) for text in texts]
        self._outbox.put(
            RoundCommit(
                searcher=self.index,
                round=number,
                version=published.version,
                swaps=tuple(swaps),
                groups=groups,
                prompt_state=self._stream.state(),
                generated=len(responses),
                report=RoundReport(
                    RoundMetrics(
                        tokens=num_tokens,
                        reward_mean=mean_known(known),
                        response_length_mean=float(np.mean([len(r) for r in responses])),
                        unique_fraction=len(
                            {(r.tobytes(), i) for (i, _), r in zip(where, responses, strict=True)}
                        )
                        / len(responses),
                        kind_share=sum(kind == self._first_kind for kind in kinds) / len(kinds),
                        reward_parts=part_means(scores.parts),
                    ),
                    PhaseTimes(
                        start_s=start,
                        end_s=end,
                        decode_s=decoded_at - start,
                        reward_s=scored_at - decoded_at,
                        reference_s=end - scored_at,
                    ),
                ),
            )
        )

    def _temperatures(self, key: jax.Array) -> np.ndarray:
        """float64 [p S]: the temperature each response of a round is drawn at."""
        shape = (self._prompts_per_round, self._samples_per_prompt)
        out = np.full(shape, self._settings.temperature)
        if self._explore_share:
            rng = np.random.default_rng(np.asarray(jax.random.key_data(key)).tolist())
            explores = rng.random(shape) < self._explore_share
            # Hundredths: the buffer keeps a table of the settings that responses were drawn with.
            own = np.round(rng.uniform(*self._explore_temperatures, shape), 2)
            out = np.where(explores, own, out)
        return out

    def _dispatch_reference(self, prompts: Sequence[Prompt], decoded: Decoded) -> jax.Array | None:
        if self._reference is None:
            return None
        tokens = [p.tokens for p in prompts]
        return self._reference(*self._padding.rows(tokens, decoded.tokens, decoded.lengths))

    def _score(
        self,
        prompts: Sequence[Prompt],
        responses: Sequence[np.ndarray],
        texts: list[str],
        has_eos: list[bool],
    ) -> ScoreResult:
        """Rewards; one prompt for each response."""
        columns: dict[str, list[Any]] = {
            name: [p.columns[name] for p in prompts] for name in prompts[0].columns
        }
        return self._rewards.score(
            [p.text for p in prompts],
            texts,
            columns,
            completion_ids=responses,
            has_eos=has_eos,
        )

    def _groups(
        self,
        prompts: Sequence[Prompt],
        decoded: Decoded,
        where: Sequence[tuple[int, int]],
        responses: Sequence[np.ndarray],
        scores: ScoreResult,
        reference_logprob: np.ndarray,
        temperatures: np.ndarray,
        number: int,
    ) -> tuple[Group, ...]:
        groups = []
        flat_of = {at: flat for flat, at in enumerate(where)}
        for i in dict.fromkeys(i for i, _ in where):
            prompt = prompts[i]
            trajectories = []
            rejected: dict[str, int] = {}
            for j in range(self._samples_per_prompt):
                flat = flat_of.get((i, j))
                if flat is None:
                    continue  # a given group may have fewer than S
                reward, reason = scores.rewards[flat], scores.reasons[flat]
                if reward is None:
                    name = reason or "reward_none"
                    rejected[name] = rejected.get(name, 0) + 1
                    continue
                length = int(decoded.lengths[i, j])
                trajectories.append(
                    Trajectory(
                        prompt_id=prompt.prompt_id,
                        response_tokens=np.array(responses[flat], np.int32),
                        reward=float(reward),
                        reward_parts={k: float(v[flat]) for k, v in scores.parts.items()},
                        behavior_token_logprobs=np.array(
                            decoded.token_logprobs[i, j, :length], np.float32
                        ),
                        reference_logprob=float(reference_logprob[i, j]),
                        version_min=int(decoded.version_min[i, j]),
                        version_max=int(decoded.version_max[i, j]),
                        searcher=self.index,
                        round=number,
                        sampling_temperature=float(temperatures[i, j]),
                        finish_reason="eos" if decoded.has_eos[i, j] else "length",
                    )
                )
            groups.append(Group(prompt, tuple(trajectories), rejected))
        return tuple(groups)


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
