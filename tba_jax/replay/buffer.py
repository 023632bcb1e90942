# SPDX-License-Identifier: Apache-2.0
"""ReplayBuffer: stores the searchers' responses and draws the trainer's batches.

`ReplayBuffer` chooses the group for each slot of a batch; `Contents` stores and counts. Only the
trainer's merge writes to the buffer. Invariants: every response that entered is accounted for (the
ledger), and a restored buffer makes the same next draws as the saved buffer.
"""

import threading
from collections.abc import Sequence
from typing import Any

import numpy as np
from jaxtyping import Float, Int

from tba_jax.flow.rounds import RoundCommit, check_commit
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Draw
from tba_jax.replay.config import ReplaySettings
from tba_jax.replay.contents import Contents
from tba_jax.replay.draws import (
    TRIES,
    choose,
    is_wanted,
    response_log_weights,
    unite,
    without_level,
)
from tba_jax.replay.ledger import Economy
from tba_jax.replay.store import ID

# Subtracted from the log-weight of responses drawn before, far more than the range of Gumbel noise.
_AFTER_ALL_OTHERS = 1e3


class ReplayBuffer:
    """Bounded, thread-safe store of trajectories with recency and reward sampling.

    Args:
        settings: limits and sampling. The age of a response is that of its oldest policy version.
            The byte limit includes an estimate of bookkeeping per row.
        seed: int or sequence of ints for the numpy Generator of every draw.
    """

    def __init__(self, settings: ReplaySettings, seed: int | Sequence[int]) -> None:
        self._settings = settings
        self._lock = threading.RLock()
        self._rng = np.random.default_rng(seed)
        self._contents = Contents(settings)
        self._plan: list[bool] | None = None  # slot kinds of a batch that waits for data
        self._step = 0

    def merge(self, commits: Sequence[RoundCommit], step: int) -> dict[str, int]:
        """Add the finished rounds of one sync, then evict down to the limits.

        Merges at one step count as one merge: while the trainer waits, later merges add to the
        newest data. A merge without a trajectory does not change which groups are fresh. Rounds
        that are merged together or one by one give the same buffer.

        Args:
            commits: rounds in the order they were taken from the outboxes.

        Returns:
            Increase of each ledger counter, plus "stored" and "rejected".

        Raises:
            ValueError: `check_commit` refuses a commit; the buffer is unchanged.
        """
        for commit in commits:
            check_commit(commit)
        with self._lock:
            before = self._contents.totals()
            self._step = step
            for commit in commits:
                self._contents.take_in(commit, step)
            return {name: n - before[name] for name, n in self._contents.totals().items()}

    def is_ready(self, num_prompts: int, group_size: int, step: int) -> bool:
        """Return whether `sample` would return a batch, with the same fresh and replay slots."""
        with self._lock:
            self._step = step
            plan = self._slot_kinds(num_prompts)
            fill = self._fresh_fill(num_prompts, group_size)
            if self._waits and sum(plan) > self._contents.fresh.count(fill):
                return False
            return len(self._contents.store) > 0

    def sample(
        self,
        num_prompts: int,
        group_size: int,
        step: int,
    ) -> list[Draw] | None:
        """Draw a batch: `num_prompts` slots of `group_size` responses.

        Each slot is fresh with probability `recency_prob`, else replay.

        A fresh slot draws a group (the responses of one merge to one prompt) that has unused
        responses. Each group is drawn once, and its unused responses are taken first. Only groups
        of the newest merge are drawn, or with `max_staleness` groups of all merges, oldest version
        first. With fewer prompts than slots, as in a task of one prompt, a group is drawn once for
        every K of its unused responses. If no unused response is left and pace is "off", prompts of
        the newest merges are drawn again.

        A replay slot draws the next prompt of a shuffle of all prompts, and its responses with the
        probabilities of `response_log_weights`.

        A prompt repeats in a batch only if there are fewer prompts than slots. With fewer than
        `group_size` responses, all are taken and the rest are repeats. If `is_wanted` rejects a
        group, another waiting group or a replay draw takes its place, or the slot stays empty.

        Args:
            num_prompts: p.
            group_size: K.

        Returns:
            The slots; None if the trainer must wait: nothing is stored, or pace is "trainer" and
            there are too few fresh prompts. The kinds of the slots (fresh or replay) stay the same
            during a wait, so waiting does not bias their shares.
        """
        with self._lock:
            if not self.is_ready(num_prompts, group_size, step):
                return None
            plan = self._slot_kinds(num_prompts)
            fill = self._fresh_fill(num_prompts, group_size)
            taken: set[int] = set()
            fresh: list[Draw] = []
            tries = TRIES * num_prompts
            while len(fresh) < sum(plan) and (draw := self._draw_fresh(taken, group_size, fill)):
                tries -= 1
                if tries < 0 or self._wants(draw):
                    fresh.append(draw)
            replay = [self._draw_wanted(taken, group_size) for _ in range(num_prompts - len(fresh))]
            contents, economy = self._contents, self._contents.economy
            for pool in (contents.replay, contents.fresh, contents.recent):
                pool.give_back()
            num_short = sum(plan) - len(fresh)
            contents.ledger.counters["fresh_short"] += num_short
            economy.batches += 1
            economy.slots += num_prompts
            economy.fresh_slots += len(fresh) + num_short
            self._plan = None
            draws = [fresh.pop() if is_fresh and fresh else replay.pop() for is_fresh in plan]
            draws, num_skipped = without_level(self._settings, draws)
            contents.ledger.counters["skipped"] += num_skipped
            return draws

    @property
    def _waits(self) -> bool:
        return self._settings.pace == "trainer"

    def _slot_kinds(self, num_prompts: int) -> list[bool]:
        """Return which slots of the next batch should be fresh, chosen once per batch."""
        if self._plan is None or len(self._plan) != num_prompts:
            self._plan = [
                u < self._settings.recency_prob for u in self._rng.random(num_prompts).tolist()
            ]
        return self._plan

    def _fresh_fill(self, num_prompts: int, group_size: int) -> int:
        """Return how many unused responses a group needs for each fresh slot that it fills.

        0: any number suffices, and each prompt fills at most one slot.
        """
        return group_size if len(self._contents.store) < num_prompts else 0

    def _draw_fresh(self, taken: set[int], group_size: int, fill: int) -> Draw | None:
        """Return a fresh slot from a waiting group, or from a used group of the newest merges."""
        contents, economy = self._contents, self._contents.economy
        found = contents.fresh.draw(self._rng, taken, fill)
        if found is not None:
            merged, prompt_id, is_first = found
            economy.unused_slots += 1
            economy.trained_groups += is_first
        elif not self._waits:
            again = contents.recent.draw(self._rng, () if fill else taken)
            if again is None:
                return None
            merged, prompt_id = again
            economy.recycled_slots += 1
            contents.ledger.counters["fresh_recycled"] += 1
        else:
            return None
        rows = contents.store.rows
        indices = contents.store.indices(prompt_id)
        indices = indices[rows["merged"][indices] == merged]
        log_weights = np.zeros(len(indices))
        if len(indices) > group_size:
            log_weights[rows["uses"][indices] > 0] -= _AFTER_ALL_OTHERS
        draw = self._hand_out(prompt_id, indices, log_weights, group_size, True)
        taken.add(prompt_id)
        if found is not None:
            for y, weight in zip(draw.trajectories, draw.weights, strict=True):
                economy.staleness[self._step - y.version_min] += weight
        return draw

    def _wants(self, draw: Draw) -> bool:
        """Return whether to train on a draw; a rejected draw counts as a use."""
        wanted = is_wanted(self._settings, draw)
        self._contents.ledger.counters["redrawn"] += not wanted
        return wanted

    def _draw_wanted(self, taken: set[int], group_size: int) -> Draw:
        """Return a replay slot; if the draw is rejected, draw again a limited number of times."""
        draw = self._draw_replay(taken, group_size)
        for _ in range(TRIES - 1):
            if self._wants(draw):
                break
            draw = self._draw_replay(taken, group_size)
        return draw

    def _draw_replay(self, taken: set[int], group_size: int) -> Draw:
        contents = self._contents
        if len(taken) >= len(contents.store):
            taken.clear()  # fewer prompts than slots: start another pass over them
        prompt_id = contents.replay.draw(self._rng, taken)
        if prompt_id is None:
            contents.replay.recycle()
            prompt_id = contents.replay.draw(self._rng, taken)
        assert prompt_id is not None, "the buffer has a prompt"
        indices = contents.store.indices(prompt_id)
        rewards = contents.store.rows["reward"][indices]
        log_weights = response_log_weights(rewards, self._settings.priority_temperature)
        draw = self._hand_out(prompt_id, indices, log_weights, group_size, False)
        taken.add(prompt_id)
        return draw

    def _hand_out(
        self,
        prompt_id: int,
        indices: Int[np.ndarray, " n"],
        log_weights: Float[np.ndarray, " n"],
        group_size: int,
        is_fresh: bool,
    ) -> Draw:
        """Choose responses of these rows, and count the responses as used."""
        store, counters = self._contents.store, self._contents.ledger.counters
        times = choose(self._rng, log_weights, group_size)
        picked = np.flatnonzero(times)
        rows = self._contents.use(indices[picked])
        trajectories = store.trajectories(indices[picked].tolist(), rows)
        num_repeats = group_size - len(picked)
        counters["used"] += group_size
        counters["repeats"] += num_repeats
        groups = unite(trajectories)
        return Draw(
            store.prompt(prompt_id),
            tuple(trajectories[own[0]] for own in groups),
            tuple(int(times[picked[own]].sum()) for own in groups),
            is_fresh,
            tuple(rows[own[0]][ID] for own in groups),
            num_repeats,
        )

    @property
    def num_prompts(self) -> int:
        """Prompts with at least one stored response."""
        return len(self._contents.store)

    @property
    def num_trajectories(self) -> int:
        """Stored responses."""
        return self._contents.store.num_trajectories

    @property
    def num_bytes(self) -> int:
        """Stored bytes, including estimated bookkeeping."""
        return self._contents.store.num_bytes

    @property
    def num_fresh_groups(self) -> int:
        """Groups (responses of one merge to one prompt) that wait to be drawn fresh."""
        with self._lock:
            return len(self._contents.fresh)

    @property
    def economy(self) -> Economy:
        """Counts of used and lost responses and groups; read-only."""
        return self._contents.economy

    @property
    def num_untouched_groups(self) -> int:
        """Number of waiting fresh groups without a drawn response."""
        with self._lock:
            return self._contents.fresh.num_untouched

    def warnings(self) -> list[str]:
        """Return a warning for each kind of waste or bias so far, with the setting to change."""
        with self._lock:
            waiting = self._contents.fresh.num_untouched
            return self._contents.economy.warnings(waiting, self._settings)

    def ledger(self) -> dict[str, Any]:
        """Return the counts of all merged responses (see `Ledger`), and what is stored now."""
        with self._lock:
            rejected = dict(sorted(self._contents.ledger.rejected.items()))
            return {**self._contents.totals(), "rejected": rejected}

    def check_ledger(self, outbox_pending: int, outbox_generated: int | None = None) -> None:
        """Check that every response is accounted for.

        Args:
            outbox_pending: responses waiting in outboxes.
            outbox_generated: responses ever put into outboxes, read at the same instant; None:
                check only merged responses.

        Raises:
            LedgerError: the numbers do not add up; the message has them.
        """
        with self._lock:
            self._contents.ledger.check(
                counted=self._contents.store.num_trajectories,
                listed=self._contents.store.count_listed(),
                outbox_pending=outbox_pending,
                outbox_generated=outbox_generated,
            )

    def stats(self) -> dict[str, float]:
        """Return metrics; means are over stored responses, or 0 without a response."""
        with self._lock:
            return self._contents.stats(self._step)

    def state(self) -> PartState:
        """Return flat arrays (see TrajectoryStore.snapshot) and JSON-compatible metadata."""
        with self._lock:
            arrays, meta = self._contents.state()
            rng = self._rng.bit_generator.state
            return PartState(arrays, {**meta, "rng": rng, "plan": self._plan, "step": self._step})

    def restore(self, state: PartState) -> None:
        """Replace the contents by a saved `state`; the next draws are those of the saved buffer."""
        arrays, meta = state
        with self._lock:
            self._contents.restore(arrays, meta)
            self._rng.bit_generator.state = meta["rng"]
            self._plan = meta["plan"]
            self._step = meta["step"]
