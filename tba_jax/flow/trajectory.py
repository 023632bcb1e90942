# SPDX-License-Identifier: Apache-2.0
"""Data of one response: Prompt, Trajectory, Group, and Draw from the replay buffer.

Every array is a host (numpy) array. Invariant: the K or S responses of one prompt stay together.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple

import numpy as np

FinishReason = Literal["eos", "length", "turns", "done"]
"""Why a response ended: by itself, by the limit of tokens or of turns, or by its environment."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt x of a task.

    Attributes:
        prompt_id: index in the task's train (or evaluation) split; the key in the replay buffer.
        text: the formatted text that was tokenized.
        tokens: int32 [s], with the beginning-of-sequence token if the model expects it.
        columns: the other columns of the data row (the gold answer, ...), JSON-compatible values,
            handed to the reward function as keyword arguments.
    """

    prompt_id: int
    text: str
    tokens: np.ndarray
    columns: Mapping[str, Any]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Trajectory:
    """One (prompt, response) with its reward, log-probs and provenance.

    An episode forks where a later request of its agent does not continue the earlier tokens. The
    episode then has several paths, which are token sequences that each follow the prompt. Its
    arrays hold the paths one after the other. `is_sampled` is True for a sampled token in one path
    only; other paths that contain the token have False.

    Attributes:
        response_tokens: int32 [t], unpadded, with the end-of-sequence token if one was drawn.
        reward: raw reward r(x, y), not divided by beta.
        reward_parts: name -> value of each of several rewards, before weights; nan if a reward does
            not apply; empty if there is only one reward.
        behavior_token_logprobs: float32 [t], log-probs of the distribution that was sampled from;
            0 where is_sampled is False.
        version_min: oldest policy version that drew a token of this response.
        version_max: newest policy version that drew a token of this response.
        searcher: ID of the searcher that committed the response.
        ticket: number of the ticket.
        is_sampled: bool [t], True where the policy sampled the token and False where an environment
            wrote it; None: every token is sampled.
        token_advantages: float32 [t], estimated by sampling continuations from states of the
            response; None: not estimated.
        path_lengths: number of tokens of each path of an episode that forks; (): one path.
        reference_token_logprobs: float32 [t], log pi_ref of each token, once the trainer has scored
            the response; None before.
    """

    prompt_id: int
    response_tokens: np.ndarray
    reward: float
    reward_parts: Mapping[str, float]
    behavior_token_logprobs: np.ndarray
    version_min: int
    version_max: int
    searcher: int
    ticket: int
    sampling_temperature: float
    finish_reason: FinishReason
    is_sampled: np.ndarray | None = None
    token_advantages: np.ndarray | None = None
    path_lengths: tuple[int, ...] = ()
    reference_token_logprobs: np.ndarray | None = None

    @property
    def paths(self) -> list[slice]:
        """Return the range of the tokens of each path."""
        return paths_of(len(self.response_tokens), self.path_lengths)


def paths_of(num_tokens: int, path_lengths: Sequence[int]) -> list[slice]:
    """Return the range of the tokens of each path; arguments are fields of `Trajectory`."""
    ends = list(itertools.accumulate(path_lengths or (num_tokens,)))
    return [slice(start, end) for start, end in zip([0, *ends], ends, strict=False)]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The S scored responses of a ticket, to one prompt, in sampling order.

    `rejected` has the number of responses without a reward, by the name of the reason. The number
    of generated responses is len(trajectories) + sum(rejected.values()).
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    rejected: Mapping[str, int]


class Draw(NamedTuple):
    """One prompt slot of a batch drawn from the replay buffer.

    Attributes:
        trajectories: K responses; a repeated response is the same object again. Empty if the slot
            stays empty.
        is_fresh: whether the slot is drawn from new data, instead of the whole history.
        ids: ID of each response in the buffer.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    is_fresh: bool
    ids: tuple[int, ...]
