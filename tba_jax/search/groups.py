# SPDX-License-Identifier: Apache-2.0
"""Conversion of sampled groups to groups of trajectories: reference, grades, provenance.

Each function takes any number of groups: a single finished group, or a whole round. Invariant: each
episode becomes a trajectory of its prompt's group, or the group counts it as rejected by reason.
"""

import itertools
from collections.abc import Iterable, Sequence
from typing import NamedTuple, Protocol

import jax
import numpy as np

from tba_jax.environments.episode import Episode
from tba_jax.flow.padding import Padding
from tba_jax.flow.rounds import RoundMetrics, mean_known
from tba_jax.flow.trajectory import Group, Trajectory, spans_of
from tba_jax.rewards.grader import Grader, Grades
from tba_jax.rewards.source import part_means
from tba_jax.search.sampler import SampledGroup


class ReferenceScorer(Protocol):
    """Function that returns the summed reference log-probs of padded responses."""

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
        is_sampled: np.ndarray | None = None,
    ) -> jax.Array:
        """Return the log-prob of each response, without waiting for the device.

        Shapes: tokens [b s], prompt_lengths [b], response_lengths [b c], is_sampled [b c t] with
        t = response_bucket; result [b c].
        """
        ...


class Scored(NamedTuple):
    """Dispatched calls of the reference, and the positions of their results.

    Attributes:
        calls: results, float32 [b c] each.
        places: for each group and response, (call, row, column) of each path of the response.
    """

    calls: list[jax.Array]
    places: list[list[list[tuple[int, int, int]]]]

    def sums(self) -> list[np.ndarray]:
        """Wait for the device; return log pi_ref of every response summed over its paths.

        Returns:
            An array [S] for each group.
        """
        values = [np.asarray(call) for call in self.calls]

        def total(paths: list[tuple[int, int, int]]) -> np.float32:
            return np.float32(sum(values[c][b, j] for c, b, j in paths))

        return [np.array([total(paths) for paths in places]) for places in self.places]


class _Bucket(NamedTuple):
    """Shape of a call to the reference.

    Attributes:
        prompt, response: padded lengths.
        is_single_turn: whether the policy sampled all tokens of the responses.
        width: responses per row.
    """

    prompt: int
    response: int
    is_single_turn: bool
    width: int


class _Path(NamedTuple):
    """Tokens of one path of an episode; `is_sampled` marks the policy's tokens, None: all."""

    tokens: np.ndarray
    is_sampled: np.ndarray | None

    @property
    def key(self) -> tuple[bytes, bytes]:
        """Return a key: paths after the same prompt with the same key have equal log-probs."""
        return self.tokens.tobytes(), b"" if self.is_sampled is None else self.is_sampled.tobytes()


class _Row(NamedTuple):
    prompt: np.ndarray
    paths: Sequence[_Path]


def dispatch_reference(
    reference: ReferenceScorer,
    groups: Sequence[SampledGroup],
    num_responses: int,
    padding: Padding,
    *,
    shares_prompts: bool = False,
) -> Scored:
    """Score every distinct path of the responses, without waiting.

    Every call has room for `num_responses`, and its padded lengths are those that the response
    needs. So the bits of a log-prob do not depend on other prompts, nor (without shared prompts) on
    other responses.

    Args:
        num_responses: number of responses per call.
        shares_prompts: whether a row holds a prompt and several responses to it. A row has room
            for `num_responses` responses if there are more than three quarters of that number,
            else for a quarter of it.
    """
    rows: dict[_Bucket, list[_Row]] = {}
    paths = [[_paths(y) for y in group.episodes] for group in groups]
    found: list[dict[tuple[bytes, bytes], tuple[_Bucket, int, int]]] = []
    for group, of_episodes in zip(groups, paths, strict=True):
        prompt = group.prompt.tokens
        found.append({})
        distinct = {path.key: path for own in of_episodes for path in own}.values()
        for (s, t, is_single), own in _by_bucket(prompt, distinct, padding).items():
            width = _width(len(own), num_responses) if shares_prompts else 1
            bucket = _Bucket(s, t, is_single, width)
            same = rows.setdefault(bucket, [])
            for start in range(0, len(own), width):
                part = own[start : start + width]
                found[-1] |= {y.key: (bucket, len(same), j) for j, y in enumerate(part)}
                same.append(_Row(prompt, part))
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

    return Scored(
        calls,
        [
            [[place(i, path.key) for path in own] for own in of_episodes]
            for i, of_episodes in enumerate(paths)
        ],
    )


def _paths(y: Episode) -> list[_Path]:
    return [
        _Path(y.tokens[part], None if y.is_sampled is None else y.is_sampled[part])
        for part in y.paths
    ]


def _by_bucket(
    prompt: np.ndarray, paths: Iterable[_Path], padding: Padding
) -> dict[tuple[int, int, bool], list[_Path]]:
    """Group the paths of a prompt by the padded lengths that they need."""
    found: dict[tuple[int, int, bool], list[_Path]] = {}
    for y in paths:
        lengths = padding.lengths(len(prompt), len(y.tokens))
        found.setdefault((*lengths, y.is_sampled is None), []).append(y)
    return found


def _width(num: int, most: int) -> int:
    """Return the number of responses per row, one of the compiled numbers, for `num` responses."""
    return most if 4 * num > 3 * most else max(1, most // 4)


def _dispatch(
    reference: ReferenceScorer,
    rows: Sequence[_Row],
    bucket: _Bucket,
    num_rows: int,
    pad_id: int,
) -> jax.Array:
    """Dispatch one call; missing rows repeat the first row, missing responses have no tokens."""
    s, t, is_single_turn, c = bucket
    rows = [*rows, *[rows[0]] * (num_rows - len(rows))]
    responses = np.full((num_rows, c, t), pad_id, np.int32)
    is_sampled = np.zeros(responses.shape, bool)
    lengths = np.zeros((num_rows, c), np.int32)
    for i, row in enumerate(rows):
        for j, y in enumerate(row.paths):
            lengths[i, j] = n = len(y.tokens)
            responses[i, j, :n] = y.tokens
            is_sampled[i, j, :n] = True if y.is_sampled is None else y.is_sampled
    padded = Padding((s,), (t,), pad_id).rows([row.prompt for row in rows], responses, lengths)
    return reference(*padded, None if is_single_turn else is_sampled)


def grade_groups(grader: Grader, groups: Sequence[SampledGroup]) -> Grades:
    """Grade all responses in one call, group by group."""
    flat = [(group.prompt, y) for group in groups for y in group.episodes]
    return grader.grade(
        [prompt for prompt, _ in flat],
        [y.graded_tokens for _, y in flat],
        [y.has_eos for _, y in flat],
        [y.verdict for _, y in flat],
    )


def assemble_groups(
    groups: Sequence[SampledGroup],
    grades: Grades,
    reference_logprob: Sequence[np.ndarray] | None,
    *,
    searcher: int,
    numbers: Sequence[int],
    advantages: Sequence[Sequence[np.ndarray]] | None = None,
) -> tuple[Group, ...]:
    """Return the trajectories of each sampled group that has responses.

    Args:
        reference_logprob: float32 [S] of each group; None: the trainer scores the reference.
        numbers: round or ticket number of each group.
        advantages: float32 [t] per response of each group; None: no advantages.
    """
    found, start = [], 0
    for i, group in enumerate(groups):
        count = len(group.episodes)
        reference = np.full(count, np.nan) if reference_logprob is None else reference_logprob[i]
        if count:
            own = grades.between(start, start + count)
            of_tokens = None if advantages is None else advantages[i]
            found.append(_assemble(group, own, reference, searcher, numbers[i], of_tokens))
        start += count
    return tuple(found)


def _assemble(
    group: SampledGroup,
    grades: Grades,
    reference_logprob: np.ndarray,
    searcher: int,
    round: int,
    advantages: Sequence[np.ndarray] | None,
) -> Group:
    trajectories = []
    rejected: dict[str, int] = {}
    for j, y in enumerate(group.episodes):
        reward = grades.rewards[j]
        if reward is None:
            name = grades.reasons[j] or "reward_none"
            rejected[name] = rejected.get(name, 0) + 1
            continue
        trajectories.append(
            Trajectory(
                prompt_id=group.prompt.prompt_id,
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
                finish_reason=y.finish,
                is_sampled=y.is_sampled,
                path_lengths=y.path_lengths,
                version_spans=()
                if y.token_versions is None
                else spans_of(y.token_versions, y.version_max),
                token_advantages=None if advantages is None else advantages[j],
            )
        )
    return Group(group.prompt, tuple(trajectories), rejected)


def measure(
    groups: Sequence[SampledGroup], grades: Grades, num_sampled_tokens: int
) -> RoundMetrics:
    """Return metrics of the responses; `num_sampled_tokens` is 0 for given responses."""
    episodes = [(i, y) for i, group in enumerate(groups) for y in group.episodes]
    waited_s = [y.environment_s for _, y in episodes if y.environment_s is not None]
    waited = {}
    if waited_s:
        waited["environment_s"] = float(np.mean(waited_s))
        waited["episode_paths"] = float(np.mean([len(y.paths) for _, y in episodes]))
        waited["failed_tool_calls"] = float(np.mean([y.num_failed_calls for _, y in episodes]))
    rewards = iter(grades.rewards)
    of_groups = [set(itertools.islice(rewards, len(group.episodes))) for group in groups]
    return RoundMetrics(
        tokens=num_sampled_tokens,
        reward_mean=mean_known([r for r in grades.rewards if r is not None]),
        response_length_mean=float(np.mean([len(y.tokens) for _, y in episodes])),
        unique_fraction=len({(i, y.tokens.tobytes()) for i, y in episodes}) / len(episodes),
        kind_share=grades.kind_share,
        cut_share=float(np.mean([not y.has_eos for _, y in episodes])),
        equal_rewards_share=float(np.mean([len(own) == 1 for own in of_groups if own])),
        further={**part_means(grades.parts), **waited},
    )
