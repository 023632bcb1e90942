# SPDX-License-Identifier: Apache-2.0
"""Prompts and trajectories as bytes and table rows, as outbox and buffer store them.

Token IDs and log-probs are bytes. Scalar fields are one row of a numpy table. Values that many
trajectories share are an index into a table of settings. A million dataclass objects would take
several times the memory of their tokens. Invariant: unpacking returns exactly the packed values.
"""

import itertools
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.flow.trajectory import FinishReason, Prompt, Trajectory

# The scalar fields of a trajectory, in this order.
ROW_FIELDS = (
    ("prompt_id", "<i8"),
    ("reward", "<f8"),
    ("reference_logprob", "<f8"),
    ("version_min", "<i4"),
    ("version_max", "<i4"),
    ("round", "<i4"),
    ("settings", "<i4"),
)
ROW_DTYPE = np.dtype(list(ROW_FIELDS))

# The saved form of a part: flat arrays and JSON-compatible metadata.
Snapshot = tuple[dict[str, np.ndarray], dict[str, Any]]


class Settings(NamedTuple):
    """Values that many trajectories share and that are stored once."""

    searcher: int
    sampling_temperature: float
    finish_reason: FinishReason
    part_names: tuple[str, ...]
    has_advantages: bool = False
    num_paths: int = 1
    num_spans: int = 0

    @classmethod
    def from_row(cls, row: Sequence[Any]) -> "Settings":
        """Return the settings of one row that `SettingsTable.to_json` returned."""
        searcher, temperature, finish, names, *further = row
        return cls(searcher, temperature, finish, tuple(names), *further)


class SettingsTable:
    """Numbered combinations of settings; a new combination gets the next number."""

    def __init__(self, rows: Iterable[Sequence[Any]] = ()) -> None:
        self._index: dict[Settings, int] = {}
        self._rows: list[Settings] = []
        for row in rows:
            self.index(Settings.from_row(row))

    def index(self, settings: Settings) -> int:
        """Return the index of these settings; new settings are added to the table."""
        found = self._index.setdefault(settings, len(self._rows))
        if found == len(self._rows):
            self._rows.append(settings)
        return found

    def __getitem__(self, index: int) -> Settings:
        return self._rows[index]

    def to_json(self) -> list[list[Any]]:
        """Return all settings as rows of JSON values, from which SettingsTable can be made."""
        return [[*row[:3], list(row.part_names), *row[4:]] for row in self._rows]


def pack_row(y: Trajectory, table: SettingsTable) -> tuple[Any, ...]:
    """Return the scalar fields of `y` in the order of ROW_FIELDS."""
    settings = Settings(
        y.searcher,
        y.sampling_temperature,
        y.finish_reason,
        tuple(y.reward_parts),
        y.token_advantages is not None,
        len(y.paths),
        len(y.version_spans),
    )
    return (
        y.prompt_id,
        y.reward,
        y.reference_logprob,
        y.version_min,
        y.version_max,
        y.round,
        table.index(settings),
    )


def pack_tokens(y: Trajectory) -> bytes:
    """Return the response's token IDs, 4 bytes each; equal bytes mean equal responses."""
    return np.ascontiguousarray(y.response_tokens, "<i4").tobytes()


def pack_extras(y: Trajectory) -> bytes:
    """Return behavior log-probs (float32), reward parts (float64), advantages, paths, `is_sampled`.

    Advantages are float32, or absent. Path lengths are int32, absent for a single path.
    `is_sampled` has a bit per token, in words of 4 bytes; it is absent if the policy sampled every
    token. Then come version spans, as pairs of int32.
    """
    parts = y.reward_parts.values()
    logprobs = np.ascontiguousarray(y.behavior_token_logprobs, "<f4").tobytes()
    packed = logprobs + struct.pack(f"<{len(parts)}d", *parts)
    if y.token_advantages is not None:
        packed += np.ascontiguousarray(y.token_advantages, "<f4").tobytes()
    packed += np.array(y.path_lengths, "<i4").tobytes()
    if y.is_sampled is not None:
        bits = np.packbits(y.is_sampled).tobytes()
        packed += bits + bytes(-len(bits) % 4)
    packed += np.array(y.version_spans, "<i4").tobytes()
    return packed


def unpack(
    rows: Sequence[Sequence[Any]],
    tokens: Sequence[bytes],
    extras: Sequence[bytes],
    table: SettingsTable,
) -> list[Trajectory]:
    """Return trajectories from the results of the three pack functions; arrays are read-only views.

    Args:
        rows: Python numbers in the order of ROW_FIELDS; further numbers are ignored.
        tokens: return value of `pack_tokens`.
        extras: return value of `pack_extras`.
        table: the table with which the rows were packed.
    """
    # One conversion for all trajectories: a pair of arrays for each would take a third of the time.
    all_tokens = np.frombuffer(b"".join(tokens), np.int32)
    all_extras = np.frombuffer(b"".join(extras), np.float32)
    start = extra_start = 0
    out = []
    for row, token_bytes, extra_bytes in zip(rows, tokens, extras, strict=True):
        prompt_id, reward, reference_logprob, version_min, version_max, round_, settings = row[:7]
        shared = table[settings]
        searcher, temperature, finish_reason, part_names = shared[:4]
        parts: Mapping[str, float] = {}
        if part_names:
            values = struct.unpack_from(f"<{len(part_names)}d", extra_bytes, len(token_bytes))
            parts = dict(zip(part_names, values, strict=True))
        count = len(token_bytes) // 4
        end = len(token_bytes) + 8 * len(part_names)
        advantages = None
        if shared.has_advantages:
            first = extra_start + end // 4
            advantages = all_extras[first : first + count]
            end += len(token_bytes)
        path_lengths: tuple[int, ...] = ()
        if shared.num_paths > 1:
            path_lengths = struct.unpack_from(f"<{shared.num_paths}i", extra_bytes, end)
            end += 4 * shared.num_paths
        spans_at = len(extra_bytes) - 8 * shared.num_spans
        spans = struct.iter_unpack("<2i", extra_bytes[spans_at:])
        is_sampled = None
        if spans_at > end:
            bits = np.frombuffer(extra_bytes, np.uint8, offset=end)
            is_sampled = np.unpackbits(bits, count=count).astype(bool)
        out.append(
            Trajectory(
                prompt_id=prompt_id,
                response_tokens=all_tokens[start : start + count],
                reward=reward,
                reward_parts=parts,
                behavior_token_logprobs=all_extras[extra_start : extra_start + count],
                reference_logprob=reference_logprob,
                version_min=version_min,
                version_max=version_max,
                searcher=searcher,
                round=round_,
                sampling_temperature=temperature,
                finish_reason=finish_reason,
                is_sampled=is_sampled,
                token_advantages=advantages,
                path_lengths=path_lengths,
                version_spans=tuple(spans),
            )
        )
        start += count
        extra_start += len(extra_bytes) // 4
    return out


def flatten(blobs: Sequence[bytes], name: str) -> dict[str, np.ndarray]:
    """Return byte strings as two flat arrays: `name` (uint8) and `name_sizes` (int64)."""
    return {
        name: np.frombuffer(b"".join(blobs), np.uint8),
        f"{name}_sizes": np.fromiter(map(len, blobs), np.int64, len(blobs)),
    }


def unflatten(arrays: Mapping[str, np.ndarray], name: str) -> list[bytes]:
    """Inverse of `flatten`."""
    data = memoryview(np.ascontiguousarray(arrays[name], np.uint8)).cast("B")
    ends = np.cumsum(arrays[f"{name}_sizes"]).tolist()
    return [bytes(data[i:j]) for i, j in itertools.pairwise([0, *ends])]


def pack_prompts(prompts: Sequence[Prompt]) -> Snapshot:
    """Return prompts as flat arrays and JSON-compatible metadata."""
    arrays = flatten([p.tokens.astype("<i4").tobytes() for p in prompts], "prompt_tokens")
    arrays["prompt_ids"] = np.array([p.prompt_id for p in prompts], np.int64)
    return arrays, {
        "texts": [p.text for p in prompts],
        "columns": [dict(p.columns) for p in prompts],
    }


def unpack_prompts(arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]) -> list[Prompt]:
    """Inverse of `pack_prompts`."""
    return [
        Prompt(prompt_id, text, np.frombuffer(tokens, np.int32), columns)
        for prompt_id, text, tokens, columns in zip(
            arrays["prompt_ids"].tolist(),
            meta["texts"],
            unflatten(arrays, "prompt_tokens"),
            meta["columns"],
            strict=True,
        )
    ]
