# SPDX-License-Identifier: Apache-2.0
"""Steps: decides every training step, and draws its batch, for all trainer processes.

With separate decisions, processes would diverge without an error: one process would save while
another trains and waits forever. So the first trainer process decides, and every other one requests
the decision. Invariant: every process receives the same bytes for a step, however often it requests
them (tests/remote/test_steps.py).
"""

import threading
from collections.abc import Callable, Sequence

from tba_jax.devices.cluster import PeerError
from tba_jax.flow.layout import RowLayout
from tba_jax.remote.messages import Decision, StepPlan, encode
from tba_jax.replay.buffer import ReplayBuffer

_LONG_POLL_S = 1.0  # longest wait of a request; the client then repeats it


class Steps:
    """Thread-safe source of plans and batches, in the process that has the replay buffer.

    Args:
        layout: layout of draws in a batch.
        num_steps: steps of the run.
        sync_period: steps between publications.
        checkpoint_period: steps between checkpoints; 0: no checkpoints.
        needs_versions: whether every version must be published; a publication then waits until the
            last version is written.
        processes: numbers of the other trainer processes.
        timeout_s: longest wait for the requests of these processes, in seconds.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        layout: RowLayout,
        *,
        num_steps: int,
        sync_period: int,
        checkpoint_period: int,
        needs_versions: bool = False,
        processes: Sequence[int] = (),
        timeout_s: float = 600.0,
    ) -> None:
        self._buffer, self._layout, self._num_steps = buffer, layout, num_steps
        self._sync_period, self._checkpoint_period = sync_period, checkpoint_period
        self._needs_versions, self._processes = needs_versions, list(processes)
        self._timeout_s, self._changed = timeout_s, threading.Condition()
        # Process -> its newest request: step, wants to stop, is publishing.
        self._requests: dict[int, tuple[int, bool, bool]] = {}
        self._decided, self._decision = -1, b""  # newest decided step, and its decision

    def decide(
        self, step: int, wants_stop: Callable[[], bool], is_publishing: Callable[[], bool]
    ) -> Decision:
        """Decide a step, and send the decision to the other trainer processes.

        A decision to wait for data is not sent.

        Args:
            step: number of completed steps.
            wants_stop: whether a process outside the trainer received a stop signal.
            is_publishing: whether this process still writes the last published weights.

        Raises:
            PeerError: another trainer process does not request this step in time.
        """
        decision = Decision(StepPlan(wait=True, stop=True))
        if not (wants_stop() or self.wants_stop):
            draws = self._buffer.draw(self._layout.num_prompts, self._layout.group_size, step)
            if draws is None:
                return Decision(StepPlan(wait=True))
            self._wait(step)
            done, period = step + 1, self._checkpoint_period
            is_busy = is_publishing() or any(busy for _, _, busy in self._requests.values())
            plan = StepPlan(
                sync=done % self._sync_period == 0 and done < self._num_steps,
                save=bool(period) and done % period == 0,
                publish=self._needs_versions or not is_busy,
            )
            decision = Decision(plan, self._layout.batch(draws, step), draws)
        self._wait(step)
        if self._processes:
            packed = encode(decision._replace(draws=()))
            with self._changed:
                self._decided, self._decision = step, packed
                self._changed.notify_all()
        return decision

    def request(self, process: int, step: int, wants_stop: bool, is_publishing: bool) -> bytes:
        """Wait a second for the decision on a step, for another trainer process.

        Args:
            wants_stop: whether the process received a stop signal.
            is_publishing: whether the process still writes the last published weights.

        Returns:
            The decision as bytes; b"" if there is none yet.

        Raises:
            ValueError: the process is not part of the job, or the step is over.
        """
        with self._changed:
            if process not in self._processes or step < self._decided:
                raise ValueError(
                    f"process {process} requests step {step}; the other trainer processes are "
                    f"{self._processes}, and the newest decision is of step "
                    f"{self._decided}. Stop all processes, and start each with the same command"
                )
            self._requests[process] = step, wants_stop, is_publishing
            self._changed.notify_all()
            # The next step is decided after this process has requested it.
            is_decided = self._changed.wait_for(lambda: self._decided >= step, _LONG_POLL_S)
            return self._decision if is_decided else b""

    @property
    def wants_stop(self) -> bool:
        """Whether another trainer process received a stop signal."""
        with self._changed:
            return any(wants_stop for _, wants_stop, _ in self._requests.values())

    def _wait(self, step: int) -> None:
        """Wait until every process has requested this step."""

        def missing() -> list[int]:
            done = {p for p, request in self._requests.items() if request[0] >= step}
            return [p for p in self._processes if p not in done]

        limit_s = self._timeout_s
        with self._changed:
            if not self._changed.wait_for(lambda: not missing(), limit_s):
                raise PeerError(
                    f"process(es) {', '.join(map(str, missing()))} did not request step {step} "
                    f"within {limit_s:.0f} s (config.log.watchdog_s). Look at their "
                    "output; the same command on every host resumes the run"
                )
