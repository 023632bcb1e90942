# SPDX-License-Identifier: Apache-2.0
"""Finished rollouts become groups of trajectories: reference, grades, provenance.

Each function takes any number of rollouts, so one finished group is treated like a whole round. It
draws nothing and stores nothing. Invariant: every transcript is a trajectory of its prompt's group
or is counted there as rejected, by its reason.
"""

from collections.abc import Sequence
from typing import Protocol

import jax
import numpy as np

from tba_jax.flow.padding import Padding
from tba_jax.flow.rounds import RoundMetrics, mean_known
from tba_jax.flow.trajectory import Group, Trajectory
from tba_jax.rewards.grader import Grader, Grades
from tba_jax.rewards.source import part_means
from tba_jax.search.rollout import Rollout


class ReferenceScorer(Protocol):
    """Summed reference log-probs of padded responses."""

    def __call__(
        self,
        tokens: np.ndarray,
        prompt_lengths: np.ndarray,
        response_lengths: np.ndarray,
        response_bucket: int,
        is_action: np.ndarray | None = None,
    ) -> jax.Array:
        """[p S s], [p S], [p S], t, [p S t] -> [p S], dispatched without waiting."""
        ...


def dispatch_reference(
    reference: ReferenceScorer, rollouts: Sequence[Rollout], num_samples: int, padding: Padding
) -> jax.Array:
    """log pi_ref of every response, float32 [p S], not waited for.

    Args:
        reference: scores them.
        rollouts: p of them.
        num_samples: S; a rollout may have fewer.
        padding: for the shape it is compiled for.
    """
    shape = len(rollouts), num_samples
    responses = np.full((*shape, padding.response_buckets[-1]), padding.pad_id, np.int32)
    is_action = np.zeros(responses.shape, bool)
    lengths = np.zeros(shape, np.int32)
    for i, (_, transcripts) in enumerate(rollouts):
        for j, y in enumerate(transcripts):
            lengths[i, j] = n = len(y.tokens)
            responses[i, j, :n] = y.tokens
            is_action[i, j, :n] = True if y.is_action is None else y.is_action
    rows = padding.rows([r.prompt.tokens for r in rollouts], responses, lengths)
    is_single_turn = all(y.is_action is None for r in rollouts for y in r.transcripts)
    return reference(*rows, None if is_single_turn else is_action[:, :, : rows.t])


def grade_rollouts(grader: Grader, rollouts: Sequence[Rollout]) -> Grades:
    """Grades of all responses in one call, rollout by rollout."""
    flat = [(r.prompt, y) for r in rollouts for y in r.transcripts]
    return grader.grade(
        [prompt for prompt, _ in flat],
        [y.tokens for _, y in flat],
        [y.has_eos for _, y in flat],
    )


def assemble_groups(
    rollouts: Sequence[Rollout],
    grades: Grades,
    reference_logprob: np.ndarray | None,
    *,
    searcher: int,
    round: int,
) -> tuple[Group, ...]:
    """The group of each rollout that has responses.

    Args:
        rollouts: p of them.
        grades: of all their responses.
        reference_logprob: float32 [p S]; None: the trainer scores the reference.
        searcher, round: who made them, and when.
    """
    groups, start = [], 0
    for i, rollout in enumerate(rollouts):
        count = len(rollout.transcripts)
        reference = np.full(count, np.nan) if reference_logprob is None else reference_logprob[i]
        if count:
            own = grades.between(start, start + count)
            groups.append(_assemble(rollout, own, reference, searcher, round))
        start += count
    return tuple(groups)


def _assemble(
    rollout: Rollout, grades: Grades, reference_logprob: np.ndarray, searcher: int, round: int
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
                finish_reason="eos" if y.has_eos else "length",
                is_action=y.is_action,
            )
        )
    return Group(rollout.prompt, tuple(trajectories), rejected)


def measure(rollouts: Sequence[Rollout], grades: Grades, num_drawn_tokens: int) -> RoundMetrics:
    """What the responses are like; `num_drawn_tokens` is 0 where they were given."""
    responses = [(i, y.tokens) for i, r in enumerate(rollouts) for y in r.transcripts]
    return RoundMetrics(
        tokens=num_drawn_tokens,
        reward_mean=mean_known([r for r in grades.rewards if r is not None]),
        response_length_mean=float(np.mean([len(tokens) for _, tokens in responses])),
        unique_fraction=len({(i, tokens.tobytes()) for i, tokens in responses}) / len(responses),
        kind_share=grades.kind_share,
        reward_parts=part_means(grades.parts),
    )
