# SPDX-License-Identifier: Apache-2.0
"""The processes of a fleet as Ray actors.

Ray starts and restarts the processes, and gives searchers the address of the trainer's channel
server; searchers send their messages over that channel. Large modules are imported, and devices
are used, only when an actor begins to work.
"""

import io
import socket
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import ray
import ray.exceptions
import ray.util

from tba_jax.config.schema import freeze
from tba_jax.devices.cluster import peer_errors
from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.remote.channel import HEARTBEAT_S, Channel, Endpoint, Unreachable
from tba_jax.remote.messages import RUN_ENDED
from tba_jax.remote.search_channel import RemoteOwner
from tba_jax.run.peers import OwnerServer, connect, start_cluster

_TRAINER = "trainer-"
_ENDED_S = 2.0  # seconds between join requests after the end of the run


class TrainerProcess:
    """A trainer process of a fleet, as a Ray actor; `run` returns when the run ends.

    Args:
        fields: config of the run as plain values.
        token: bearer token of the run's channel; "" in processes that do not own the buffer.
        num_restarts: how often the driver has restarted the trainer.
    """

    def __init__(
        self,
        fields: dict[str, Any],
        workdir: str,
        token: str,
        num_restarts: int = 0,
    ) -> None:
        self._config = config = freeze(fields)
        self._workdir = Path(workdir)
        self._output = io.StringIO()  # lines for the driver
        self._interrupted = threading.Event()
        self._server: OwnerServer | None = None
        if token:
            self._server = OwnerServer(
                config,
                token,
                is_local=config.fleet.address == "local",
                trainers=range(1, config.fleet.trainer_hosts),
                num_restarts=num_restarts,
            )

    @ray.method(concurrency_group="driver")
    def address(self) -> str:
        """Return HOST:PORT of this machine with a free port."""
        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    @ray.method(concurrency_group="run")
    def run(self, number: int, *addresses: str) -> dict[str, Any]:
        """Begin or continue the run; return its outcome.

        Args:
            number: number of this process in the trainer group.
            addresses: addresses of all members; Ray waits for them before this call.

        Raises:
            PeerError: another process of the group ended.
        """
        start_s = time.perf_counter()
        from rich.console import Console

        from tba_jax.run.conduct import conduct, make_display

        cluster = start_cluster(self._config, addresses[0], len(addresses), number)
        with peer_errors(cluster):
            link = connect(self._config, cluster, range(cluster.num_processes), self._server)
            outcome = conduct(
                self._config,
                self._workdir,
                cluster,
                self._interrupted.is_set,
                hold=None,
                start_s=start_s,
                display=make_display(self._config, start_s, Console(file=self._output)),
                link=link,
            )
        cluster.close()
        return outcome._asdict()

    @ray.method(concurrency_group="driver")
    def endpoint(self) -> Endpoint:
        """Return the endpoint of the owner."""
        assert self._server is not None, "searchers ask the owner of the buffer"
        return self._server.endpoint

    @ray.method(concurrency_group="driver")
    def output(self, since: int) -> str:
        """Return the whole lines of the output after this number of characters."""
        text = self._output.getvalue()
        return text[since : text.rfind("\n") + 1]

    @ray.method(concurrency_group="driver")
    def searchers_died(self, searchers: Sequence[int]) -> None:
        """Count these searchers as lost; do nothing while the trainer starts."""
        if self._server is not None and self._server.owner is not None:
            self._server.owner.lose(searchers)

    @ray.method(concurrency_group="driver")
    def interrupt(self) -> None:
        """Request a checkpoint after the current step, and the end of the process."""
        self._interrupted.set()


def trainer_name(number: int, member: int = 0) -> str:
    """Return the name of a trainer actor in the namespace of its driver.

    Args:
        number: number of trainers that this driver started before.
        member: number of the process in the trainer group; searchers connect to process 0.
    """
    return f"{_TRAINER}{number}" if member == 0 else f"member-{number}-{member}"


_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.GetTimeoutError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.RaySystemError,
)


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


class TrainerLocator:
    """Locator of the endpoint of a run's newest trainer, also after a restart.

    Args:
        namespace: Ray namespace of the run.
        timeout_s: longest wait for Ray.
    """

    def __init__(self, namespace: str, timeout_s: float) -> None:
        self._namespace = namespace
        self._timeout_s = timeout_s

    def __call__(self) -> Endpoint:
        """Return the endpoint; raise Unreachable while no trainer runs."""
        try:
            reference = self._newest().endpoint.remote()
            return Endpoint(*ray.get(reference, timeout=self._timeout_s))
        except _GONE as error:
            raise Unreachable(f"{type(error).__name__}: {_first_line(error):.200}") from None
        except ValueError as error:
            raise Unreachable("the trainer's process has just ended") from error

    def _newest(self) -> Any:
        """Return the trainer that was started last; Ray may still list names of dead trainers."""
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        numbers = [
            int(each["name"].removeprefix(_TRAINER))
            for each in named
            if each["namespace"] == self._namespace and each["name"].startswith(_TRAINER)
        ]
        if not numbers:
            raise Unreachable("no trainer is running")
        return ray.get_actor(trainer_name(max(numbers)), namespace=self._namespace)


class SearcherProcess:
    """`search_process.search` as a Ray actor; Ray restarts the process when it dies."""

    def __init__(
        self, fields: dict[str, Any], workdir: str, searchers: Sequence[int], namespace: str
    ) -> None:
        self._config = freeze(fields)
        self._workdir, self._searchers = Path(workdir), tuple(searchers)
        locator = TrainerLocator(namespace, HEARTBEAT_S)
        self._owner = RemoteOwner(Channel(locator, timeout_s=HEARTBEAT_S))
        self._lines: list[str] = []
        self._end = ""
        self._stop = StopFlag()
        Worker(f"fleet-{searchers[0]}", self._search, self._stop).start()

    def _search(self) -> bool:
        from tba_jax.devices.program_cache import open_cache
        from tba_jax.run.search_process import open_search_process, search

        start_cluster(self._config)
        open_cache()
        process = open_search_process(
            self._config, self._workdir, self._searchers, lambda text: None
        )
        # The name that `Machines` uses, because one host can have several nodes.
        host = f"{socket.gethostname()}/{ray.get_runtime_context().get_node_id()[:6]}"
        try:
            self._end = self._until_dismissed(
                lambda: search(process, self._owner, host, self._lines.append)
            )
        finally:
            process.shared.rewards.close()
        self._stop.set()
        return True

    def _until_dismissed(self, search: Callable[[], str]) -> str:
        """Search until the owner dismisses this process, and return the reason.

        When the owner reports the end of the run, this method waits and searches again. If the
        trainer dies before its last save, the next trainer needs the searchers. Otherwise the
        driver kills this process.
        """
        while (end := search()).endswith(RUN_ENDED):
            if end != RUN_ENDED:  # also the response to every later join request
                self._lines.append(end)
            self._stop.wait(_ENDED_S)
        return end

    def status(self, since: int) -> tuple[str, list[str]]:
        """Return why the process has ended ("" while it searches) and lines from `since` on.

        Raises:
            WorkerError: the search failed.
        """
        try:
            self._stop.check()
        except WorkerError as error:
            cause = error.__cause__
            while isinstance(cause, WorkerError) and cause.__cause__ is not None:
                cause = cause.__cause__
            raise RuntimeError(f"{type(cause).__name__}: {cause}") from None
        return self._end, self._lines[since:]


def actor_classes() -> tuple[Any, Any]:
    """Return `TrainerProcess` and `SearcherProcess` as Ray actor classes."""
    remote: Any = ray.remote
    groups = {"run": 1, "driver": 4}
    return remote(concurrency_groups=groups)(TrainerProcess), remote(SearcherProcess)
