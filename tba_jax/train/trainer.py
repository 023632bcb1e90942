# SPDX-License-Identifier: Apache-2.0
"""The trainer: optimiser steps and publications.

A step is launched and its results are fetched later, so the next batch is drawn and laid out while
the devices work. The trainer owns the step counter. Invariant: published weights share no memory
with its state.
"""

import collections
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jaxtyping import Array

from tba_jax.flow.layout import Batch
from tba_jax.flow.trajectory import Draw
from tba_jax.train.metrics import Outputs, step_metrics
from tba_jax.train.state import TrainState
from tba_jax.weights.folder import WeightFolder
from tba_jax.weights.memory import Weights


class NonFiniteError(RuntimeError):
    """Too many consecutive steps had a non-finite loss or gradient."""


class Shown(NamedTuple):
    """One prompt of a batch, with log-probs of every token of its responses before the update.

    Attributes:
        draw: the prompt and its K responses.
        policy, reference: float32 [k t]; 0 at tokens that do not count.
    """

    draw: Draw
    policy: np.ndarray
    reference: np.ndarray


class Finished(NamedTuple):
    """A step whose results have arrived.

    Attributes:
        step: number of completed steps after it.
        values: its metrics; metrics of the draws only in the process that draws.
        shown: one prompt of its batch; None in processes that did not draw it.
    """

    step: int
    values: dict[str, Any]
    shown: Shown | None


class _Launched(NamedTuple):
    """A step whose results have not been fetched."""

    step: int
    batch: Batch
    draws: Sequence[Draw]
    outputs: dict[str, Any]
    waited_s: float
    draw_s: float
    start_s: float


MAX_NONFINITE_STEPS = 3
"""Number of consecutive steps with a non-finite loss or gradient after which the run ends."""

TrainStep = Callable[[TrainState, Batch], tuple[TrainState, dict[str, Any], Array | None]]
"""(state, batch on the host) -> (state, outputs, reference of the batch or None); returns before
the device has finished. The reference is there if the batch lacked log-probs of it."""

KeepReferences = Callable[[Sequence[Draw], Sequence[Sequence[np.ndarray]]], None]


class Trainer:
    """Trainer of the policy: `step` trains one batch; the driver also calls `publish`.

    Args:
        state: initial or restored train state.
        train_step: the step for a batch on the host.
        weights: destination of published weights.
        keep_references: stores log-probs of the reference with drawn responses: (draws, for each
            draw the log-probs of each response); None: they are not kept.
        clock: seconds since the run began.

    Attributes:
        step_index: number of launched steps.
        version: newest published version.
        wait_s: seconds without data to train on, since this process began.
        waiting_since: time at which a wait for data began; None while there is data.
    """

    def __init__(
        self,
        *,
        state: TrainState,
        train_step: TrainStep,
        weights: Weights | WeightFolder,
        keep_references: KeepReferences | None,
        clock: Callable[[], float],
    ) -> None:
        self.state = state
        self.step_index = int(state.step)
        self.wait_s = 0.0
        self.waiting_since: float | None = None
        self.version = self.step_index
        self._train_step = train_step
        self._weights = weights
        self._keep_references = keep_references
        self._clock = clock
        self._launched: list[_Launched] = []
        self._fetched_s = 0.0  # when the last results arrived

    def publish(self) -> float:
        """Publish the current weights as this step's version; return the pause in seconds."""
        start = self._clock()
        self._weights.publish(self.step_index, self.state.params)
        self.version = self.step_index
        return self._clock() - start

    def step(self, decide: Callable[[], tuple[Batch | None, Sequence[Draw]]]) -> bool:
        """Launch one optimiser step; return False if there is no batch to train on.

        With several trainer processes, all must call this method.

        Args:
            decide: returns the batch of this step, the same in all processes, and its draws; None
                without data.
        """
        start = self._clock()
        batch, draws = decide()
        if batch is None:
            if self.waiting_since is None:
                self.waiting_since = start
            return False
        waited_s = 0.0 if self.waiting_since is None else start - self.waiting_since
        self.waiting_since = None
        self.wait_s += waited_s
        launch_s = self._clock()
        self.state, outputs, reference = self._train_step(self.state, batch)
        self._launched.append(
            _Launched(self.step_index, batch, draws, outputs, waited_s, launch_s - start, launch_s)
        )
        self.step_index += 1
        if reference is not None and draws and self._keep_references is not None:
            # Ready before the update is: the next draw finds the log-probs in the buffer.
            pairs = zip(np.asarray(reference), draws, strict=True)
            found = [
                [
                    row[: len(y.response_tokens)]
                    for row, y in zip(rows, d.trajectories, strict=False)
                ]
                for rows, d in pairs
            ]
            self._keep_references(draws, found)
        return True

    def finished(self, *, pending: int = 0) -> list[Finished]:
        """Wait for the results of launched steps, except the last `pending`, and return them.

        Raises:
            NonFiniteError: loss or gradient was nan or infinite in too many consecutive steps.
        """
        found = []
        while len(self._launched) > pending:
            found.append(self._finish(self._launched.pop(0)))
        return found

    def _finish(self, launched: _Launched) -> Finished:
        outputs = Outputs(**jax.device_get(launched.outputs))  # one transfer; waits for the step
        end_s = self._clock()
        step_s = end_s - max(launched.start_s, self._fetched_s)
        self._fetched_s = end_s
        in_a_row = int(outputs.numbers["skipped_in_a_row"])
        if in_a_row >= MAX_NONFINITE_STEPS:
            loss, norm = (float(outputs.numbers[name]) for name in ("loss", "grad_norm"))
            raise NonFiniteError(
                f"step {launched.step}: loss {loss}, gradient norm {norm}: not finite in "
                f"{in_a_row} consecutive steps. Lower --config.optimizer.learning_rate or raise "
                "--config.objective.beta, and start again with another --workdir, because the "
                "newest checkpoint may have diverged, too. If the objective is your own, look for "
                "a division by zero or a logarithm of zero"
            )
        values: dict[str, Any] = step_metrics(launched.batch, outputs)
        del values["train/skipped_in_a_row"]
        tokens = values["train/response_tokens"]
        values |= {
            "train/wait_batch_s": launched.waited_s,
            "train/draw_s": launched.draw_s,
            "train/step_s": step_s,
            "train/tokens_per_s": tokens / max(step_s, 1e-9),
        }
        shown = Shown(launched.draws[0], **outputs.shown) if launched.draws else None
        values |= self._draw_metrics(launched.draws, launched.step) if launched.draws else {}
        return Finished(launched.step + 1, values, shown)

    def _draw_metrics(self, draws: Sequence[Draw], step: int) -> dict[str, Any]:
        """Return metrics of draws; those of staleness are of responses that a version sampled."""
        responses = [y for d in draws for y in d.trajectories]
        staleness = collections.Counter(
            step - y.version_min for y in responses if y.version_min >= 0
        )
        distinct = sum(len(set(d.ids)) for d in draws)
        mean = sum(x * n for x, n in staleness.items()) / max(1, staleness.total())
        return {
            "buffer/staleness_mean": mean,
            "buffer/staleness_max": max(staleness, default=0),
            "buffer/staleness_histogram": sorted(map(list, staleness.items())),
            "buffer/fresh_fraction": float(np.mean([d.is_fresh for d in draws])),
            "buffer/repeat_fraction": 1 - distinct / len(responses),
        }
