# SPDX-License-Identifier: Apache-2.0
"""Draws become batches: padded, or with several sequences to a row.

It knows numpy and token ids. Invariant: every token, reward and log-prob of a draw is in its batch
once, whatever the shape.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.padding import Padding, bucket_length, left_pad
from tba_jax.flow.trajectory import Draw, Trajectory


def longest(draws: Sequence[Draw]) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest response."""
    return (
        max(len(d.prompt.tokens) for d in draws),
        max(len(y.response_tokens) for d in draws for y in d.trajectories),
    )


def pack_batch(
    draws: Sequence[Draw],
    padding: Padding,
    policy_temperature: float | None = None,
) -> Batch:
    """Stack p draws of K responses into one padded batch, at the smallest buckets that hold them.

    Args:
        draws: p draws, all with the same number K of trajectories.
        padding: the shapes to choose from.
        policy_temperature: what the policy's logits are divided by; None: what each response was
            drawn at.

    Raises:
        ValueError: when a prompt or response is longer than its largest bucket.
    """
    p, k = len(draws), len(draws[0].trajectories)
    prompt_len, response_len = padding.lengths(*longest(draws))
    tokens = np.full((p, k, prompt_len + response_len), padding.pad_id, np.int32)
    prompt_lengths = np.zeros((p, k), np.int32)
    response_lengths = np.zeros((p, k), np.int32)
    rewards = np.zeros((p, k), np.float32)
    reference_logprob = np.zeros((p, k), np.float32)
    behavior = np.zeros((p, k, response_len), np.float32)
    versions = np.zeros((p, k), np.int32)
    for i, draw in enumerate(draws):
        prompt_tokens = left_pad([draw.prompt.tokens], prompt_len, padding.pad_id)[0]
        for j, y in enumerate(draw.trajectories):
            n = len(y.response_tokens)
            tokens[i, j, :prompt_len] = prompt_tokens
            tokens[i, j, prompt_len : prompt_len + n] = y.response_tokens
            prompt_lengths[i, j] = len(draw.prompt.tokens)
            response_lengths[i, j] = n
            rewards[i, j] = y.reward
            reference_logprob[i, j] = y.reference_logprob
            behavior[i, j, :n] = y.behavior_token_logprobs
            versions[i, j] = _version(y, policy_temperature)
    is_action = None
    if _has_environment(draws):
        is_action = np.zeros(behavior.shape, bool)
        for i, j in np.ndindex(p, k):
            y = draws[i].trajectories[j]
            is_action[i, j, : len(y.response_tokens)] = _is_action(y)
    return Batch(
        tokens,
        prompt_lengths,
        response_lengths,
        rewards,
        reference_logprob,
        behavior,
        versions,
        is_action,
    )


def _has_environment(draws: Sequence[Draw]) -> bool:
    """Whether some token was written by an environment; without one no mask is carried.

    Decided batch by batch: hosts that share batches will have to agree on it.
    """
    return any(y.is_action is not None for d in draws for y in d.trajectories)


def _is_action(y: Trajectory) -> np.ndarray | bool:
    return True if y.is_action is None else y.is_action


def row_buckets(max_rows: int, multiple: int) -> tuple[int, ...]:
    """Numbers of packed rows to compile for, ascending: steps of about an eighth, up to `max_rows`.

    Args:
        max_rows: at least this many rows fit the largest; one per response always suffices.
        multiple: each is a multiple of this (devices, micro-batches).

    Example: row_buckets(16, 2) == (2, 4, 6, 8, 10, 12, 14, 16).
    """
    most = -(-max_rows // multiple)
    buckets = [1]
    while buckets[-1] < most:
        buckets.append(min(most, max(buckets[-1] + 1, buckets[-1] * 9 // 8)))
    return tuple(n * multiple for n in buckets)


def _version(y: Trajectory, policy_temperature: float | None) -> int:
    is_own = policy_temperature is None or y.sampling_temperature == policy_temperature
    return y.version_min if is_own else -1


def pack_rows(
    draws: Sequence[Draw],
    *,
    row_length: int,
    row_buckets: Sequence[int],
    pad_id: int,
    policy_temperature: float | None = None,
) -> PackedBatch:
    """Put p draws of K responses into as few rows as first-fit decreasing finds.

    Args:
        draws: p draws, all with the same number K of trajectories.
        row_length: tokens of a row.
        row_buckets: ascending numbers of rows; the smallest that holds them is filled up with
            rows of padding.
        pad_id: token id written at padding.
        policy_temperature: as in `pack_batch`.

    Raises:
        ValueError: a prompt with its response is longer than a row, or there are too many rows.
    """
    p, k = len(draws), len(draws[0].trajectories)
    sequences = [(d.prompt.tokens, y) for d in draws for y in d.trajectories]
    lengths = [len(x) + len(y.response_tokens) for x, y in sequences]
    if max(lengths) > row_length:
        raise ValueError(
            f"a prompt with its response has {max(lengths)} tokens and does not fit a row of "
            f"{row_length}; raise config.batch.packed_length"
        )
    used: list[int] = []
    places = {}
    for i in sorted(range(p * k), key=lambda i: -lengths[i]):  # stable: equal lengths keep order
        row = next((r for r, n in enumerate(used) if n + lengths[i] <= row_length), len(used))
        if row == len(used):
            used.append(0)
        places[i] = row, used[row]
        used[row] += lengths[i]
    shape = bucket_length(len(used), row_buckets), row_length
    tokens = np.full(shape, pad_id, np.int32)
    segments, positions = np.zeros(shape, np.int32), np.zeros(shape, np.int32)
    behavior = np.zeros(shape, np.float32)
    is_action = np.zeros(shape, bool) if _has_environment(draws) else None
    for i, (row, start) in places.items():
        x, y = sequences[i]
        middle, end = start + len(x), start + lengths[i]
        tokens[row, start:middle] = x
        tokens[row, middle:end] = y.response_tokens
        segments[row, start:end] = i + 1
        positions[row, start:end] = np.arange(lengths[i])
        behavior[row, middle:end] = y.behavior_token_logprobs
        if is_action is not None:
            is_action[row, middle:end] = _is_action(y)

    def of_each(values: Sequence[float], dtype: Any) -> np.ndarray:
        return np.array(values, dtype).reshape(p, k)

    return PackedBatch(
        tokens,
        segments,
        positions,
        behavior,
        prompt_lengths=of_each([len(x) for x, _ in sequences], np.int32),
        response_lengths=of_each([len(y.response_tokens) for _, y in sequences], np.int32),
        rewards=of_each([y.reward for _, y in sequences], np.float32),
        reference_logprob=of_each([y.reference_logprob for _, y in sequences], np.float32),
        versions=of_each([_version(y, policy_temperature) for _, y in sequences], np.int32),
        is_action=is_action,
    )


@dataclasses.dataclass(frozen=True)
class Packing:
    """How draws become a batch.

    Attributes:
        group_size: K of every draw.
        padding: the shapes of padded batches.
        policy_temperature: as in `pack_batch`.
        row_length: tokens of rows that hold several responses; 0: one response a row.
        row_buckets: numbers of such rows that are compiled for.
    """

    group_size: int
    padding: Padding
    policy_temperature: float
    row_length: int = 0
    row_buckets: tuple[int, ...] = ()

    def batch(
        self, draws: Sequence[Draw], agree: Callable[[Sequence[int]], Sequence[int]]
    ) -> Batch | PackedBatch:
        """This host's rows.

        Args:
            draws: p draws of K responses.
            agree: the largest of every host's lengths; not asked for packed rows.
        """
        if self.row_length:
            return pack_rows(
                draws,
                row_length=self.row_length,
                row_buckets=self.row_buckets,
                pad_id=self.padding.pad_id,
                policy_temperature=self.policy_temperature,
            )
        prompt, response = agree(longest(draws))
        prompt, response = self.padding.lengths(prompt, response)
        padding = Padding((prompt,), (response,), self.padding.pad_id)
        return pack_batch(draws, padding, self.policy_temperature)
