# SPDX-License-Identifier: Apache-2.0
"""TrajectoryStore: a million responses in memory at little more than the bytes of their tokens.

Scalars lie in one numpy table, token ids and log-probs as bytes; each prompt lists its rows and
indexes them by their token bytes. It owns two invariants: a prompt never holds the same response
twice, and no operation costs more the more is stored (`smallest` amortised).
"""

import heapq
import itertools
import struct
from array import array
from collections.abc import Mapping, Sequence
from typing import Any, Literal

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

# The trajectory's scalars, then: its id, in how many groups it was drawn, the sync it came with.
FIELDS = (*ROW_FIELDS, ("id", "<i8"), ("uses", "<i4"), ("sync", "<i4"))
# Positions in a row tuple.
PROMPT_ID, REWARD, VERSION, ID, USES, SYNC = (
    [name for name, _ in FIELDS].index(name)
    for name in ("prompt_id", "reward", "version_min", "id", "uses", "sync")
)
_DTYPE = np.dtype([*FIELDS, ("position", "<i4")])  # position: in the prompt's list of rows
_NO_ID = -1  # id of a free row

# Bookkeeping of one response beside its tokens and log-probs, so that num_bytes is about process
# memory. Measured by tba_jax.bench.replay_buffer: table row, two bytes objects, index entry.
RESPONSE_OVERHEAD_BYTES = 280

OrderField = Literal["version_min", "reward"]


class _Responses:
    """The rows of one prompt in a fixed order, and an index by their token bytes."""

    __slots__ = ("prompt", "slots", "by_tokens", "num_bytes")

    def __init__(self, prompt: Prompt) -> None:
        self.prompt = prompt
        self.slots = array("i")
        self.by_tokens: dict[bytes, int] = {}
        self.num_bytes = prompt.tokens.nbytes + len(prompt.text)


class TrajectoryStore:
    """Packed trajectories by slot (index into `rows`) and by prompt.

    Attributes:
        rows: structured table with FIELDS; rows of free slots have id -1.
        num_trajectories: stored responses.
        num_bytes: stored bytes, an estimate of the bookkeeping included.
        sum_uses, sum_versions, sum_rewards: over stored responses.
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
        self._heaps: dict[OrderField, list[int]] = {}  # see smallest

    def __len__(self) -> int:
        """Prompts with at least one response."""
        return len(self._prompts)

    def __contains__(self, prompt_id: int) -> bool:
        return prompt_id in self._prompts

    def prompt(self, prompt_id: int) -> Prompt:
        """The prompt, as it came with its first stored response."""
        return self._prompts[prompt_id].prompt

    def slots(self, prompt_id: int) -> Int[np.ndarray, " n"]:
        """Slots of a prompt's responses, in an order that depends only on the history."""
        return np.array(self._prompts[prompt_id].slots, np.int64)

    def count_listed(self) -> int:
        """Responses counted prompt by prompt: the independent check of `num_trajectories`."""
        return sum(len(responses.slots) for responses in self._prompts.values())

    def tokens(self, slots: Sequence[int]) -> list[Int[np.ndarray, " t"]]:
        """Response tokens in these slots, read-only."""
        return [np.frombuffer(self._tokens[slot], np.int32) for slot in slots]

    def holds(self, y: Trajectory) -> bool:
        """Whether its prompt has a response of the same tokens."""
        responses = self._prompts.get(y.prompt_id)
        return responses is not None and pack_tokens(y) in responses.by_tokens

    def trajectories(self, slots: Sequence[int], rows: Sequence[Sequence[Any]]) -> list[Trajectory]:
        """The trajectories in these slots; `rows` are their rows as tuples."""
        tokens = [self._tokens[slot] for slot in slots]
        extras = [self._extras[slot] for slot in slots]
        return unpack(rows, tokens, extras, self._settings)

    def insert(
        self, prompt: Prompt, y: Trajectory, *, row_id: int, sync: int
    ) -> tuple[Any, ...] | None:
        """Store a response to `prompt`; returns the row of the equal one it replaced, if any."""
        responses = self._prompts.get(prompt.prompt_id)
        if responses is None:
            responses = self._prompts[prompt.prompt_id] = _Responses(prompt)
            self.num_bytes += responses.num_bytes
        tokens = pack_tokens(y)
        old = responses.by_tokens.get(tokens)
        replaced = None if old is None else self._take_out(old)[1]
        row = (*pack_row(y, self._settings), row_id, 0, sync)
        self._put(responses, row, tokens, pack_extras(y))
        return replaced

    def remove(self, slot: int) -> tuple[Any, ...]:
        """Remove a response, and its prompt with the last one; returns its row."""
        responses, row = self._take_out(slot)
        if not responses.slots:
            del self._prompts[row[PROMPT_ID]]
            self.num_bytes -= responses.num_bytes
        return row

    def use(self, slots: Int[np.ndarray, " n"]) -> list[tuple[Any, ...]]:
        """Count one use of each of these (distinct) slots; returns their rows before it."""
        rows = self.rows[slots].tolist()
        self.rows["uses"][slots] += 1
        self.sum_uses += len(rows)
        return rows

    def smallest(self, field: OrderField) -> int | None:
        """Slot with the smallest value of `field`, the lowest id among equals; None when empty.

        A heap with lazy deletion: entries of rows that are gone are skipped when they surface. It
        is made when first needed (most runs never reach a bound), and again once stale entries
        outnumber the live ones.
        """
        heap = self._heaps.get(field)
        if heap is None:
            live = np.flatnonzero(self.rows["id"] != _NO_ID)
            rows = self.rows[live].tolist()
            heap = [_heap_key(field, r, s) for r, s in zip(rows, live.tolist(), strict=True)]
            heapq.heapify(heap)
            self._heaps[field] = heap
        while heap:
            slot = heap[0] & 0xFFFFFFFF
            if self.rows["id"][slot] == (heap[0] >> 32) & 0xFFFFFFFFFFFFFFFF:
                return slot
            heapq.heappop(heap)
        return None

    def _put(
        self, responses: _Responses, row: tuple[Any, ...], tokens: bytes, extras: bytes
    ) -> None:
        """Write one row, its bytes and every index of it."""
        if self._free:
            slot = self._free.pop()
            self._tokens[slot], self._extras[slot] = tokens, extras
        else:
            slot = len(self._tokens)
            self._tokens.append(tokens)
            self._extras.append(extras)
            if slot == len(self.rows):
                # Doubling: the cost per insert stays flat.
                grown = np.zeros(2 * slot, _DTYPE)
                grown[:slot] = self.rows
                grown["id"][slot:] = _NO_ID
                self.rows = grown
        self.rows[slot] = (*row, len(responses.slots))
        responses.slots.append(slot)
        responses.by_tokens[tokens] = slot
        self._count(row, slot, 1)
        for field, heap in list(self._heaps.items()):
            if len(heap) > 2 * self.num_trajectories + 1024:
                del self._heaps[field]  # mostly stale entries
            else:
                heapq.heappush(heap, _heap_key(field, row, slot))

    def _take_out(self, slot: int) -> tuple[_Responses, tuple[Any, ...]]:
        """Undo `_put`; the prompt stays, even without responses."""
        row = self.rows[slot].item()
        responses = self._prompts[row[PROMPT_ID]]
        last = responses.slots.pop()
        if last != slot:
            position = row[-1]
            responses.slots[position] = last
            self.rows["position"][last] = position
        del responses.by_tokens[self._tokens[slot]]
        self._count(row, slot, -1)
        self.rows["id"][slot] = _NO_ID
        self._tokens[slot] = self._extras[slot] = b""
        self._free.append(slot)
        return responses, row

    def _count(self, row: tuple[Any, ...], slot: int, sign: int) -> None:
        payload = len(self._tokens[slot]) + len(self._extras[slot])
        self.num_trajectories += sign
        self.num_bytes += sign * (payload + RESPONSE_OVERHEAD_BYTES)
        self.sum_uses += sign * row[USES]
        self.sum_versions += sign * row[VERSION]
        self.sum_rewards += sign * row[REWARD]

    def snapshot(self, prompt_ids: Sequence[int]) -> Snapshot:
        """Everything as flat arrays and JSON-compatible metadata, prompts in the given order.

        `store_sizes` has the number of responses of each prompt of `prompt_ids`; then, response by
        response: columns `row_*`, token ids in `tokens` (int32 as bytes, `tokens_sizes` bytes
        each), log-probs and reward parts in `extras`.
        """
        stores = [self._prompts[prompt_id] for prompt_id in prompt_ids]
        sizes = [len(responses.slots) for responses in stores]
        chained = itertools.chain.from_iterable(responses.slots for responses in stores)
        slots = np.fromiter(chained, np.int64, sum(sizes))
        arrays, prompts = pack_prompts([responses.prompt for responses in stores])
        arrays["store_sizes"] = np.array(sizes, np.int64)
        arrays.update({f"row_{name}": self.rows[name][slots] for name, _ in FIELDS})
        arrays.update(flatten([self._tokens[slot] for slot in slots.tolist()], "tokens"))
        arrays.update(flatten([self._extras[slot] for slot in slots.tolist()], "extras"))
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
        """A store with the content of a snapshot, in the same orders."""
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


def _heap_key(field: OrderField, row: Sequence[Any], slot: int) -> int:
    """One integer that sorts by value, then id; a tuple would take three times the memory."""
    rank = row[VERSION] if field == "version_min" else _float_rank(row[REWARD])
    return (rank << 96) | (row[ID] << 32) | slot


def _float_rank(value: float) -> int:
    """Integer that orders as the float does."""
    bits = struct.unpack("<q", struct.pack("<d", value + 0.0))[0]  # + 0.0: one zero, not two
    return bits if bits >= 0 else bits ^ 0x7FFFFFFFFFFFFFFF
