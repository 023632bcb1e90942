# SPDX-License-Identifier: Apache-2.0
"""The immutable carriers that flow between the rooms, from Prompt to Batch and PackedBatch.

No logic beyond stacking and padding. This module knows nothing of jax, models, tokenizers or
configs; every array in it is a host (numpy) array. It owns one invariant: the group axis (the K
responses of one prompt) is never folded into another axis.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, NamedTuple, TypeAlias

import numpy as np

# A batch is packed as numpy and becomes jax arrays on its way into the train step.
HostOrDeviceArray: TypeAlias = Any

FinishReason = Literal["eos", "length"]


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Prompt:
    """One prompt x of a task.

    Attributes:
        prompt_id: index in the task's train (or evaluation) split; the key of its buffer store.
        text: the formatted text that was tokenized.
        tokens: int32 [s], beginning-of-sequence token included where the model wants one.
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

    Attributes:
        prompt_id: the prompt this is a response to.
        response_tokens: int32 [t], unpadded, the end-of-sequence token included when one was drawn.
        reward: raw reward r(x, y), not divided by beta.
        reward_parts: what each of several rewards gave, by name, before weights; nan for one that
            does not apply (empty when there is only one).
        behavior_token_logprobs: float32 [t], log-probs of the distribution actually sampled from.
        reference_logprob: log pi_ref(y|x) summed over the response (float32 arithmetic), or nan
            where the trainer scores the reference itself.
        version_min: oldest policy version that drew a token of this response.
        version_max: newest one; equal to version_min unless weights were swapped inside a round.
        searcher: index of the searcher that made it.
        round: that searcher's round number.
        sampling_temperature: temperature the searcher drew with.
        finish_reason: "eos" or "length".
    """

    prompt_id: int
    response_tokens: np.ndarray
    reward: float
    reward_parts: Mapping[str, float]
    behavior_token_logprobs: np.ndarray
    reference_logprob: float
    version_min: int
    version_max: int
    searcher: int
    round: int
    sampling_temperature: float
    finish_reason: FinishReason

    @property
    def num_bytes(self) -> int:
        """Bytes of the arrays it holds."""
        return self.response_tokens.nbytes + self.behavior_token_logprobs.nbytes


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Group:
    """The S scored responses of one round to one prompt, in sampling order.

    `rejected` counts the responses of this group that got no reward, by named reason; generated =
    len(trajectories) + sum(rejected).
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    rejected: Mapping[str, int]


class Draw(NamedTuple):
    """One prompt slot of a batch drawn from the replay buffer.

    Attributes:
        prompt: the prompt.
        trajectories: exactly K responses (repeats possible, see `num_repeats`).
        is_fresh: drawn from the newest data (True) or from the whole history (False).
        trajectory_ids: buffer ids of the K responses, for the schedule log.
        num_repeats: how many of the K are repeats because fewer than K distinct were stored.
    """

    prompt: Prompt
    trajectories: tuple[Trajectory, ...]
    is_fresh: bool
    trajectory_ids: tuple[int, ...]
    num_repeats: int


class Batch(NamedTuple):
    """A padded batch of p prompts with K responses each; host arrays, also a pytree.

    Rows are laid out as [prompt, left-padded to a bucket | response, right-padded to a bucket], so
    the response of every row begins at the same position s - t.

    Attributes:
        tokens: int32 [p k s].
        prompt_lengths: int32 [p k], tokens of the prompt without padding.
        response_lengths: int32 [p k], tokens of the response, end-of-sequence included.
        rewards: float32 [p k].
        reference_logprob: float32 [p k], summed; nan where the trainer scores it.
        behavior_token_logprobs: float32 [p k t], 0 at padding.
        versions: int32 [p k], `version_min` of each trajectory; -1 where it was drawn at another
            temperature than the policy's, so that no version's log-probs are its behaviour's.
    """

    tokens: HostOrDeviceArray
    prompt_lengths: HostOrDeviceArray
    response_lengths: HostOrDeviceArray
    rewards: HostOrDeviceArray
    reference_logprob: HostOrDeviceArray
    behavior_token_logprobs: HostOrDeviceArray
    versions: HostOrDeviceArray


class PackedBatch(NamedTuple):
    """The same p prompts with K responses each, in rows that hold several sequences.

    A sequence is a prompt and one of its responses. Sequence i * K + j + 1 is response j to prompt
    i; sequences lie side by side in a row, whole, and padding (sequence 0) is behind them.

    Attributes:
        tokens: int32 [n s].
        segments: int32 [n s], the sequence of each position.
        positions: int32 [n s], position in the sequence.
        behavior_token_logprobs: float32 [n s], 0 at prompts and padding.
        prompt_lengths: int32 [p k], tokens of the prompt.
        response_lengths: int32 [p k], tokens of the response, end-of-sequence included.
        rewards: float32 [p k].
        reference_logprob: float32 [p k], summed; nan where the trainer scores it.
        versions: int32 [p k], as in `Batch`.
    """

    tokens: HostOrDeviceArray
    segments: HostOrDeviceArray
    positions: HostOrDeviceArray
    behavior_token_logprobs: HostOrDeviceArray
    prompt_lengths: HostOrDeviceArray
    response_lengths: HostOrDeviceArray
    rewards: HostOrDeviceArray
    reference_logprob: HostOrDeviceArray
    versions: HostOrDeviceArray


def bucket_length(length: int, buckets: Sequence[int]) -> int:
    """Smallest bucket that holds `length` tokens.

    Raises:
        ValueError: when no bucket is large enough.
    """
    for bucket in buckets:
        if length <= bucket:
            return bucket
    raise ValueError(
        f"a sequence of {length} tokens does not fit the largest length bucket {buckets[-1]}; "
        "raise the length limit that the buckets were made from"
    )


def length_buckets(max_length: int, num_buckets: int) -> tuple[int, ...]:
    """Bucket lengths that halve from `max_length` down, ascending, multiples of 8 except the last.

    Example: length_buckets(96, 3) == (24, 48, 96).
    """
    buckets = {max_length}
    length = max_length
    for _ in range(num_buckets - 1):
        length = -(-length // 2)
        buckets.add(min(max_length, -(-length // 8) * 8))
    return tuple(sorted(buckets))


def left_pad(rows: Sequence[np.ndarray], length: int, pad_id: int) -> np.ndarray:
    """int32 [b length]: each row right-aligned, `pad_id` before it."""
    out = np.full((len(rows), length), pad_id, np.int32)
    for i, row in enumerate(rows):
        if len(row):
            out[i, length - len(row) :] = row
    return out


def longest(draws: Sequence[Draw]) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest response."""
    return (
        max(len(d.prompt.tokens) for d in draws),
        max(len(y.response_tokens) for d in draws for y in d.trajectories),
    )


def pack_batch(
    draws: Sequence[Draw],
    *,
    prompt_buckets: Sequence[int],
    response_buckets: Sequence[int],
    pad_id: int,
    policy_temperature: float | None = None,
) -> Batch:
    """Stack p draws of K responses into one padded batch, at the smallest buckets that hold them.

    Args:
        draws: p draws, all with the same number K of trajectories.
        prompt_buckets: ascending prompt lengths in tokens.
        response_buckets: ascending response lengths in tokens.
        pad_id: token id written at padding.
        policy_temperature: what the policy's logits are divided by; None: what each response was
            drawn at.

    Raises:
        ValueError: when a prompt or response is longer than its largest bucket.
    """
    p, k = len(draws), len(draws[0].trajectories)
    longest_prompt, longest_response = longest(draws)
    prompt_len = bucket_length(longest_prompt, prompt_buckets)
    response_len = bucket_length(longest_response, response_buckets)
    tokens = np.full((p, k, prompt_len + response_len), pad_id, np.int32)
    prompt_lengths = np.zeros((p, k), np.int32)
    response_lengths = np.zeros((p, k), np.int32)
    rewards = np.zeros((p, k), np.float32)
    reference_logprob = np.zeros((p, k), np.float32)
    behavior = np.zeros((p, k, response_len), np.float32)
    versions = np.zeros((p, k), np.int32)
    for i, draw in enumerate(draws):
        prompt_tokens = left_pad([draw.prompt.tokens], prompt_len, pad_id)[0]
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
    return Batch(
        tokens, prompt_lengths, response_lengths, rewards, reference_logprob, behavior, versions
    )


def row_buckets(max_rows: int, multiple: int) -> tuple[int, ...]:
    """Numbers of packed rows to compile for, ascending: steps of about an eighth, up to `max_rows`.

    Args:
        max_rows: at least this many rows fit the largest; one per response always suffices.
        multiple: of what each is one (devices, micro-batches).

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
    for i, (row, start) in places.items():
        x, y = sequences[i]
        middle, end = start + len(x), start + lengths[i]
        tokens[row, start:middle] = x
        tokens[row, middle:end] = y.response_tokens
        segments[row, start:end] = i + 1
        positions[row, start:end] = np.arange(lengths[i])
        behavior[row, middle:end] = y.behavior_token_logprobs

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
    )
