# SPDX-License-Identifier: Apache-2.0
"""TrajectoryStore: holds a million responses in little more memory than their tokens need.

Scalars are in one numpy table, token IDs and log-probs are bytes, and each prompt lists its rows. A
row is a response with its number of draws. Invariant: the cost of an operation does not grow with
the contents (for `oldest` the amortised cost).
"""

import heapq
import itertools
from array import array
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from jaxtyping import Int

from tba_jax.flow.records import (
    ROW_FIELDS,
    SettingsTable,
    Snapshot,
    flatten,
    pack_extras,
    pack_prompts,
    pack_row,
    pack_tokens,
    unflatten,
    unpack,
    unpack_prompts,
)
from tba_jax.flow.trajectory import Prompt, Trajectory
from tba_jax.replay.config import PROMPT_OVERHEAD_BYTES, RESPONSE_OVERHEAD_BYTES

# Scalars of the trajectory; then the row ID, the number of draws, and the step of the merge.
FIELDS = (*ROW_FIELDS, ("id", "<i8"), ("uses", "<i4"), ("merged", "<i4"))
# Positions in a row tuple.
PROMPT_ID, REWARD, VERSION, ID, USES, MERGED = (
    [name for name, _ in FIELDS].index(name)
    for name in ("prompt_id", "reward", "version_min", "id", "uses", "merged")
)
_DTYPE = np.dtype([*FIELDS, ("position", "<i4")])  # position in the prompt's list of rows
_NO_ID = -1  # ID of a free row


class _Responses:
    """Rows of one prompt in a fixed order."""

    __slots__ = ("prompt", "indices", "num_bytes")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.indices = array("i")
        self.num_bytes = prompt.tokens.nbytes + len(prompt.text) + PROMPT_OVERHEAD_BYTES


class TrajectoryStore:
    """Packed trajectories by index into `rows`, and by prompt.

    Attributes:
        rows: structured table with FIELDS; free rows have ID -1.
        num_trajectories: stored responses, the rows in use.
        num_bytes: stored bytes, including estimated bookkeeping.
        sum_uses, sum_versions, sum_rewards: sums over stored responses.
    """

    def __init__(self) -> None:
        self.rows = np.zeros(1024, _DTYPE)
        self.rows["id"] = _NO_ID
        self.num_trajectories = 0
        self.num_bytes = 0
        self.sum_uses = 0
        self.sum_versions = 0
        self.sum_rewards = 0.0
        self._tokens: list[bytes] = []
        self._extras: list[bytes] = []
        self._free: list[int] = []
        self._settings = SettingsTable()
        self._prompts: dict[int, _Responses] = {}
        self._heap: list[int] | None = None  # see oldest

    def __len__(self) -> int:
        """Return the number of prompts with at least one response."""
        return len(self._prompts)

    def __contains__(self, prompt_id: int) -> bool:
        return prompt_id in self._prompts

    def prompt(self, prompt_id: int) -> Prompt:
        """Return the prompt, as stored with its first response."""
        return self._prompts[prompt_id].prompt

    def indices(self, prompt_id: int) -> Int[np.ndarray, " n"]:
        """Return the indices of a prompt's rows; their order depends on earlier calls only."""
        return np.array(self._prompts[prompt_id].indices, np.int64)

    def count_listed(self) -> int:
        """Return the number of responses, counted prompt by prompt, to check `num_trajectories`."""
        return sum(len(responses.indices) for responses in self._prompts.values())

    def length(self, index: int) -> int:
        """Return the number of tokens of the response at this row index."""
        return len(self._tokens[index]) // 4

    def trajectories(
        self, indices: Sequence[int], rows: Sequence[Sequence[Any]]
    ) -> list[Trajectory]:
        """Return the trajectories at these row indices; `rows` are the rows as tuples."""
        tokens = [self._tokens[index] for index in indices]
        extras = [self._extras[index] for index in indices]
        return unpack(rows, tokens, extras, self._settings)

    def insert(self, prompt: Prompt, y: Trajectory, *, row_id: int, merged: int) -> None:
        """Store a response to `prompt`.

        Args:
            row_id: ID of the new row.
            merged: trainer step of the merge.
        """
        responses = self._prompts.get(prompt.prompt_id)
        if responses is None:
            responses = self._prompts[prompt.prompt_id] = _Responses(prompt)
            self.num_bytes += responses.num_bytes
        row = (*pack_row(y, self._settings), row_id, 0, merged)
        self._put(responses, row, pack_tokens(y), pack_extras(y))

    def remove(self, index: int) -> tuple[Any, ...]:
        """Remove a row, and return it; the last row of a prompt removes the prompt."""
        row = self.rows[index].item()
        responses = self._prompts[row[PROMPT_ID]]
        self._take_out(responses, index, row)
        if not responses.indices:
            del self._prompts[row[PROMPT_ID]]
            self.num_bytes -= responses.num_bytes
        return row

    def use(self, indices: Int[np.ndarray, " n"]) -> list[tuple[Any, ...]]:
        """Count a draw of each of these distinct rows; return the rows before the change."""
        rows = self.rows[indices].tolist()
        self.rows["uses"][indices] += 1
        self.sum_uses += len(indices)
        return rows

    def oldest(self) -> int | None:
        """Return the index of the row with the oldest version, then lowest ID; None without rows.

        Uses a heap with lazy deletion: entries of removed rows are skipped when they reach the
        top. The heap is built on first use, because most runs never reach a limit. It is rebuilt
        when most entries are stale.
        """
        heap = self._heap
        if heap is None:
            live = np.flatnonzero(self.rows["id"] != _NO_ID)
            rows = self.rows[live].tolist()
            heap = [_heap_key(r, s) for r, s in zip(rows, live.tolist(), strict=True)]
            heapq.heapify(heap)
            self._heap = heap
        while heap:
            index = heap[0] & 0xFFFFFFFF
            if self.rows["id"][index] == (heap[0] >> 32) & 0xFFFFFFFFFFFFFFFF:
                return index
            heapq.heappop(heap)
        return None

    def _put(
        self, responses: _Responses, row: tuple[Any, ...], tokens: bytes, extras: bytes
    ) -> None:
        """Write one row, its bytes and its index entries."""
        if self._free:
            index = self._free.pop()
            self._tokens[index], self._extras[index] = tokens, extras
        else:
            index = len(self._tokens)
            self._tokens.append(tokens)
            self._extras.append(extras)
            if index == len(self.rows):
                # Doubling keeps the cost per insert constant.
                grown = np.zeros(2 * index, _DTYPE)
                grown[:index] = self.rows
                grown["id"][index:] = _NO_ID
                self.rows = grown
        self.rows[index] = (*row, len(responses.indices))
        responses.indices.append(index)
        self.num_bytes += len(tokens) + len(extras) + RESPONSE_OVERHEAD_BYTES
        self._count(row, 1)
        if self._heap is not None:
            if len(self._heap) > 2 * self.num_trajectories + 1024:
                self._heap = None  # most entries are stale
            else:
                heapq.heappush(self._heap, _heap_key(row, index))

    def _take_out(self, responses: _Responses, index: int, row: tuple[Any, ...]) -> None:
        """Undo `_put`; the prompt stays, even without responses."""
        last = responses.indices.pop()
        if last != index:
            position = row[-1]
            responses.indices[position] = last
            self.rows["position"][last] = position
        payload = len(self._tokens[index]) + len(self._extras[index])
        self.num_bytes -= payload + RESPONSE_OVERHEAD_BYTES
        self._count(row, -1)
        self.rows["id"][index] = _NO_ID
        self._tokens[index] = self._extras[index] = b""
        self._free.append(index)

    def _count(self, row: Sequence[Any], sign: int) -> None:
        """Add a row to the sums (`sign` 1), or subtract it (`sign` -1)."""
        self.num_trajectories += sign
        self.sum_uses += sign * row[USES]
        self.sum_versions += sign * row[VERSION]
        self.sum_rewards += sign * row[REWARD]

    def snapshot(self, prompt_ids: Sequence[int]) -> Snapshot:
        """Return the contents as flat arrays and JSON-compatible metadata, prompts in this order.

        `store_sizes` has the number of rows of each prompt of `prompt_ids`; then, row by row:
        columns `row_*`, token ids in `tokens` (int32 as bytes, `tokens_sizes` bytes each),
        log-probs and reward parts in `extras`.
        """
        stores = [self._prompts[prompt_id] for prompt_id in prompt_ids]
        sizes = [len(responses.indices) for responses in stores]
        chained = itertools.chain.from_iterable(responses.indices for responses in stores)
        indices = np.fromiter(chained, np.int64, sum(sizes))
        arrays, prompts = pack_prompts([responses.prompt for responses in stores])
        arrays["store_sizes"] = np.array(sizes, np.int64)
        arrays.update({f"row_{name}": self.rows[name][indices] for name, _ in FIELDS})
        arrays.update(flatten([self._tokens[index] for index in indices.tolist()], "tokens"))
        arrays.update(flatten([self._extras[index] for index in indices.tolist()], "extras"))
        meta = {
            "prompts": prompts,
            "settings": self._settings.to_json(),
            "sum_rewards": self.sum_rewards,
        }
        return arrays, meta

    @classmethod
    def restored(
        cls, arrays: Mapping[str, np.ndarray], meta: Mapping[str, Any]
    ) -> "TrajectoryStore":
        """Return a store with the contents of a snapshot, in the same order."""
        store = cls()
        store._settings = SettingsTable(meta["settings"])
        columns = [arrays[f"row_{name}"].tolist() for name, _ in FIELDS]
        packed = zip(
            zip(*columns, strict=True),
            unflatten(arrays, "tokens"),
            unflatten(arrays, "extras"),
            strict=True,
        )
        prompts = unpack_prompts(arrays, meta["prompts"])
        for prompt, size in zip(prompts, arrays["store_sizes"].tolist(), strict=True):
            responses = store._prompts[prompt.prompt_id] = _Responses(prompt)
            store.num_bytes += responses.num_bytes
            for row, tokens, extras in itertools.islice(packed, size):
                store._put(responses, row, tokens, extras)
        # A sum in another order would differ in its last bits.
        store.sum_rewards = meta["sum_rewards"]
        return store


def _heap_key(row: Sequence[Any], index: int) -> int:
    """Return an integer that sorts by version, then ID; a tuple takes three times the memory."""
    return (row[VERSION] << 96) | (row[ID] << 32) | index
