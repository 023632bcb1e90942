# SPDX-License-Identifier: Apache-2.0
"""Trajectories as bytes, as the replay buffer and checkpoints hold them.

A packed trajectory is one byte string: a head of numbers, then its arrays. Values that many
trajectories share are in the table of a `Packer`. A snapshot is flat arrays and JSON-compatible
metadata. Invariant: unpacking returns exactly the packed values.
"""

import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.trajectory import FinishReason, Prompt, Trajectory

# Numbers of a trajectory: prompt ID and reward; oldest and newest version, ticket, row of the
# shared values, tokens, paths, and a bit for each array.
_HEAD = struct.Struct("<qd7i")
# Arrays of a trajectory, [t] each, with their bits; those that are None are left out.
_ARRAYS = (
    (1, "response_tokens", np.dtype("<i4")),
    (2, "behavior_token_logprobs", np.dtype("<f4")),
    (4, "token_advantages", np.dtype("<f4")),
    (8, "reference_token_logprobs", np.dtype("<f4")),
    (16, "is_sampled", np.dtype(bool)),
)


class Shared(NamedTuple):
    """Values that many trajectories share."""

    searcher: int
    sampling_temperature: float
    finish_reason: FinishReason
    part_names: tuple[str, ...]


class Packer:
    """Converts trajectories to bytes and back.

    Args:
        table: rows of `Shared`, as `table` of another packer.

    Attributes:
        table: distinct shared values; only grows.
    """

    def __init__(self, table: Iterable[Sequence[Any]] = ()) -> None:
        self.table = [Shared(*row[:3], part_names=tuple(row[3])) for row in table]
        self._index = {shared: i for i, shared in enumerate(self.table)}

    def pack(self, y: Trajectory) -> bytes:
        """Return the trajectory as bytes.

        In this order: head, reward parts (float64), path lengths (int32), arrays.
        """
        names = tuple(y.reward_parts)
        shared = Shared(y.searcher, y.sampling_temperature, y.finish_reason, names)
        row = self._index.setdefault(shared, len(self.table))
        if row == len(self.table):
            self.table.append(shared)
        arrays = [(bit, getattr(y, name), dtype) for bit, name, dtype in _ARRAYS]
        has = sum(bit for bit, x, _ in arrays if x is not None)
        numbers = (y.prompt_id, y.reward, y.version_min, y.version_max, y.ticket, row)
        return b"".join(
            [
                _HEAD.pack(*numbers, len(y.response_tokens), len(y.path_lengths), has),
                struct.pack(f"<{len(names)}d", *y.reward_parts.values()),
                struct.pack(f"<{len(y.path_lengths)}i", *y.path_lengths),
                *(np.asarray(x, dtype).tobytes() for _, x, dtype in arrays if x is not None),
            ]
        )

    def unpack(self, packed: bytes) -> Trajectory:
        """Return the trajectory that `pack` converted; its arrays are read-only views."""
        prompt_id, reward, *integers = _HEAD.unpack_from(packed)
        version_min, version_max, ticket, row, count, num_paths, has = integers
        shared, start = self.table[row], _HEAD.size
        names = shared.part_names
        parts = struct.unpack_from(f"<{len(names)}d", packed, start) if names else ()
        start += 8 * len(names)
        path_lengths = struct.unpack_from(f"<{num_paths}i", packed, start) if num_paths else ()
        start += 4 * num_paths
        arrays: dict[str, Any] = {}
        for bit, name, dtype in _ARRAYS:
            if has & bit:
                arrays[name] = np.frombuffer(packed, dtype, count, start)
                start += count * dtype.itemsize
        return Trajectory(
            prompt_id=prompt_id,
            reward=reward,
            reward_parts=dict(zip(names, parts, strict=True)),
            version_min=version_min,
            version_max=version_max,
            searcher=shared.searcher,
            ticket=ticket,
            sampling_temperature=shared.sampling_temperature,
            finish_reason=shared.finish_reason,
            path_lengths=path_lengths,
            **arrays,
        )


def to_snapshot(
    prompts: Sequence[Prompt], packed: Sequence[Sequence[bytes]], packer: Packer
) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    """Return prompts, each with its packed trajectories, as a snapshot."""
    sizes = [len(own) for own in packed]
    arrays = {
        "prompt_ids": np.array([p.prompt_id for p in prompts], np.int64),
        "group_sizes": np.array(sizes, np.int64),
        **_flatten("prompt_tokens", [p.tokens.astype("<i4").tobytes() for p in prompts]),
        **_flatten("packed", list(itertools.chain.from_iterable(packed))),
    }
    return arrays, {
        "texts": [p.text for p in prompts],
        "columns": [dict(p.columns) for p in prompts],
        "shared": [list(row) for row in packer.table],
    }


def from_snapshot(
    arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
) -> tuple[list[Prompt], list[list[bytes]], Packer]:
    """Return the arguments of `to_snapshot`."""
    ids, tokens = arrays["prompt_ids"].tolist(), _unflatten(arrays, "prompt_tokens")
    prompts = [
        Prompt(prompt_id, text, np.frombuffer(own, np.int32), columns)
        for prompt_id, text, own, columns in zip(
            ids, meta["texts"], tokens, meta["columns"], strict=True
        )
    ]
    packed = iter(_unflatten(arrays, "packed"))
    stores = [list(itertools.islice(packed, size)) for size in arrays["group_sizes"].tolist()]
    return prompts, stores, Packer(meta["shared"])


def _flatten(name: str, blobs: Sequence[bytes]) -> dict[str, np.ndarray]:
    """Return byte strings as two flat arrays: `name` (uint8) and `name_sizes` (int64)."""
    return {
        name: np.frombuffer(b"".join(blobs), np.uint8),
        f"{name}_sizes": np.fromiter(map(len, blobs), np.int64, len(blobs)),
    }


def _unflatten(arrays: Mapping[str, np.ndarray], name: str) -> list[bytes]:
    data = np.ascontiguousarray(arrays[name], np.uint8).tobytes()
    ends = np.cumsum(arrays[f"{name}_sizes"]).tolist()
    return [data[i:j] for i, j in itertools.pairwise([0, *ends])]
