# SPDX-License-Identifier: Apache-2.0
"""The searchers of a process whose owner is in another process.

A process that only searches reads published weights from storage; a trainer process of a pod also
searches, with the weights in its memory. Invariant: after a rewind no response and no weights of
the previous trainer are used (tests/integration/test_fleet.py).
"""

import time
from collections.abc import Callable, Iterable

from tba_jax.devices.cluster import CONTINUE, PeerError
from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.remote.channel import Refused, Rewind, RunEnded, Unreachable
from tba_jax.remote.client import HEARTBEAT_PERIOD_S, Client
from tba_jax.remote.messages import Heartbeat
from tba_jax.run.shared import Shared
from tba_jax.search.searcher import Searcher, SearchParts
from tba_jax.weights.folder import StoredWeights
from tba_jax.weights.memory import DELIVERY_S, Weights

POLL_S = 0.002
"""Sleep of a thread that has nothing to do."""
_STOP_S = 10.0  # time that threads get to end their current step
_CHECK_S = 0.1  # seconds between two checks whether a worker has failed
_JOIN_RETRY_S = 0.5  # seconds between two join requests to a trainer that does not respond


def search_workers(searcher: Searcher, stop: StopFlag) -> tuple[Worker, Worker]:
    """Return the two workers of a searcher: decoding and grading."""
    return (
        Worker(f"searcher-{searcher.index}", searcher.step, stop, idle_s=POLL_S),
        Worker(f"grader-{searcher.index}", searcher.grade, stop, idle_s=POLL_S),
    )


def stop_workers(workers: Iterable[Worker], stop: StopFlag) -> None:
    """Stop workers; give them a short time to end their current step."""
    stop.set()
    deadline = time.monotonic() + _STOP_S
    for worker in workers:
        worker.join(max(0.0, deadline - time.monotonic()))


def search(
    shared: Shared,
    parts: tuple[SearchParts, ...],
    weights: StoredWeights | Weights,
    client: Client,
    *,
    stop: StopFlag,
    wants_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Search until the run ends, or `stop` is set.

    Args:
        parts: parts of each searcher.
        weights: source of the weights that the searchers sample with.
        wants_stop: returns whether this process received a stop signal; sent to the owner.

    Raises:
        PeerError: the owner refuses this process, or does not respond.
        WorkerError: a searcher failed.
    """

    def search_once() -> None:
        client.join([each.index for each in parts], shared.identity)
        weights.reset()
        _search_once(parts, weights, client, stop, wants_stop)

    _repeat(search_once, client, stop)


def wait_for_end(client: Client) -> None:
    """Wait until the run ends, in a process without searchers.

    Raises:
        PeerError: the owner does not respond.
    """
    stop = StopFlag()

    def look() -> None:
        client.join((), "")
        stop.wait(_JOIN_RETRY_S)

    _repeat(look, client, stop)


def _repeat(work: Callable[[], None], client: Client, stop: StopFlag) -> None:
    """Call a function that joins the owner, until the run ends or `stop` is set."""
    last_s = time.monotonic()
    while not stop.is_set():
        try:
            work()
        except RunEnded:
            return  # the trainer still computes final results; this process has no more work
        except Rewind as rewind:
            client.log(str(rewind))
        except Refused as error:
            raise PeerError(f"{client.host} may not search: {error}") from error
        except Unreachable as error:
            if time.monotonic() - last_s > client.timeout_s:
                raise PeerError(
                    f"the trainer has not responded for {client.timeout_s:.0f} s ({error}). "
                    f"{CONTINUE}"
                ) from error
            stop.wait(_JOIN_RETRY_S)
            continue
        last_s = time.monotonic()


def _search_once(
    parts: tuple[SearchParts, ...],
    weights: StoredWeights | Weights,
    client: Client,
    outer: StopFlag,
    wants_stop: Callable[[], bool],
) -> None:
    """Run the searchers until the client raises an error, or `outer` is set."""
    stop = StopFlag()
    client.on_versions = weights.announce
    searchers = [Searcher(each, client) for each in parts]
    pairs = [search_workers(each, stop) for each in searchers]

    def beat() -> bool:
        for searcher, (decoding, _) in zip(searchers, pairs, strict=True):
            counts = searcher.decode_counts()
            client.beat(searcher.index, Heartbeat(decoding.idle_total_s, counts, wants_stop()))
        return False

    workers = [
        *(worker for pair in pairs for worker in pair),
        Worker("weight-reader", lambda: weights.poll(DELIVERY_S), stop),
        Worker("heartbeat", beat, stop, idle_s=HEARTBEAT_PERIOD_S / 4),
    ]
    for worker in workers:
        worker.start()
    try:
        while not stop.wait(_CHECK_S) and not outer.is_set():
            pass
        stop.check()
    except WorkerError as error:
        if isinstance(error.__cause__, Rewind | RunEnded | Refused):
            raise error.__cause__ from None
        raise
    finally:
        stop_workers(workers, stop)
