# SPDX-License-Identifier: Apache-2.0
"""Draws become batches: padded, or with several sequences to a row.

It knows numpy and token ids. Invariant: every token, reward and log-prob of a draw is in its batch
once, whatever the shape, and as often as it was drawn is a weight.
"""

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.padding import Padding, bucket_length, left_pad
from tba_jax.flow.placing import Places, most_rows, place
from tba_jax.flow.trajectory import Draw, Trajectory

# Padded rows: with three lengths of prompts and responses these are enough programs.
_PADDED_BUCKETS = 4
# Packed rows have one length.
_PACKED_BUCKETS = 6


@dataclasses.dataclass(frozen=True)
class Packing:
    """How this host's draws become its rows of a batch.

    In micro-batches their number is always the same, as those of padding are not worked on; else
    it is one of a few. Row q of micro-batch b of `num` is row q * num + b: a micro-batch takes
    rows from all over the batch, so that rows divided over devices stay where they are.

    Attributes:
        num_prompts: p of this host.
        group_size: K, the sum of the weights of a draw.
        padding: the shapes of padded rows.
        policy_temperature: what the policy's logits are divided by. A response drawn at another
            temperature has no version of the policy.
        row_length: tokens of rows that hold several responses; 0: one response a row.
        row_multiple: the number of rows is a multiple (devices that divide them).
        micro_batch_rows: rows whose gradients are made at a time, a multiple too; 0: all.
        is_whole: all rows of a draw are in one micro-batch.
        has_prompts: prompts alone are part of the batch.
        has_equal_weights: distinct responses of a draw count the same, K together; else as often
            as they were drawn.
        first_slot: slots of the hosts before this one.
    """

    num_prompts: int
    group_size: int
    padding: Padding
    policy_temperature: float
    row_length: int = 0
    row_multiple: int = 1
    micro_batch_rows: int = 0
    is_whole: bool = False
    has_prompts: bool = False
    has_equal_weights: bool = False
    first_slot: int = 0

    @property
    def row_buckets(self) -> tuple[int, ...]:
        """Numbers of rows that are compiled for, ascending."""
        multiple = self.micro_batch_rows or self.row_multiple
        most = most_rows(
            self.num_prompts,
            self.group_size,
            micro_batch_rows=multiple,
            is_whole=self.is_whole,
        )
        if self.micro_batch_rows:
            return (most,)
        return row_buckets(most, multiple, _PACKED_BUCKETS if self.row_length else _PADDED_BUCKETS)

    def batch(
        self, draws: Sequence[Draw], agree: Callable[[Sequence[int]], Sequence[int]]
    ) -> Batch | PackedBatch:
        """This host's rows.

        Args:
            draws: p draws.
            agree: the largest of every host's lengths and numbers of rows.

        Raises:
            ValueError: a prompt or response is longer than its largest bucket, or both than a row.
        """
        places = self._places(draws)
        prompt, response, num_rows = agree((*_longest(draws), places.num_rows))
        prompt, response = self.padding.lengths(prompt, response)
        num_rows = bucket_length(num_rows, self.row_buckets)
        ends = None if self.row_length else prompt
        length = self.row_length or prompt + response
        rows = _Rows.filled(
            draws, places, self.group_size, (num_rows, length), self.padding.pad_id, ends
        )
        rows = rows.interleaved(num_rows // (self.micro_batch_rows or num_rows))
        slots = np.where(rows.slots > 0, rows.slots + self.first_slot, 0).astype(np.int32)
        of_slots = _of_slots(draws, self.group_size, self.policy_temperature)
        if self.has_equal_weights:
            is_there = of_slots["weights"] > 0
            equal = self.group_size / is_there.sum(axis=1, keepdims=True)
            of_slots["weights"] = np.where(is_there, equal, 0).astype(np.float32)
        if self.has_prompts:
            prompts = [d.prompt.tokens for d in draws]
            of_slots["prompts"] = left_pad(prompts, prompt, self.padding.pad_id)
        if self.row_length:
            return PackedBatch(
                rows.tokens,
                slots,
                rows.positions,
                rows.behavior,
                is_action=rows.is_action,
                **of_slots,
            )
        return Batch(
            rows.tokens,
            slots.max(axis=1),
            rows.behavior[:, prompt:],
            is_action=None if rows.is_action is None else rows.is_action[:, prompt:],
            **of_slots,
        )

    def _places(self, draws: Sequence[Draw]) -> Places:
        """Where the sequences lie, before micro-batches are spread over the batch.

        Raises:
            ValueError: one is longer than a row.
        """
        lengths = [
            [len(d.prompt.tokens) + len(y.response_tokens) for y in d.trajectories] for d in draws
        ]
        longest = max(map(max, lengths))
        if self.row_length and longest > self.row_length:
            raise ValueError(
                f"a prompt with its response has {longest} tokens and does not fit a row of "
                f"{self.row_length}; raise config.batch.packed_length"
            )
        if not self.row_length:
            lengths = [[1] * len(group) for group in lengths]
        return place(
            lengths,
            row_length=self.row_length or 1,
            micro_batch_rows=self.micro_batch_rows if self.is_whole else 0,
        )


def row_buckets(most: int, multiple: int, num: int) -> tuple[int, ...]:
    """Numbers of rows to compile for, ascending: up to `num` that halve from `most` down.

    Args:
        most: rows that always suffice.
        multiple: each is a multiple of this, rounded up.
        num: how many at most.

    Example: row_buckets(256, 8, 4) == (32, 64, 128, 256).
    """
    return tuple(sorted({math.ceil(most / 2**i / multiple) * multiple for i in range(num)}))


def _longest(draws: Sequence[Draw]) -> tuple[int, int]:
    """Tokens of the longest prompt and of the longest response."""
    return (
        max(len(d.prompt.tokens) for d in draws),
        max(len(y.response_tokens) for d in draws for y in d.trajectories),
    )


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Rows [n s] that hold whole sequences; slots and positions are 0 at padding."""

    tokens: np.ndarray
    slots: np.ndarray
    positions: np.ndarray
    behavior: np.ndarray
    is_action: np.ndarray | None

    @classmethod
    def filled(
        cls,
        draws: Sequence[Draw],
        places: Places,
        group_size: int,
        shape: tuple[int, int],
        pad_id: int,
        prompt_end: int | None,
    ) -> "_Rows":
        """All sequences in their places; with `prompt_end`, so that all prompts end there.

        Without a token that an environment wrote no mask is carried. That is decided batch by
        batch: hosts that share batches will have to agree on it.
        """
        has_environment = any(y.is_action is not None for d in draws for y in d.trajectories)
        rows = cls(
            np.full(shape, pad_id, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.int32),
            np.zeros(shape, np.float32),
            np.zeros(shape, bool) if has_environment else None,
        )
        sequences = (
            (i * group_size + j + 1, d.prompt.tokens, y)
            for i, d in enumerate(draws)
            for j, y in enumerate(d.trajectories)
        )
        for (slot, x, y), row, start in zip(
            sequences, places.rows.tolist(), places.starts.tolist(), strict=True
        ):
            first = start if prompt_end is None else prompt_end - len(x)
            middle, end = first + len(x), first + len(x) + len(y.response_tokens)
            rows.tokens[row, first:middle] = x
            rows.tokens[row, middle:end] = y.response_tokens
            rows.slots[row, first:end] = slot
            rows.positions[row, first:end] = np.arange(end - first)
            rows.behavior[row, middle:end] = y.behavior_token_logprobs
            if rows.is_action is not None:
                rows.is_action[row, middle:end] = True if y.is_action is None else y.is_action
        return rows

    def interleaved(self, num: int) -> "_Rows":
        """Row q of micro-batch b of `num`, b * m + q here, as row q * num + b."""

        def spread(x: np.ndarray | None) -> Any:
            if x is None or num == 1:
                return x
            return x.reshape(num, -1, x.shape[1]).swapaxes(0, 1).reshape(x.shape)

        return _Rows(*(spread(getattr(self, f.name)) for f in dataclasses.fields(self)))


def _of_slots(
    draws: Sequence[Draw], group_size: int, policy_temperature: float
) -> dict[str, np.ndarray]:
    """What batches keep of each response, [p k] by name; 0 at places that are empty."""

    def version(y: Trajectory) -> int:
        return y.version_min if y.sampling_temperature == policy_temperature else -1

    shape = len(draws), group_size
    dtypes = {
        "prompt_lengths": np.int32,
        "response_lengths": np.int32,
        "rewards": np.float32,
        "reference_logprob": np.float32,
        "versions": np.int32,
        "weights": np.float32,
    }
    found = {name: np.zeros(shape, dtype) for name, dtype in dtypes.items()}
    for i, d in enumerate(draws):
        for j, (y, weight) in enumerate(zip(d.trajectories, d.weights, strict=True)):
            found["prompt_lengths"][i, j] = len(d.prompt.tokens)
            found["response_lengths"][i, j] = len(y.response_tokens)
            found["rewards"][i, j] = y.reward
            found["reference_logprob"][i, j] = y.reference_logprob
            found["versions"][i, j] = version(y)
            found["weights"][i, j] = weight
    return found
