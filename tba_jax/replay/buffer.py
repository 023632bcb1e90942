# SPDX-License-Identifier: Apache-2.0
"""ReplayBuffer: stores the searchers' responses and draws the trainer's batches.

Each prompt has its responses, oldest first, so every limit removes the first response of a prompt.
A merged group is fresh, that is, in a queue by policy version, while it has enough responses that
were never drawn.

Invariants: no drawn response exceeds `max_staleness`; the ledger counts every response once; and a
restored buffer makes the same next draws as the saved buffer, because nothing depends on the order
of a dictionary or set.
"""

import dataclasses
import heapq
import math
import threading
from bisect import bisect_left, bisect_right, insort
from collections.abc import Sequence
from operator import attrgetter
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Draw, Group, Trajectory
from tba_jax.replay.config import RESPONSE_OVERHEAD_BYTES, ReplaySettings
from tba_jax.replay.ledger import Ledger
from tba_jax.replay.records import Packer, from_snapshot, to_snapshot
from tba_jax.replay.store import COLUMNS, MergedGroup, Store

TRIES = 8
"""Maximum draws per slot; the last draw is trained on even if its rewards are equal."""

_AGE = attrgetter("version", "id")  # order of fresh groups


class ReplayBuffer:
    """Bounded, thread-safe store of trajectories with recency and reward sampling.

    Args:
        settings: limits and sampling. The age of a response is that of its oldest policy version.
            The byte limit includes an estimate of bookkeeping.
        seed: int or sequence of ints for the numpy Generator of every draw.

    Attributes:
        num_bytes: stored bytes, including estimated bookkeeping.
    """

    def __init__(self, settings: ReplaySettings, seed: int | Sequence[int]) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._rng = np.random.default_rng(seed)
        self._clear()

    def _clear(self) -> None:
        self._stores: dict[int, Store] = {}  # by prompt
        self._prompt_ids: list[int] = []  # by `Store.place`
        self._oldest: list[tuple[int, int, int]] = []  # heap of `Store.first`, past ones included
        self._fresh: list[MergedGroup] = []  # oldest version first
        self._groups: dict[int, MergedGroup] = {}  # fresh ones and those of the newest merge
        self._newest_step = -1
        self._num_fresh: int | None = None  # fresh slots of a batch that waits for data
        self._packer = Packer()
        self._ledger = Ledger()
        self._sum_rewards = 0.0
        self._sum_versions = self._next_id = self._step = self.num_bytes = 0

    # --- merge ---------------------------------------------------------------------------------

    def merge(self, groups: Sequence[Group], step: int) -> None:
        """Add groups, then remove responses down to the limits.

        Merges at one step count as one merge: while the trainer waits, later merges add to the
        newest data. Groups that are merged together or one by one give the same buffer.

        Args:
            groups: groups that `check_result` accepts.
            step: number of completed optimiser steps.
        """
        with self._lock:
            self._step = step
            for group in groups:
                self._ledger.reject(group.rejected)
                if group.trajectories:
                    self._begin_merge(step)
                    self._insert(group)

    def _begin_merge(self, step: int) -> None:
        """Forget the merge before; without a bound of staleness its groups are no longer fresh."""
        if step == self._newest_step:
            return
        self._newest_step = step
        while self._fresh and not self._settings.max_staleness:
            self._retire(self._fresh[-1], math.inf)
        self._groups = {group.id: group for group in self._fresh}

    def _insert(self, group: Group) -> None:
        prompt, ys = group.prompt, group.trajectories
        store = self._stores.get(prompt.prompt_id)
        if store is None:
            store = self._stores[prompt.prompt_id] = Store(prompt, len(self._prompt_ids))
            self._prompt_ids.append(prompt.prompt_id)
            self.num_bytes += store.num_bytes
        group_id, num = self._next_id, len(ys)
        version = min(y.version_min for y in ys)
        merged = MergedGroup(group_id, prompt.prompt_id, version, self._newest_step, num, num)
        self._groups[group_id] = merged
        insort(self._fresh, merged, key=_AGE)
        for y in ys:
            packed = self._packer.pack(y)
            store.insert(packed, (self._next_id, y.version_min, y.reward, 0, group_id))
            self._next_id += 1
            self._count(packed, y.version_min, y.reward, 1)
            self._ledger.counters["generated"] += 1
            self._ledger.lengths[len(y.response_tokens)] += 1
        heapq.heappush(self._oldest, store.first)
        for _ in range(len(store.ids) - self._settings.capacity_per_prompt):
            self._remove_first(store, "capacity")
        self._shrink()

    def _count(self, packed: bytes, version: int, reward: float, sign: int) -> None:
        """Add a response to the sums (`sign` 1), or subtract it (`sign` -1)."""
        self._ledger.counters["stored"] += sign
        self._sum_rewards += sign * reward
        self._sum_versions += sign * version
        self.num_bytes += sign * (len(packed) + RESPONSE_OVERHEAD_BYTES)

    # --- removal -------------------------------------------------------------------------------

    def _shrink(self) -> None:
        """Remove responses that are too old at this step, and the oldest beyond `max_bytes`."""
        bound = self._settings.max_staleness
        while bound and self._oldest and self._oldest[0][0] < self._step - bound:
            self._remove_oldest("age")
        while self.num_bytes > self._settings.max_bytes:
            self._remove_oldest("bytes")
        if len(self._oldest) > 2 * len(self._stores) + 1024:  # most are past ones
            self._oldest = [store.first for store in self._stores.values()]
            heapq.heapify(self._oldest)

    def _remove_oldest(self, reason: str) -> None:
        _, row_id, prompt_id = heapq.heappop(self._oldest)
        store = self._stores.get(prompt_id)
        if store is not None and store.ids[0] == row_id:
            self._remove_first(store, reason)

    def _remove_first(self, store: Store, reason: str) -> None:
        """Remove the oldest response of a prompt; the last response removes the prompt."""
        packed = store.packed.pop(0)
        _, version, reward, uses, group_id = (column.pop(0) for column in store.columns)
        self._count(packed, version, reward, -1)
        self._ledger.counters[f"evicted_{reason}"] += 1
        if (group := self._groups.get(group_id)) is not None:
            group.num_rows -= 1
            group.num_unused -= not uses
            self._retire(group, 1)
        if store.ids:
            heapq.heappush(self._oldest, store.first)
            return
        self.num_bytes -= store.num_bytes
        del self._stores[store.prompt.prompt_id]
        last = self._prompt_ids.pop()
        if last != store.prompt.prompt_id:  # the last prompt takes its place
            self._prompt_ids[store.place] = last
            self._stores[last].place = store.place

    def _retire(self, group: MergedGroup, num_needed: float) -> None:
        """Remove a fresh group from the queue if it has fewer unused responses than needed."""
        if group.is_fresh and group.num_unused < num_needed:
            group.is_fresh = False
            del self._fresh[bisect_left(self._fresh, _AGE(group), key=_AGE)]
            if group.step != self._newest_step:
                del self._groups[group.id]
            fate = "groups_trained" if group.is_trained else "groups_unused"
            self._ledger.counters[fate] += 1

    # --- draw ----------------------------------------------------------------------------------

    def draw(self, num_prompts: int, group_size: int, step: int) -> list[Draw] | None:
        """Draw a batch: `num_prompts` slots of `group_size` responses, fresh slots first.

        Each slot is fresh with probability `recency_prob`, else replay.

        A fresh slot takes a random one of the fresh groups with the oldest version, and K of its
        responses, unused ones first. The group stays fresh while K of its responses are unused. If
        no group is fresh and pace is "off", the slot takes a random group of the newest merge.

        A replay slot takes a random prompt, and K of its responses by `choose` with the logits
        reward / priority_temperature.

        Except for fresh groups, a prompt repeats in a batch only if there are fewer prompts than
        slots; a fresh slot that finds no group becomes a replay slot. With fewer than K responses,
        all are taken and the rest are repeats. With `equal_rewards` a slot may be drawn again or
        stay empty.

        Args:
            num_prompts: p.
            group_size: K.
            step: number of completed optimiser steps.

        Returns:
            The slots; None if the trainer must wait: nothing is stored, or pace is "trainer" and
            there are too few fresh groups. The number of fresh slots stays the same during a wait,
            so waiting does not bias it.
        """
        with self._lock:
            self._step = step
            self._shrink()
            if self._num_fresh is None:
                self._num_fresh = int(self._rng.binomial(num_prompts, self._settings.recency_prob))
            num_fresh = self._num_fresh
            if not self._stores or self._must_wait(num_fresh, group_size):
                return None
            self._num_fresh = None
            taken: set[int] = set()
            draws = [self._draw_slot(i < num_fresh, group_size, taken) for i in range(num_prompts)]
            counters, found = self._ledger.counters, sum(draw.is_fresh for draw in draws)
            counters["batches"] += 1
            counters["slots"] += num_prompts
            counters["fresh"] += found
            counters["fresh_short"] += num_fresh - found
            return self._without_equal(draws)

    def _must_wait(self, num_fresh: int, group_size: int) -> bool:
        num_waiting = sum(max(1, group.num_unused // group_size) for group in self._fresh)
        return self._settings.pace == "trainer" and num_waiting < num_fresh

    def _draw_slot(self, is_fresh: bool, group_size: int, taken: set[int]) -> Draw:
        """Draw a slot; with equal_rewards=redraw, until its rewards differ.

        Args:
            taken: prompts of the batch so far.
        """
        tries = TRIES if self._settings.equal_rewards == "redraw" else 1
        while True:
            if len(taken) >= len(self._stores):
                taken.clear()  # fewer prompts than slots
            draw = self._draw_fresh(group_size, taken) if is_fresh else None
            draw = draw or self._draw_replay(group_size, taken)
            taken.add(draw.prompt.prompt_id)
            tries -= 1
            if not tries or not _is_equal(draw):
                return draw
            self._ledger.counters["redrawn"] += 1

    def _draw_fresh(self, group_size: int, taken: set[int]) -> Draw | None:
        groups, num = self._fresh, 0
        if groups:
            num = bisect_right(groups, groups[0].version, key=attrgetter("version"))
        elif self._settings.pace == "off":
            groups = [g for g in self._groups.values() if g.num_rows and g.prompt_id not in taken]
            num = len(groups)
            self._ledger.counters["fresh_recycled"] += num > 0
        if not num:
            return None
        group = groups[self._below(num)]
        store = self._stores[group.prompt_id]
        rows = self._rng.permutation(store.members(group.id)).tolist()
        rows.sort(key=lambda i: store.uses[i] > 0)
        draw = self._use(store, (rows * -(-group_size // len(rows)))[:group_size], True)
        self._retire(group, group_size)
        return draw

    def _draw_replay(self, group_size: int, taken: set[int]) -> Draw:
        prompt_id = self._prompt_ids[self._below(len(self._prompt_ids))]
        while prompt_id in taken:
            prompt_id = self._prompt_ids[self._below(len(self._prompt_ids))]
        store = self._stores[prompt_id]
        logits = np.frombuffer(store.rewards) / self._settings.priority_temperature
        return self._use(store, choose(self._rng, logits, group_size).tolist(), False)

    def _below(self, num: int) -> int:
        # A float times a count is uniform enough below 2^53, and ten times faster than integers().
        return int(self._rng.random() * num)

    def _use(self, store: Store, rows: list[int], is_fresh: bool) -> Draw:
        """Return the draw of these rows of a prompt, and count their use."""
        counters = self._ledger.counters
        drawn: dict[int, Trajectory] = {}
        for i in dict.fromkeys(rows):
            y = drawn[i] = self._packer.unpack(store.packed[i])
            store.uses[i] += 1
            if store.uses[i] > 1:
                continue
            counters["trained_unique"] += 1
            self._ledger.trained_lengths[len(y.response_tokens)] += 1
            if (group := self._groups.get(store.groups[i])) is not None:
                group.is_trained = True
                group.num_unused -= 1
                self._retire(group, 1)
        counters["used"] += len(rows)
        counters["repeats"] += len(rows) - len(drawn)
        ids = tuple(store.ids[i] for i in rows)
        return Draw(store.prompt, tuple(drawn[i] for i in rows), is_fresh, ids)

    def _without_equal(self, draws: list[Draw]) -> list[Draw]:
        """With equal_rewards=skip, empty the slots of equal rewards, unless all slots are such."""
        equal = [self._settings.equal_rewards == "skip" and _is_equal(draw) for draw in draws]
        if all(equal):
            return draws
        self._ledger.counters["skipped"] += sum(equal)
        return [
            d._replace(trajectories=(), ids=()) if e else d
            for d, e in zip(draws, equal, strict=True)
        ]

    def keep_references(
        self, draws: Sequence[Draw], values: Sequence[Sequence[Float[np.ndarray, " t"]]]
    ) -> None:
        """Store log-probs of the reference with drawn responses that are still in the buffer.

        Args:
            values: for each draw, log pi_ref of each token of each response.
        """
        with self._lock:
            for draw, own in zip(draws, values, strict=True):
                store = self._stores.get(draw.prompt.prompt_id)
                if store is None:
                    continue
                for row_id, y, logprobs in zip(draw.ids, draw.trajectories, own, strict=True):
                    if (i := store.find(y.version_min, row_id)) is not None:
                        whole = dataclasses.replace(y, reference_token_logprobs=logprobs)
                        self.num_bytes -= len(store.packed[i])
                        store.packed[i] = self._packer.pack(whole)
                        self.num_bytes += len(store.packed[i])
            self._shrink()

    # --- counts --------------------------------------------------------------------------------

    @property
    def num_trajectories(self) -> int:
        """Stored responses."""
        return self._ledger.counters["stored"]

    @property
    def num_fresh_groups(self) -> int:
        """Groups that wait to be drawn."""
        return len(self._fresh)

    def ledger(self) -> dict[str, Any]:
        """Return the counts of all merged responses (see `Ledger`)."""
        with self._lock:
            return {**self._ledger.counters, "rejected": dict(self._ledger.rejected)}

    def check_ledger(self, num_waiting: int, num_generated: int | None = None) -> None:
        """Check that every response is accounted for.

        Args:
            num_waiting: responses that wait for a merge.
            num_generated: responses of all results, read at the same instant; None: check only
                merged responses.

        Raises:
            LedgerError: the numbers do not add up; the message has them.
        """
        with self._lock:
            self._ledger.check(num_waiting, num_generated)

    def stats(self) -> dict[str, float]:
        """Return metrics; means are over stored responses, or 0 without a response."""
        with self._lock:
            count = max(1, self.num_trajectories)
            age = self._step * self.num_trajectories - self._sum_versions
            return {
                "buffer/num_prompts": float(len(self._stores)),
                "buffer/num_trajectories": float(self.num_trajectories),
                "buffer/num_bytes": float(self.num_bytes),
                "buffer/reward_mean": self._sum_rewards / count,
                "buffer/age_mean": age / count,
                **self._ledger.stats(),
            }

    def economy(self) -> dict[str, Any]:
        """Return shares of used groups, and a warning for each kind of waste or bias so far."""
        names = ("trained_share", "length_rank", "effective_m")
        with self._lock:
            stats, warnings = self._ledger.stats(), self._ledger.warnings(self._settings)
        return {**{x: stats[f"buffer/{x}"] for x in names}, "warnings": warnings}

    # --- checkpoints ---------------------------------------------------------------------------

    def state(self) -> PartState:
        """Return prompts with their responses (columns `row_*`), and JSON-compatible metadata."""
        with self._lock:
            stores = [self._stores[prompt_id] for prompt_id in self._prompt_ids]
            arrays, meta = to_snapshot(
                [store.prompt for store in stores], [store.packed for store in stores], self._packer
            )
            for name, code in COLUMNS.items():
                columns = [np.frombuffer(getattr(store, name), code) for store in stores]
                arrays[f"row_{name}"] = np.concatenate([np.zeros(0, code), *columns])
            meta |= {
                "groups": [dataclasses.astuple(group) for group in self._groups.values()],
                "newest_step": self._newest_step,
                "num_fresh": self._num_fresh,
                "ledger": self._ledger.state(),
                "sum_rewards": self._sum_rewards,
                "next_id": self._next_id,
                "step": self._step,
                "rng": self._rng.bit_generator.state,
            }
            return PartState(arrays, meta)

    def restore(self, state: PartState) -> None:
        """Replace the contents by a saved `state`; the next draws are those of the saved buffer."""
        arrays, meta = state
        with self._lock:
            self._clear()
            prompts, packed, self._packer = from_snapshot(arrays, meta)
            begin = 0
            for prompt, own in zip(prompts, packed, strict=True):
                store = self._stores[prompt.prompt_id] = Store(prompt, len(self._prompt_ids), own)
                self._prompt_ids.append(prompt.prompt_id)
                end = begin + len(own)
                for name, column in zip(COLUMNS, store.columns, strict=True):
                    column.frombytes(arrays[f"row_{name}"][begin:end].tobytes())
                begin = end
                self._oldest.append(store.first)
                self.num_bytes += store.num_bytes
                self._sum_versions += sum(store.versions)
            heapq.heapify(self._oldest)
            self._groups = {saved[0]: MergedGroup(*saved) for saved in meta["groups"]}
            self._fresh = sorted((g for g in self._groups.values() if g.is_fresh), key=_AGE)
            self._newest_step = meta["newest_step"]
            self._num_fresh = meta["num_fresh"]
            self._ledger.restore(meta["ledger"])
            self._sum_rewards = meta["sum_rewards"]  # the order of a sum decides its last bits
            self._next_id = meta["next_id"]
            self._step = meta["step"]
            self._rng.bit_generator.state = meta["rng"]


def choose(
    rng: np.random.Generator, logits: Float[np.ndarray, " n"], size: int
) -> Int[np.ndarray, " k"]:
    """Return K indices, drawn by softmax(logits) without replacement.

    With fewer than K candidates all are taken, and the rest are repeats drawn with replacement.
    """
    num = len(logits)
    if num >= size:
        # Gumbel top-k: equal to sequential draws without replacement.
        return np.argpartition(-(logits + rng.gumbel(size=num)), size - 1)[:size]
    weights = np.exp(logits - logits.max())
    repeats = rng.choice(num, size - num, p=weights / weights.sum())
    return np.concatenate([np.arange(num), repeats])


def _is_equal(draw: Draw) -> bool:
    """Return whether all responses of a draw have the same reward."""
    return len({y.reward for y in draw.trajectories}) == 1
