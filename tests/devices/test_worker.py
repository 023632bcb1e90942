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
        sibling.close(5.0)
    assert isinstance(info.value.__cause__, KeyError) and info.value.__cause__.__traceback__
    assert not sibling.is_alive()


def test_a_step_that_never_ends_is_reported_with_stacks(capfd):
    stop = StopFlag()
    release = threading.Event()

    def step() -> bool:
        release.wait(20.0)
        return True

    worker = Worker("stuck", step, stop).start()
    with pytest.raises(TimeoutError, match="worker stuck did not stop within 0 s"):
        worker.close(0.2)
    assert "in step" in capfd.readouterr().err
    release.set()


def test_a_worker_that_was_never_started_has_ended():
    """As the searchers of a run whose first publication fails: that is the news, not they."""
    stop = StopFlag()
    worker = Worker("searcher-0", lambda: True, stop)
    worker.join(1.0)
    stop.fail("compiler", ValueError("no room"))
    with pytest.raises(WorkerError, match="compiler failed: ValueError: no room"):
        worker.close(1.0)
