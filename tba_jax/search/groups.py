# SPDX-License-Identifier: Apache-2.0
"""Finished rollouts become groups of trajectories: reference, grades, provenance.

Each function takes any number of rollouts, so one finished group is treated like a whole round. It
draws nothing and stores nothing. Invariant: every transcript is a trajectory of its prompt's group
or is counted there as rejected, by its reason.
"""

import itertools
from collections.abc import Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from tba_jax.flow.padding import Padding
from tba_jax.flow.rounds import RoundMetrics, mean_known
from tba_jax.flow.trajectory import Group, Trajectory
from tba_jax.rewards.grader import Grader, Grades
from tba_jax.rewards.source import part_means
from tba_jax.search.rollout import Rollout, Transcript


class ReferenceScorer(Protocol):
    """Summed reference log-probs of padded responses."""

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
        is_sampled: np.ndarray | None = None,
    ) -> jax.Array:
        """[b s], [b], [b c], t, [b c t] -> [b c], dispatched without waiting."""
        ...


class Scored(NamedTuple):
    """Calls of the reference under way, and whose results they are.

    Attributes:
        calls: results, float32 [b c] each.
        places: for each rollout, (call, row, place in it) of each of its responses.
    """

    calls: list[jax.Array]
    places: list[list[tuple[int, int, int]]]

    def sums(self) -> list[np.ndarray]:
        """log pi_ref of every response, [S] for each rollout; waits for it."""
        values = [np.asarray(call) for call in self.calls]
        return [np.array([values[c][b, j] for c, b, j in places]) for places in self.places]


class _Bucket(NamedTuple):
    """A shape of calls: padded prompt and response, who wrote it, responses to a prompt."""

    prompt: int
    response: int
    is_single_turn: bool
    width: int


class _Row(NamedTuple):
    prompt: np.ndarray
    transcripts: Sequence[Transcript]


def dispatch_reference(
    reference: ReferenceScorer,
    rollouts: Sequence[Rollout],
    num_responses: int,
    padding: Padding,
    *,
    shares_prompts: bool = False,
) -> Scored:
    """Score every distinct response, without waiting.

    A call always has room for `num_responses`, in one pair of buckets, those that the response
    itself needs. So its log-prob does not depend, to the last bit, on other prompts, and without
    shared prompts not on other responses either.

    Args:
        reference: scores them.
        rollouts: of any number of prompts.
        num_responses: of a call.
        padding: the buckets.
        shares_prompts: rows hold a prompt and several responses to it: all of a call, where three
            quarters of them are there, else a quarter of a call.
    """
    rows: dict[_Bucket, list[_Row]] = {}
    keys = [[_key(y) for y in transcripts] for _, transcripts in rollouts]
    found: list[dict[tuple[bytes, bytes], tuple[_Bucket, int, int]]] = []
    for prompt, transcripts in rollouts:
        found.append({})
        for (s, t, is_single), own in _by_bucket(prompt.tokens, transcripts, padding).items():
            width = _width(len(own), num_responses) if shares_prompts else 1
            bucket = _Bucket(s, t, is_single, width)
            same = rows.setdefault(bucket, [])
            for start in range(0, len(own), width):
                part = own[start : start + width]
                found[-1] |= {_key(y): (bucket, len(same), j) for j, y in enumerate(part)}
                same.append(_Row(prompt.tokens, part))
    calls: list[jax.Array] = []
    first_call = {}
    for bucket, same in rows.items():
        first_call[bucket] = len(calls)
        num_rows = num_responses // bucket.width
        for start in range(0, len(same), num_rows):
            part = same[start : start + num_rows]
            calls.append(_dispatch(reference, part, bucket, num_rows, padding.pad_id))

    def place(i: int, key: tuple[bytes, bytes]) -> tuple[int, int, int]:
        bucket, row, j = found[i][key]
        num_rows = num_responses // bucket.width
        return first_call[bucket] + row // num_rows, row % num_rows, j

    return Scored(calls, [[place(i, key) for key in own] for i, own in enumerate(keys)])


def _key(y: Transcript) -> tuple[bytes, bytes]:
    """Equal for responses to a prompt that have the same log-prob."""
    return y.tokens.tobytes(), b"" if y.is_sampled is None else y.is_sampled.tobytes()


def _by_bucket(
    prompt: np.ndarray, transcripts: Sequence[Transcript], padding: Padding
) -> dict[tuple[int, int, bool], list[Transcript]]:
    """Distinct responses to a prompt by the buckets that they need."""
    found: dict[tuple[int, int, bool], list[Transcript]] = {}
    distinct: dict[tuple[bytes, bytes], Transcript] = {}
    for y in transcripts:
        distinct.setdefault(_key(y), y)
    for y in distinct.values():
        lengths = padding.lengths(len(prompt), len(y.tokens))
        found.setdefault((*lengths, y.is_sampled is None), []).append(y)
    return found


def _width(num: int, most: int) -> int:
    """Responses of a row, of `num` to one prompt; two widths, as each is compiled for."""
    return most if 4 * num > 3 * most else max(1, most // 4)


def _dispatch(
    reference: ReferenceScorer,
    rows: Sequence[_Row],
    bucket: _Bucket,
    num_rows: int,
    pad_id: int,
) -> jax.Array:
    """One call; rows that are missing repeat the first, and responses that are have no tokens."""
    s, t, is_single_turn, c = bucket
    rows = [*rows, *[rows[0]] * (num_rows - len(rows))]
    responses = np.full((num_rows, c, t), pad_id, np.int32)
    is_sampled = np.zeros(responses.shape, bool)
    lengths = np.zeros((num_rows, c), np.int32)
    for i, (_, transcripts) in enumerate(rows):
        for j, y in enumerate(transcripts):
            lengths[i, j] = n = len(y.tokens)
            responses[i, j, :n] = y.tokens
            is_sampled[i, j, :n] = True if y.is_sampled is None else y.is_sampled
    padded = Padding((s,), (t,), pad_id).rows([x for x, _ in rows], responses, lengths)
    return reference(*padded, None if is_single_turn else is_sampled)


def grade_rollouts(grader: Grader, rollouts: Sequence[Rollout]) -> Grades:
    """Grades of all responses in one call, rollout by rollout."""
    flat = [(r.prompt, y) for r in rollouts for y in r.transcripts]
    return grader.grade(
        [prompt for prompt, _ in flat],
        [y.tokens for _, y in flat],
        [y.has_eos for _, y in flat],
        [y.verdict for _, y in flat],
    )


def assemble_groups(
    rollouts: Sequence[Rollout],
    grades: Grades,
    reference_logprob: Sequence[np.ndarray] | None,
    *,
    searcher: int,
    numbers: Sequence[int],
    advantages: Sequence[Sequence[np.ndarray]] | None = None,
) -> tuple[Group, ...]:
    """The group of each rollout that has responses.

    Args:
        rollouts: p of them.
        grades: of all their responses.
        reference_logprob: float32 [S] of each; None: the trainer scores the reference.
        searcher: who made them.
        numbers: the round or ticket of each.
        advantages: float32 [t] of each response of each; None: they have none.
    """
    groups, start = [], 0
    for i, rollout in enumerate(rollouts):
        count = len(rollout.transcripts)
        reference = np.full(count, np.nan) if reference_logprob is None else reference_logprob[i]
        if count:
            own = grades.between(start, start + count)
            of_tokens = None if advantages is None else advantages[i]
            groups.append(_assemble(rollout, own, reference, searcher, numbers[i], of_tokens))
        start += count
    return tuple(groups)


def _assemble(
    rollout: Rollout,
    grades: Grades,
    reference_logprob: np.ndarray,
    searcher: int,
    round: int,
    advantages: Sequence[np.ndarray] | None,
) -> Group:
    trajectories = []
    rejected: dict[str, int] = {}
    for j, y in enumerate(rollout.transcripts):
        reward = grades.rewards[j]
        if reward is None:
            name = grades.reasons[j] or "reward_none"
            rejected[name] = rejected.get(name, 0) + 1
            continue
        trajectories.append(
            Trajectory(
                prompt_id=rollout.prompt.prompt_id,
                response_tokens=y.tokens,
                reward=float(reward),
                reward_parts={name: float(values[j]) for name, values in grades.parts.items()},
                behavior_token_logprobs=y.token_logprobs,
                reference_logprob=float(reference_logprob[j]),
                version_min=y.version_min,
                version_max=y.version_max,
                searcher=searcher,
                round=round,
                sampling_temperature=y.temperature,
                finish_reason=y.finish_reason,
                is_sampled=y.is_sampled,
                token_advantages=None if advantages is None else advantages[j],
            )
        )
    return Group(rollout.prompt, tuple(trajectories), rejected)


def measure(rollouts: Sequence[Rollout], grades: Grades, num_drawn_tokens: int) -> RoundMetrics:
    """What the responses are like; `num_drawn_tokens` is 0 where they were given."""
    responses = [(i, y.tokens) for i, r in enumerate(rollouts) for y in r.transcripts]
    are_cut = [not y.has_eos for r in rollouts for y in r.transcripts]
    rewards = iter(grades.rewards)
    groups = [set(itertools.islice(rewards, len(r.transcripts))) for r in rollouts]
    return RoundMetrics(
        tokens=num_drawn_tokens,
        reward_mean=mean_known([r for r in grades.rewards if r is not None]),
        response_length_mean=float(np.mean([len(tokens) for _, tokens in responses])),
        unique_fraction=len({(i, tokens.tobytes()) for i, tokens in responses}) / len(responses),
        kind_share=grades.kind_share,
        cut_share=float(np.mean(are_cut)),
        equal_rewards_share=float(np.mean([len(group) == 1 for group in groups if group])),
        reward_parts=part_means(grades.parts),
    )
