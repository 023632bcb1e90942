# SPDX-License-Identifier: Apache-2.0
"""Conversion of finished rollouts to groups of trajectories: reference, grades, provenance.

Each function takes any number of rollouts: a single finished group, or a whole round. Invariant:
every transcript is a trajectory of its prompt's group, or counted there as rejected by its reason.
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
    """Computes summed reference log-probs of padded responses."""

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
        is_sampled: np.ndarray | None = None,
    ) -> jax.Array:
        """Return [b c] from ([b s], [b], [b c], t, [b c t]); dispatched without waiting."""
        ...


class Scored(NamedTuple):
    """Dispatched calls of the reference, and the positions of their results.

    Attributes:
        calls: results, float32 [b c] each.
        places: for each rollout, (call, row, column) of each of its responses.
    """

    calls: list[jax.Array]
    places: list[list[tuple[int, int, int]]]

    def sums(self) -> list[np.ndarray]:
        """Wait; return log pi_ref of every response, [S] for each rollout."""
        values = [np.asarray(call) for call in self.calls]
        return [np.array([values[c][b, j] for c, b, j in places]) for places in self.places]


class _Bucket(NamedTuple):
    """Shape of a call: padded prompt and response, single-turn or not, responses per prompt."""

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

    A call always has room for `num_responses`, in the pair of buckets that the response itself
    needs. So its log-prob does not depend, bit for bit, on other prompts, nor (without shared
    prompts) on other responses.

    Args:
        reference: computes the log-probs.
        rollouts: of any number of prompts.
        num_responses: responses per call.
        padding: the buckets.
        shares_prompts: rows hold a prompt and several responses to it: a whole call's number if
            three quarters of them exist, else a quarter of it.
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
    """Return a key that is equal for responses to a prompt with equal log-probs."""
    return y.tokens.tobytes(), b"" if y.is_sampled is None else y.is_sampled.tobytes()


def _by_bucket(
    prompt: np.ndarray, transcripts: Sequence[Transcript], padding: Padding
) -> dict[tuple[int, int, bool], list[Transcript]]:
    """Group distinct responses to a prompt by the buckets that they need."""
    found: dict[tuple[int, int, bool], list[Transcript]] = {}
    distinct: dict[tuple[bytes, bytes], Transcript] = {}
    for y in transcripts:
        distinct.setdefault(_key(y), y)
    for y in distinct.values():
        lengths = padding.lengths(len(prompt), len(y.tokens))
        found.setdefault((*lengths, y.is_sampled is None), []).append(y)
    return found


def _width(num: int, most: int) -> int:
    """Return the responses per row for `num` of one prompt: one of two compiled widths."""
    return most if 4 * num > 3 * most else max(1, most // 4)


def _dispatch(
    reference: ReferenceScorer,
    rows: Sequence[_Row],
    bucket: _Bucket,
    num_rows: int,
    pad_id: int,
) -> jax.Array:
    """Dispatch one call; missing rows repeat the first, missing responses have no tokens."""
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
    """Grade all responses in one call, rollout by rollout."""
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
    """Return the group of each rollout that has responses.

    Args:
        rollouts: p rollouts.
        grades: of all their responses.
        reference_logprob: float32 [S] of each; None: the trainer scores the reference.
        searcher: searcher ID.
        numbers: round or ticket number of each.
        advantages: float32 [t] per response of each; None: no advantages.
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
    """Return metrics of the responses; `num_drawn_tokens` is 0 for given responses."""
    responses = [(i, y.tokens) for i, r in enumerate(rollouts) for y in r.transcripts]
    waited_s = [y.environment_s for r in rollouts for y in r.transcripts]
    known_s = [seconds for seconds in waited_s if seconds is not None]
    waited = {"environment_s": float(np.mean(known_s))} if known_s else {}
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
        further={**part_means(grades.parts), **waited},
    )
