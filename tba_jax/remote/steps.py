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
from tba_jax.remote.messages import Plan, encode
from tba_jax.replay.buffer import ReplayBuffer

_LONG_POLL_S = 1.0  # longest wait of a request; the client then repeats it


class Steps:
    """Thread-safe source of plans and batches, in the process that has the replay buffer.

    Args:
        layout: layout of draws in a batch.
        num_steps: steps of the run.
        sync_period: steps between publications.
        checkpoint_period: steps between checkpoints; 0: no checkpoints.
        is_publishing: whether the last published weights are still being written. If so, the next
            publication is left out; None: every version is needed, and a publication waits.
        processes: numbers of the other trainer processes.
        timeout_s: longest wait for the requests of these processes, in seconds.

    Attributes:
        wants_stop: whether another trainer process received a stop signal.
    """

    def __init__(
        self,
        buffer: ReplayBuffer,
        layout: RowLayout,
        *,
        num_steps: int,
        sync_period: int,
        checkpoint_period: int,
        is_publishing: Callable[[], bool] | None = None,
        processes: Sequence[int] = (),
        timeout_s: float = 600.0,
    ) -> None:
        self.wants_stop = False
        self._buffer, self._layout, self._num_steps = buffer, layout, num_steps
        self._sync_period, self._checkpoint_period = sync_period, checkpoint_period
        self._is_publishing, self._timeout_s = is_publishing, timeout_s
        self._changed = threading.Condition()
        self._requested = dict.fromkeys(processes, -1)  # other process -> newest requested step
        self._decided, self._decision = -1, b""  # newest decided step, and its plan

    def decide(self, step: int, wants_stop: Callable[[], bool]) -> Plan:
        """Decide a step once every process has requested it, and send the plan to all.

        A decision to wait for data is not sent.

        Args:
            step: number of completed steps.
            wants_stop: whether a process outside the trainer received a stop signal.

        Raises:
            PeerError: another trainer process does not request this step in time.
        """
        with self._changed:
            if not self._changed.wait_for(lambda: not self._missing(step), self._timeout_s):
                raise PeerError(
                    f"process(es) {', '.join(map(str, self._missing(step)))} did not request step "
                    f"{step} within {self._timeout_s:.0f} s (config.log.watchdog_s). Look at their "
                    "output; the same command on every host resumes the run"
                )
        plan = Plan(stop=True)
        if not (wants_stop() or self.wants_stop):
            draws = self._buffer.draw(self._layout.num_prompts, self._layout.group_size, step)
            if draws is None:
                return Plan()
            done, period = step + 1, self._checkpoint_period
            plan = Plan(
                sync=done % self._sync_period == 0 and done < self._num_steps,
                save=bool(period) and done % period == 0,
                publish=self._is_publishing is None or not self._is_publishing(),
                batch=self._layout.batch(draws, step),
                draws=draws,
            )
        if self._requested:
            packed = encode(plan._replace(draws=()))
            with self._changed:
                self._decided, self._decision = step, packed
                self._changed.notify_all()
        return plan

    def _missing(self, step: int) -> list[int]:
        """Return the processes that have not requested this step."""
        return [process for process, newest in self._requested.items() if newest < step]

    def request(self, process: int, step: int, wants_stop: bool) -> bytes:
        """Wait a second for the plan of a step, for another trainer process.

        Args:
            wants_stop: whether the process received a stop signal.

        Returns:
            The plan as bytes; b"" if there is none yet.

        Raises:
            ValueError: the process is not part of the job, or the step is over.
        """
        with self._changed:
            if process not in self._requested or step < self._decided:
                raise ValueError(
                    f"process {process} requests step {step}; the other trainer processes are "
                    f"{[*self._requested]}, and the newest decision is of step "
                    f"{self._decided}. Stop all processes, and start each with the same command"
                )
            self._requested[process] = step
            self.wants_stop = self.wants_stop or wants_stop
            self._changed.notify_all()
            # The next step is decided after this process has requested it.
            is_decided = self._changed.wait_for(lambda: self._decided >= step, _LONG_POLL_S)
            return self._decision if is_decided else b""
