# SPDX-License-Identifier: Apache-2.0
"""Conversion of sampled groups to groups of trajectories: grades, provenance, metrics.

Invariant: each episode becomes a trajectory of its prompt's group, or the group counts it as
rejected by reason (tests/search/test_searcher.py).
"""

from collections.abc import Sequence

import numpy as np

from tba_jax.flow.tickets import Report, mean_known
from tba_jax.flow.trajectory import Group, Trajectory
from tba_jax.rewards.scores import Grade, Grader, part_means
from tba_jax.search.sampler import SampledGroup


def grade_groups(grader: Grader, groups: Sequence[SampledGroup]) -> list[list[Grade]]:
    """Grade the responses of all groups in one call; return the grades of each group."""
    flat = [(group.prompt, y) for group in groups for y in group.episodes]
    grades = grader.grade(
        [prompt for prompt, _ in flat],
        [y.graded_tokens for _, y in flat],
        [y.has_eos for _, y in flat],
        [y.verdict for _, y in flat],
    )
    ends = np.cumsum([len(group.episodes) for group in groups]).tolist()
    return [grades[i:j] for i, j in zip([0, *ends], ends, strict=False)]


def assemble(
    group: SampledGroup,
    grades: Sequence[Grade],
    *,
    searcher: int,
    number: int,
    advantages: Sequence[np.ndarray] | None = None,
) -> Group:
    """Return the trajectories of the responses that have a reward.

    Args:
        number: number of the ticket.
        advantages: float32 [t] per response; None: no advantages.
    """
    trajectories = []
    rejected: dict[str, int] = {}
    for j, (y, grade) in enumerate(zip(group.episodes, grades, strict=True)):
        if grade.reward is None:
            name = grade.reason or "reward_none"
            rejected[name] = rejected.get(name, 0) + 1
            continue
        trajectories.append(
            Trajectory(
                prompt_id=group.prompt.prompt_id,
                response_tokens=y.tokens,
                reward=float(grade.reward),
                reward_parts={name: float(value) for name, value in grade.parts.items()},
                behavior_token_logprobs=y.token_logprobs,
                version_min=y.version_min,
                version_max=y.version_max,
                searcher=searcher,
                ticket=number,
                sampling_temperature=y.temperature,
                finish_reason=y.finish,
                is_sampled=y.is_sampled,
                path_lengths=y.path_lengths,
                token_advantages=None if advantages is None else advantages[j],
            )
        )
    return Group(group.prompt, tuple(trajectories), rejected)


def measure(group: SampledGroup, grades: Sequence[Grade]) -> Report:
    """Return the metrics of the responses to one prompt, without times.

    Shares are of the responses: different ones, those of the task's first kind, and those that the
    length limit cut; `equal_rewards_share` is 1 if all have the same reward, else 0.
    """
    episodes = group.episodes
    means = {
        "reward_mean": mean_known([x.reward for x in grades if x.reward is not None]),
        "response_length_mean": float(np.mean([len(y.tokens) for y in episodes])),
        "unique_fraction": len({y.tokens.tobytes() for y in episodes}) / len(episodes),
        "kind_share": float(np.mean([x.is_first_kind for x in grades])),
        "cut_share": float(np.mean([not y.has_eos for y in episodes])),
        "equal_rewards_share": float(len({x.reward for x in grades}) == 1),
        **part_means({name: [x.parts[name] for x in grades] for name in grades[0].parts}),
    }
    if waited_s := [y.environment_s for y in episodes if y.environment_s is not None]:
        means["environment_s"] = float(np.mean(waited_s))
        means["episode_paths"] = float(np.mean([len(y.paths) for y in episodes]))
        means["failed_tool_calls"] = float(np.mean([y.num_failed_calls for y in episodes]))
    return Report(sum(y.num_sampled for y in episodes), means)
