# SPDX-License-Identifier: Apache-2.0
"""The searchers of a process whose owner is in another process.

A process that only searches reads published weights from storage; a trainer process of a pod also
searches, with the weights in its memory. Invariant: after a rewind no response and no weights of
the previous trainer are used (tests/integration/test_fleet.py).
"""

import contextlib
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Cluster
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.remote.channel import Rewind, RunEnded
from tba_jax.remote.client import Client
from tba_jax.run.shared import open_searchers
from tba_jax.search.searcher import POLL_S, Searcher, SearchParts, stop_workers
from tba_jax.weights.folder import StoredWeights
from tba_jax.weights.memory import DELIVERY_S, Weights

_LOOK_S = 0.5  # seconds between two looks of a process that waits for the end of the run


def search(
    identity: str,
    parts: Sequence[SearchParts],
    weights: StoredWeights | Weights,
    client: Client,
    wants_stop: Callable[[], bool] = lambda: False,
) -> None:
    """Search until the run ends.

    Args:
        identity: `Shared.identity`.
        wants_stop: returns whether this process received a stop signal, which is sent to the owner;
            may raise.

    Raises:
        PeerError: the owner refuses this process, or does not respond.
        WorkerError: a searcher failed.
    """
    while True:
        workers, failed = list[Worker](), StopFlag()

        def is_stopping(failed: StopFlag = failed) -> bool:
            failed.check()
            return wants_stop()

        try:
            client.join([each.index for each in parts], identity)
            weights.reset()
            client.on_versions = weights.announce
            searchers = [Searcher(each, client) for each in parts]
            pairs = [each.workers(failed) for each in searchers]
            workers = [worker for pair in pairs for worker in pair]
            workers.append(Worker("weight-reader", lambda: weights.poll(DELIVERY_S), failed))
            for worker in workers:
                worker.start()
            while True:
                for searcher, (decoding, _) in zip(searchers, pairs, strict=True):
                    client.beat(searcher.index, decoding.take_idle_s(), searcher.decode_counts())
                if not client.exchange(is_stopping):
                    is_stopping()
                    failed.wait(POLL_S)
        except RunEnded:
            return
        except Rewind as rewind:
            print(f"{client.host}: {rewind}", flush=True)
        finally:
            stop_workers(workers, failed)


def search_apart(
    config: Config,
    workdir: Path,
    searchers: Sequence[int],
    client: Client,
    cluster: Cluster,
    wants_stop: Callable[[], bool],
) -> None:
    """Search until the run ends, in a process of the job `cluster` that does not train.

    A process without searchers waits for the end, and reports its stop signals to the owner.
    """
    if not searchers:
        with contextlib.suppress(RunEnded):
            client.join((), "")
            while True:
                client.exchange(wants_stop)
                time.sleep(_LOOK_S)
        return
    shared, parts, weights = open_searchers(config, workdir, searchers, cluster)
    with contextlib.closing(shared):
        shared.check()
        search(shared.identity, parts, weights, client, wants_stop)
