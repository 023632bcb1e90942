# SPDX-License-Identifier: Apache-2.0
"""The trainer: optimiser steps, publications and merges.

The trainer publishes weights at every sync, draws batches from the replay buffer, and minimises the
objective. It never samples: responses arrive through the buffer, and weights leave through a weight
transport. With several trainer processes, the first
process draws every batch, and all processes follow its StepPlan.

The trainer owns the step counter. Invariant: published weights
share no memory with its state.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from tba_jax.flow.batch import Batch, PackedBatch
from tba_jax.flow.state import PartState
from tba_jax.flow.trajectory import Draw
from tba_jax.train.state import TrainState
from tba_jax.train.step_metrics import SHOWN_KEY, STRATA_KEY, named_strata
from tba_jax.train.step_plan import Batches, StepPlan
from tba_jax.weights.transport import Transport


class NonFiniteError(RuntimeError):
    """Too many consecutive steps had a non-finite loss or gradient."""


class Shown(NamedTuple):
    """One prompt of a batch, with log-probs of every token of its responses before the update.

    Attributes:
        draw: the prompt and n responses.
        policy: float32 [k t], k at least n.
        reference: float32 [k t]; None unless the trainer scores the reference.
    """

    draw: Draw
    policy: np.ndarray
    reference: np.ndarray | None = None


@dataclasses.dataclass
class Counters:
    """Counts of waits, publications, tokens and stale responses over the whole run.

    Attributes:
        wait_s: seconds without data to train on.
        num_syncs: number of publications.
        sync_total_s, sync_max_s: total and longest pause of a publication.
        trained_tokens: response tokens of all steps.
        staleness_counts: number of trained responses by staleness in steps.
    """

    wait_s: float = 0.0
    num_syncs: int = 0
    sync_total_s: float = 0.0
    sync_max_s: float = 0.0
    trained_tokens: int = 0
    staleness_counts: dict[int, int] = dataclasses.field(default_factory=dict)

    def add_sync(self, pause_s: float) -> None:
        """Count a publication that stopped the trainer for `pause_s`."""
        self.num_syncs += 1
        self.sync_total_s += pause_s
        self.sync_max_s = max(self.sync_max_s, pause_s)

    def state(self) -> PartState:
        """Return the counts, whose size does not grow with the steps."""
        staleness = sorted(self.staleness_counts.items())
        return PartState({}, {**vars(self), "staleness_counts": staleness})

    def restore(self, state: PartState) -> None:
        """Continue counting from a saved state."""
        vars(self).update(state.meta)
        self.staleness_counts = {int(k): int(v) for k, v in state.meta["staleness_counts"]}


MAX_NONFINITE_STEPS = 3
"""Number of consecutive steps with a non-finite loss or gradient after which the run ends."""


class Trainer:
    """Trainer of the policy: `step` trains one batch; the driver also calls `publish`.

    Args:
        state: initial or restored train state.
        train_step: return value of `make_train_step`, for a batch on the host.
        transport: destination of published weights.
        batches: source of plans and batches.
        clock: seconds since the run began.

    Attributes:
        version: newest published version.
        strata: metrics of the last step by staleness, with their names.
        shown: the first prompt of the last batch; None in processes that did not draw it.
    """

    def __init__(
        self,
        *,
        state: TrainState,
        train_step: Callable[
            [TrainState, Batch | PackedBatch], tuple[TrainState, dict[str, Array]]
        ],
        transport: Transport,
        batches: Batches,
        clock: Callable[[], float],
    ) -> None:
        self.state = state
        self.step_index = int(state.step)
        self.counters = Counters()
        self.version = self.step_index
        self.strata: dict[str, float] = {}
        self.shown: Shown | None = None
        self.plan = StepPlan(wait=True, stop=False, sync=False, save=False)
        self._train_step = train_step
        self._transport = transport
        self._batches = batches
        self._clock = clock
        self._waiting_since: float | None = None

    def publish(self) -> float:
        """Publish the current weights as this step's version; return the pause in seconds."""
        start = self._clock()
        self._transport.publish(self.step_index, self.state.params)
        self.version = self.step_index
        pause_s = self._clock() - start
        self.counters.add_sync(pause_s)
        return pause_s

    def step(self, wants_stop: Callable[[], bool] = lambda: False) -> dict[str, Any] | None:
        """Make one optimiser step; return None while the buffer has no data to train on.

        With several trainer processes, all must call this method; `plan` is the same in all.

        Args:
            wants_stop: whether this process received a stop signal; `plan.stop` tells all
                processes.

        Returns:
            Host metrics of the step; metrics of the data only in the process that draws.

        Raises:
            NonFiniteError: loss or gradient was nan or infinite in too many consecutive steps.
            PeerError: another trainer process does not reach this step in time.
        """
        start = self._clock()
        decision = self._batches.decide(
            self.step_index, wants_stop, lambda: self._transport.is_publishing
        )
        self.plan, batch, draws = decision
        if batch is None:
            if self._waiting_since is None:
                self._waiting_since = start
            return None
        waited = 0.0 if self._waiting_since is None else start - self._waiting_since
        self._waiting_since = None
        self.counters.wait_s += waited
        drawn_s = self._clock() - start
        self.state, metrics = self._train_step(self.state, batch)
        # One transfer for all metrics; it also waits for the step to finish.
        found = jax.device_get(metrics)
        self.strata = named_strata(found.pop(STRATA_KEY)) if STRATA_KEY in found else {}
        shown = found.pop(SHOWN_KEY, None)
        self.shown = Shown(draws[0], **shown) if shown and draws else None
        values = {k: float(v) for k, v in found.items()}
        end = self._clock()
        in_a_row = int(values.pop("train/skipped_in_a_row"))
        if in_a_row >= MAX_NONFINITE_STEPS:
            raise NonFiniteError(
                f"step {self.step_index}: loss {values['train/loss']}, gradient norm "
                f"{values['train/grad_norm']}: not finite in {in_a_row} consecutive steps. "
                "Lower --config.optimizer.learning_rate or raise --config.objective.beta, and "
                "start again with another --workdir, because the newest checkpoint may have "
                "diverged, too. If the objective is your own, look for a division by zero or a "
                "logarithm of zero"
            )
        step = self.step_index
        self.step_index += 1
        self.counters.trained_tokens += int(values["train/response_tokens"])
        values.update(
            {
                "train/wait_batch_s": waited,
                "train/draw_s": drawn_s,
                "train/step_s": end - start,
                "train/tokens_per_s": values["train/response_tokens"] / max(end - start, 1e-9),
                **(self._staleness_metrics(draws, step) if draws else {}),
                **self.strata,
            }
        )
        return values

    def _staleness_metrics(self, draws: Sequence[Draw], step: int) -> dict[str, Any]:
        staleness = np.repeat(
            [step - y.version_min for d in draws for y in d.trajectories],
            [weight for d in draws for weight in d.weights],
        )
        values, counts = np.unique(staleness, return_counts=True)
        known = self.counters.staleness_counts
        for value, count in zip(values.tolist(), counts.tolist(), strict=True):
            known[value] = known.get(value, 0) + count
        return {
            "buffer/staleness_mean": float(staleness.mean()),
            "buffer/staleness_max": int(staleness.max()),
            "buffer/staleness_histogram": [
                [int(v), int(c)] for v, c in zip(values, counts, strict=True)
            ],
            "buffer/fresh_fraction": float(np.mean([d.is_fresh for d in draws])),
            "buffer/repeat_fraction": sum(d.num_repeats for d in draws) / len(staleness),
        }
