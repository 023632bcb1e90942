# SPDX-License-Identifier: Apache-2.0
"""The Worker contract: errors travel, stopping is prompt, idling is counted."""

import threading

import pytest

from tba_jax.devices.worker import StopFlag, Worker, WorkerError


def test_the_first_failure_stops_the_siblings_and_reaches_the_main_thread():
    stop = StopFlag()

    def step() -> bool:
        raise KeyError("lost prompt 17")

    sibling = Worker("sibling", lambda: True, stop).start()
    Worker("searcher-3", step, stop).start()
    assert stop.wait(5.0)
    stop.fail("searcher-1", ValueError("second"))
    with pytest.raises(WorkerError, match="searcher-3 failed: KeyError: 'lost prompt 17'") as info:
        stop.check()
    sibling.join(5.0)
    assert isinstance(info.value.__cause__, KeyError) and info.value.__cause__.__traceback__
    assert not sibling.is_alive()


def test_the_wait_for_a_step_that_hangs_has_an_end():
    stop, release = StopFlag(), threading.Event()
    worker = Worker("stuck", lambda: release.wait(20.0), stop).start()
    stop.set()
    worker.join(0.2)
    assert worker.is_alive()
    release.set()
    worker.join(5.0)
    assert not worker.is_alive()
