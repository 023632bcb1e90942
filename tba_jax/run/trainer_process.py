# SPDX-License-Identifier: Apache-2.0
"""The trainer of a fleet in a process that Ray started, or one process of a trainer group."""

import threading
import time
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import Any

from tba_jax.config.resolved import has_trainer_group
from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Address, Cluster, peer_errors, start
from tba_jax.remote.channel import Endpoint
from tba_jax.report.relay import Relay
from tba_jax.run.workdir import Outcome


class TrainerHost:
    """The trainer's process; `run` returns when the run ends.

    Args:
        config: validated.
        workdir: claimed by the driver.
        accept_changed: as in `conduct`.
        token: bearer token of the run's channel; "" in processes that do not own the buffer.
        num_restarts: trainers of this run that its driver has replaced.
    """

    def __init__(
        self,
        config: Config,
        workdir: Path,
        accept_changed: Collection[str],
        token: str,
        num_restarts: int = 0,
    ) -> None:
        from tba_jax.run.peers import Owner

        self._config = config
        self._workdir = workdir
        self._accept_changed = accept_changed
        self._relay = Relay()
        self._interrupted = threading.Event()
        self._owner: Owner | None = None
        if token:
            self._owner = Owner(
                config,
                token,
                is_local=config.fleet.address == "local",
                trainers=range(1, config.fleet.trainer_hosts),
                num_restarts=num_restarts,
            )

    @property
    def endpoint(self) -> Endpoint:
        """Where searchers reach the search server."""
        assert self._owner is not None, "searchers ask the owner of the buffer"
        return self._owner.endpoint

    def run(self, number: int = 0, coordinator: str = "") -> Outcome:
        """Begin or continue the run.

        Args:
            number: of this process in the trainer group.
            coordinator: HOST:PORT where the processes of a trainer group meet.

        Raises:
            PeerError: another process of the group is gone. Else what `conduct` raises.
        """
        start_s = time.perf_counter()
        from tba_jax.run.conduct import conduct
        from tba_jax.run.joining import start_cluster
        from tba_jax.run.peers import connect

        if has_trainer_group(self._config):
            cluster = join_group(self._config, coordinator, number)
        else:
            cluster = start_cluster(self._config)
        with peer_errors(cluster):
            link = connect(self._config, cluster, range(cluster.num_processes), self._owner)
            outcome = conduct(
                self._config,
                self._workdir,
                cluster,
                self._interrupted.is_set,
                hold=None,
                accept_changed=self._accept_changed,
                start_s=start_s,
                display=self._relay,
                link=link,
            )
        cluster.close()
        return outcome

    def news(self, since: int) -> tuple[int, list[tuple[str, tuple[Any, ...]]]]:
        """Return what the driver shows; see `Relay.since`."""
        return self._relay.since(since)

    def searchers_died(self, searchers: Sequence[int]) -> None:
        """Count these searchers as lost; a trainer that is starting has none."""
        if self._owner is not None and self._owner.search_server is not None:
            self._owner.search_server.lose_host(searchers)

    def interrupt(self) -> None:
        """Save after the current step and end."""
        self._interrupted.set()


def join_group(config: Config, coordinator: str, number: int) -> Cluster:
    """Join the other processes of a trainer group; before the first use of a device.

    Args:
        config: of the run.
        coordinator: HOST:PORT, of the first process.
        number: of this process, from 0.

    Raises:
        PeerError: the other processes do not join.
    """
    return start(
        Address(coordinator, config.fleet.trainer_hosts, number),
        num_cpu_devices=config.num_cpu_devices,
        heartbeat_s=config.pod.heartbeat_s,
        shutdown_s=int(config.log.watchdog_s),
    )
