# SPDX-License-Identifier: Apache-2.0
"""StepPlan: the decision on a step that all trainer processes follow.

With separate decisions, processes would diverge without an error: one process would save while
another trains and waits forever. So the process with the replay buffer decides each step and draws
its batch; the other processes receive both. Invariant: every trainer process has the same plan and
the same batch for a step.
"""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from tba_jax.flow.array_bytes import pack_arrays, unpack_arrays
from tba_jax.flow.layout import Batch, RowLayout
from tba_jax.flow.trajectory import Draw
from tba_jax.replay.buffer import ReplayBuffer


class StepPlan(NamedTuple):
    """Decision on one step, the same for every trainer process.

    Attributes:
        wait: whether to wait for more data instead of making this step.
        stop: whether this step is the last; with `wait`, the previous step was the last.
        sync: whether to merge, and publish if `publish` is set, after this step.
        save: whether to write a checkpoint after this step.
        publish: whether a sync publishes. While a process still writes the last version, this is
            False unless every version is needed.
    """

    wait: bool
    stop: bool
    sync: bool
    save: bool
    publish: bool = True


class Decision(NamedTuple):
    """Plan and batch of a step, as a trainer process receives them.

    Attributes:
        plan: decision on the step.
        batch: batch to train on; None if the plan waits.
        draws: draws in the batch; empty in processes that did not draw the batch.
    """

    plan: StepPlan
    batch: Batch | None = None
    draws: Sequence[Draw] = ()


Decide = Callable[[int, Callable[[], bool], Callable[[], bool]], Decision]
"""(step, wants_stop, is_publishing) -> decision on a step.

`step` is the number of completed steps. The others return whether this process received a stop
signal, and whether it still writes the last published weights."""


class Peers(Protocol):
    """The other trainer processes, as seen by the process that decides."""

    @property
    def wants_stop(self) -> bool:
        """Whether another process received a stop signal."""
        ...

    @property
    def is_publishing(self) -> bool:
        """Whether another process still writes published weights."""
        ...

    def wait(self, step: int) -> None:
        """Wait until all other processes are ready for this step."""
        ...

    def answer(self, step: int, decision: Decision) -> None:
        """Send the decision on a step to the other processes."""
        ...


@dataclasses.dataclass(frozen=True)
class OwnBatches:
    """Batches from this process's replay buffer, and decisions for all trainer processes.

    Args:
        layout: layout of draws in a batch.
        num_steps: steps of the run.
        sync_period: steps between publications.
        checkpoint_period: steps between checkpoints; 0: no checkpoints.
        needs_versions: whether every version must be published; a publication then waits until the
            last version is written.
        peers: the other trainer processes; None: there is no other.
    """

    buffer: ReplayBuffer
    layout: RowLayout
    num_steps: int
    sync_period: int
    checkpoint_period: int
    needs_versions: bool = False
    peers: Peers | None = None

    def decide(
        self, step: int, wants_stop: Callable[[], bool], is_publishing: Callable[[], bool]
    ) -> Decision:
        """Return the decision on a step, see `Decide`.

        Raises:
            PeerError: another trainer process does not reach this step in time.
        """
        peers = self.peers
        stops = wants_stop() or (peers is not None and peers.wants_stop)
        draws = self.buffer.draw(self.layout.num_prompts, self.layout.group_size, step)
        is_decided = draws is not None or stops
        if peers is not None and is_decided:
            peers.wait(step)
            stops = stops or peers.wants_stop
        done, period = step + 1, self.checkpoint_period
        is_busy = is_publishing() or (peers is not None and peers.is_publishing)
        plan = StepPlan(
            wait=draws is None,
            stop=stops,
            sync=done % self.sync_period == 0 and done < self.num_steps,
            save=bool(period) and done % period == 0,
            publish=self.needs_versions or not is_busy,
        )
        decision = Decision(plan)
        if draws is not None:
            decision = Decision(plan, self.layout.batch(draws, step), draws)
        if peers is not None and is_decided:
            peers.answer(step, decision)
        return decision


def received(receive: Callable[[int, Callable[[], tuple[bool, bool]]], bytes]) -> Decide:
    """Return decisions that arrive from the process that owns the replay buffer.

    With them `plan.wait` is True only if the run stops before the step.

    Args:
        receive: (step, facts) -> bytes of `pack_decision`; `facts` returns (wants_stop,
            is_publishing).
    """
    return lambda step, wants_stop, is_publishing: unpack_decision(
        receive(step, lambda: (wants_stop(), is_publishing()))
    )


def pack_decision(decision: Decision) -> bytes:
    """Return a decision as bytes: its plan and its batch."""
    batch = decision.batch
    arrays = {} if batch is None else {n: x for n, x in batch._asdict().items() if x is not None}
    return pack_arrays(arrays, {"plan": decision.plan})


def unpack_decision(data: bytes) -> Decision:
    """Return the decision that `pack_decision` converted, without its draws.

    Raises:
        ValueError: the bytes are damaged.
    """
    arrays, meta = unpack_arrays(data)
    return Decision(StepPlan(*meta["plan"]), Batch(**arrays) if arrays else None)
