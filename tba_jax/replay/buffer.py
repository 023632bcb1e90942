# SPDX-License-Identifier: Apache-2.0
"""ReplayBuffer: what the searchers found, and which of it the trainer sees next.

Responses are kept per prompt, deduplicated by exact tokens, bounded per prompt and in total bytes.
The trainer's merge is its only writer. It owns two invariants: every response that entered is
accounted for (the ledger), and a restored buffer makes the same next draws as the one that was
saved.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tba_jax.flow.edit_distance import near_duplicates
from tba_jax.flow.rounds import RoundCommit, check_commit
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Draw, Group, Trajectory
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.draws import choose, response_log_weights
from tba_jax.replay.fresh import FreshWindow
from tba_jax.replay.ledger import Ledger
from tba_jax.replay.prompt_pool import PromptPool
from tba_jax.replay.store import ID, PROMPT_ID, SYNC, USES, OrderField, TrajectoryStore

# Lowers the log-weight of responses that were drawn before, far beyond the range of Gumbel noise.
_AFTER_ALL_OTHERS = 1e3


class ReplayBuffer:
    """Bounded, deduplicated, thread-safe store of trajectories with recency and reward sampling.

    Args:
        settings: what is kept, and what is drawn. A response is as old as its oldest version, and
            the byte bound includes bookkeeping, estimated per response. Of responses nearer than
            `similarity` the one with the highest reward is kept, of exact duplicates the newest.
        seed: int or sequence of ints for the numpy Generator behind every draw.
    """

    def __init__(self, settings: ReplaySettings, seed: int | Sequence[int]) -> None:
        self._settings = settings
        self._evict_field: OrderField = "version_min" if settings.evict == "oldest" else "reward"
        self._lock = threading.RLock()
        self._rng = np.random.default_rng(seed)
        self._store = TrajectoryStore()
        self._replay = PromptPool()  # the prompts of the store, for the epoch-style draws
        self._fresh = FreshWindow(settings.fresh_window)
        self._plan: list[bool] | None = None  # slot kinds of a batch that has to wait
        self._ledger = Ledger()
        self._next_id = 0
        self._step = 0

    def merge(self, commits: Sequence[RoundCommit], step: int) -> dict[str, int]:
        """Take in the finished rounds of one sync, then evict down to the bounds.

        A response whose tokens are already stored replaces the stored one. Merges at one step are
        one sync: while the trainer waits, further merges add to the newest data. A merge without a
        single trajectory leaves the fresh window as it is. Rounds merged together or one by one
        give the same buffer, so that a schedule log can be replayed.

        Args:
            commits: rounds in the order they were taken from the outboxes.
            step: trainer step now.

        Returns:
            How much each ledger counter grew, plus "stored" and "rejected".

        Raises:
            ValueError: a commit `check_commit` refuses; the buffer is unchanged.
        """
        for commit in commits:
            check_commit(commit)
        with self._lock:
            before = self._totals()
            self._step = step
            for commit in commits:
                self._take_in(commit, step)
            return {name: total - before[name] for name, total in self._totals().items()}

    def _take_in(self, commit: RoundCommit, step: int) -> None:
        """One round, completely: how rounds are grouped into merges leaves no trace."""
        touched = sorted({g.prompt.prompt_id for g in commit.groups if g.trajectories})
        if touched:
            self._fresh.open(step)
        self._ledger.counters["generated"] += commit.generated
        for group in commit.groups:
            self._insert(group)
        for prompt_id in touched:
            self._evict_surplus(prompt_id)
        self._evict_aged(step)
        self._evict_bytes()
        for prompt_id in touched:
            self._refresh(prompt_id)

    def _totals(self) -> dict[str, int]:
        return self._ledger.totals(self._store.num_trajectories)

    def _insert(self, group: Group) -> None:
        self._ledger.reject(group.rejected)
        for y in group.trajectories:
            if self._settings.similarity and not self._is_best_of_similar(y):
                self._ledger.counters["evicted_similar"] += 1
                continue
            replaced = self._store.insert(
                group.prompt, y, row_id=self._next_id, sync=self._fresh.newest
            )
            self._next_id += 1
            if replaced is not None:
                self._ledger.counters["duplicate"] += 1
                self._lose_fresh(replaced)
            self._replay.add(group.prompt.prompt_id)

    def _is_best_of_similar(self, y: Trajectory) -> bool:
        """Whether no similar response is stored; ones with lower rewards are evicted for it."""
        if y.prompt_id not in self._store or self._store.holds(y):
            return True
        slots = self._store.slots(y.prompt_id)
        stored = self._store.tokens(slots.tolist())
        slots = slots[near_duplicates(y.response_tokens, stored, self._settings.similarity)]
        if (self._store.rows["reward"][slots] >= y.reward).any():
            return False
        for slot in slots.tolist():
            self._evict(slot, "similar")
        return True

    def _lose_fresh(self, row: Sequence[Any]) -> None:
        """A response (its row before) is used or removed: its prompt has one unused less."""
        if row[USES] == 0:
            self._fresh.lose_one(row[SYNC], row[PROMPT_ID])

    def _refresh(self, prompt_id: int) -> None:
        """Set what the newest sync holds of this prompt."""
        if prompt_id not in self._store:
            return
        rows = self._store.rows[self._store.slots(prompt_id)]
        rows = rows[rows["sync"] == self._fresh.newest]
        unused = int((rows["uses"] == 0).sum())
        if unused:
            self._fresh.put(prompt_id, unused, int(rows["version_min"].min()))

    def _evict(self, slot: int, reason: str) -> None:
        row = self._store.remove(slot)
        self._ledger.counters[f"evicted_{reason}"] += 1
        self._lose_fresh(row)
        if row[PROMPT_ID] not in self._store:
            self._replay.discard(row[PROMPT_ID])

    def _evict_surplus(self, prompt_id: int) -> None:
        slots = self._store.slots(prompt_id)
        surplus = len(slots) - self._settings.capacity_per_prompt
        if surplus > 0:
            rows = self._store.rows[slots]
            order = np.lexsort((rows["id"], rows[self._evict_field]))
            for slot in slots[order[:surplus]].tolist():
                self._evict(slot, "capacity")

    def _evict_aged(self, step: int) -> None:
        if not self._settings.max_age:
            return
        while (slot := self._store.smallest("version_min")) is not None:
            if step - int(self._store.rows["version_min"][slot]) <= self._settings.max_age:
                return
            self._evict(slot, "age")

    def _evict_bytes(self) -> None:
        while self._store.num_bytes > self._settings.max_bytes:
            slot = self._store.smallest(self._evict_field)
            assert slot is not None, "bytes are counted but nothing is stored"
            self._evict(slot, "bytes")

    def is_ready(self, num_prompts: int, group_size: int, step: int) -> bool:
        """Whether `sample` would return a batch; slot kinds that this decides stay decided."""
        with self._lock:
            self._age(step)
            plan = self._slot_kinds(num_prompts)
            group = self._fresh_group(num_prompts, group_size)
            short = sum(plan) - self._fresh.count(sum(plan), group)
            return not (short > 0 and self._settings.pace == "trainer") and self._suffices(
                num_prompts, group_size
            )

    def supply(self, num_prompts: int, group_size: int, step: int) -> tuple[bool, int]:
        """What this buffer has for a batch of which somebody else decides what is fresh.

        Returns:
            Whether it can fill all slots, and how many of them with fresh prompts.
        """
        with self._lock:
            self._age(step)
            group = self._fresh_group(num_prompts, group_size)
            return self._suffices(num_prompts, group_size), self._fresh.count(num_prompts, group)

    def sample(
        self,
        num_prompts: int,
        group_size: int,
        step: int,
        *,
        num_fresh: int | None = None,
        num_short: int = 0,
    ) -> list[Draw] | None:
        """Draw a batch: `num_prompts` slots of `group_size` responses.

        Each slot is fresh with probability `recency_prob`. Fresh: a prompt with unused responses
        from the newest sync (older ones of the fresh window when that runs out), drawn once per
        sync, and its responses of that sync, unused ones first. (With fewer prompts than slots, as
        in a task of one prompt: once for every K of its responses that are unused.) Replay: a
        prompt of a running shuffle of all prompts, its responses drawn by `response_log_weights`.
        No prompt comes twice in a batch unless there are fewer prompts than slots. With fewer than
        `group_size` distinct responses all of them are taken and the rest are repeats.

        Args:
            num_prompts: p.
            group_size: K.
            step: trainer step the batch is for.
            num_fresh: where hosts share a batch, how many of these slots are fresh (at most what
                `supply` said); None: this buffer decides.
            num_short: with `num_fresh`, slots to count as `fresh_short`.

        Returns:
            The slots; None when the trainer must wait: nothing is stored, `max_reuse` leaves too
            little, or pace is "trainer" and there are too few fresh prompts. Slot kinds that were
            decided stay decided over a wait, so waiting does not bias the fresh share.
        """
        with self._lock:
            self._age(step)
            # Fewer prompts than slots: a prompt fills as many as it has fresh groups for.
            group = self._fresh_group(num_prompts, group_size)
            if num_fresh is None:
                plan = self._slot_kinds(num_prompts)
                num_short = max(0, sum(plan) - self._fresh.count(sum(plan), group))
                num_fresh = sum(plan) - num_short
                if num_short and self._settings.pace == "trainer":
                    return None
            else:
                plan = [slot < num_fresh for slot in range(num_prompts)]
            if not self._suffices(num_prompts, group_size):
                return None
            taken: set[int] = set()
            fresh = [self._draw_fresh(taken, group_size, group) for _ in range(num_fresh)]
            replay = [self._draw_replay(taken, group_size) for _ in range(num_prompts - len(fresh))]
            self._replay.give_back()
            self._fresh.give_back()
            self._ledger.counters["fresh_short"] += num_short
            self._plan = None
            return [fresh.pop() if is_fresh and fresh else replay.pop() for is_fresh in plan]

    def _age(self, step: int) -> None:
        """What the passing of steps does: old responses go, and stop being fresh."""
        self._step = step
        self._evict_aged(step)
        if self._settings.max_staleness:
            self._fresh.drop_older(step - self._settings.max_staleness)

    def _slot_kinds(self, num_prompts: int) -> list[bool]:
        """Which slots of the next batch should be fresh, decided once for each batch."""
        if self._plan is None or len(self._plan) != num_prompts:
            self._plan = [
                u < self._settings.recency_prob for u in self._rng.random(num_prompts).tolist()
            ]
        return self._plan

    def _fresh_group(self, num_prompts: int, group_size: int) -> int:
        """Unused responses that fill a fresh slot; 0: each prompt fills one slot at most."""
        return group_size if len(self._store) < num_prompts else 0

    def _suffices(self, num_prompts: int, group_size: int) -> bool:
        if self._settings.max_reuse and len(self._store) < num_prompts:
            # Prompts will come twice, so responses may be used up in the middle of the batch.
            uses_left = (
                self._settings.max_reuse * self._store.num_trajectories - self._store.sum_uses
            )
            return uses_left >= num_prompts * group_size
        return len(self._store) > 0

    def _draw_fresh(self, taken: set[int], group_size: int, group: int) -> Draw:
        found = self._fresh.draw(self._rng, taken, group)
        assert found is not None, "count() promised a prompt that no sync of the window holds"
        sync, prompt_id = found
        rows = self._store.rows
        slots = self._store.slots(prompt_id)
        slots = slots[rows["sync"][slots] == sync]
        log_weights = np.zeros(len(slots))
        if len(slots) > group_size:
            log_weights -= _AFTER_ALL_OTHERS * (rows["uses"][slots] > 0)
        return self._hand_out(prompt_id, slots, log_weights, group_size, True, taken)

    def _draw_replay(self, taken: set[int], group_size: int) -> Draw:
        if len(taken) >= len(self._store):
            taken.clear()  # fewer prompts than slots: another pass over them
        prompt_id = self._replay.draw(self._rng, taken)
        if prompt_id is None:
            self._replay.recycle()
            prompt_id = self._replay.draw(self._rng, taken)
        assert prompt_id is not None, "_suffices promised a prompt"
        slots = self._store.slots(prompt_id)
        log_weights = response_log_weights(
            self._store.rows["reward"][slots],
            priority_temperature=self._settings.priority_temperature,
            uniform_mix=self._settings.uniform_mix,
        )
        return self._hand_out(prompt_id, slots, log_weights, group_size, False, taken)

    def _hand_out(
        self,
        prompt_id: int,
        slots: Int[np.ndarray, " n"],
        log_weights: Float[np.ndarray, " n"],
        group_size: int,
        is_fresh: bool,
        taken: set[int],
    ) -> Draw:
        """Choose among `slots`, rebuild the trajectories and book their use."""
        prompt = self._store.prompt(prompt_id)
        picked, repeats = choose(self._rng, log_weights, group_size)
        chosen = slots[picked]
        rows = self._store.use(chosen)
        trajectories = self._store.trajectories(chosen.tolist(), rows)
        ids = [row[ID] for row in rows]
        for index in repeats.tolist():
            trajectories.append(trajectories[index])
            ids.append(ids[index])
        taken.add(prompt_id)
        self._ledger.counters["used"] += group_size
        self._ledger.counters["repeats"] += len(repeats)
        for slot, row in zip(chosen.tolist(), rows, strict=True):
            self._ledger.counters["trained_unique"] += row[USES] == 0
            self._lose_fresh(row)
            if self._settings.max_reuse and row[USES] + 1 >= self._settings.max_reuse:
                self._evict(slot, "reuse")
        if prompt_id not in self._store:
            taken.discard(prompt_id)
        weights = (1,) * group_size
        return Draw(prompt, tuple(trajectories), weights, is_fresh, tuple(ids), len(repeats))

    @property
    def num_prompts(self) -> int:
        """Prompts with at least one stored response."""
        return len(self._store)

    @property
    def num_trajectories(self) -> int:
        """Stored responses."""
        return self._store.num_trajectories

    @property
    def num_bytes(self) -> int:
        """Stored bytes, an estimate of the bookkeeping included."""
        return self._store.num_bytes

    def ledger(self) -> dict[str, Any]:
        """Where every merged response went (see `Ledger`), with what is stored now."""
        with self._lock:
            return {**self._totals(), "rejected": dict(sorted(self._ledger.rejected.items()))}

    def check_ledger(self, outbox_pending: int, outbox_generated: int | None = None) -> None:
        """Account for every response.

        Args:
            outbox_pending: responses waiting in outboxes.
            outbox_generated: responses ever put into outboxes, where the caller can read both at
                one instant; None: only what was merged is checked.

        Raises:
            LedgerError: with the numbers, when they do not add up.
        """
        with self._lock:
            self._ledger.check(
                counted=self._store.num_trajectories,
                listed=self._store.count_listed(),
                outbox_pending=outbox_pending,
                outbox_generated=outbox_generated,
            )

    @property
    def num_fresh_groups(self) -> int:
        """Groups (a prompt at one merge) that wait to be drawn fresh."""
        with self._lock:
            return self._fresh.num_groups

    def stats(self) -> dict[str, float]:
        """Numbers for the metrics; means are over stored responses and 0 when there are none."""
        with self._lock:
            store, totals = self._store, self._totals()
            count = max(1, store.num_trajectories)
            received = max(1, totals["generated"] - totals["rejected"])
            age = self._step * store.num_trajectories - store.sum_versions
            return {
                "buffer/num_prompts": float(len(store)),
                "buffer/num_trajectories": float(store.num_trajectories),
                "buffer/num_bytes": float(store.num_bytes),
                "buffer/reward_mean": store.sum_rewards / count,
                "buffer/age_mean": age / count,
                "buffer/uses_mean": store.sum_uses / count,
                "buffer/unique_fraction": 1 - totals["duplicate"] / received,
                "buffer/replay_ratio": totals["used"] / received,
                "buffer/fresh_short": float(totals["fresh_short"]),
            }

    def state(self) -> PartState:
        """Flat arrays (see TrajectoryStore.snapshot) and JSON-compatible metadata."""
        with self._lock:
            arrays, meta = self._store.snapshot(self._replay.ids)
            return PartState(
                arrays,
                {
                    **meta,
                    "rng": self._rng.bit_generator.state,
                    "replay_left": self._replay.num_left,
                    **self._fresh.state(),
                    "plan": self._plan,
                    **self._ledger.state(),
                    "next_id": self._next_id,
                    "step": self._step,
                },
            )

    def restore(self, state: PartState) -> None:
        """Replace everything by what `state` returned; the next draws are the same."""
        arrays, meta = state
        with self._lock:
            self._store = TrajectoryStore.restored(arrays, meta)
            self._replay = PromptPool(arrays["prompt_ids"].tolist(), meta["replay_left"])
            self._fresh.restore(meta)
            self._ledger.restore(meta)
            self._rng.bit_generator.state = meta["rng"]
            self._plan = meta["plan"]
            self._next_id = meta["next_id"]
            self._step = meta["step"]
