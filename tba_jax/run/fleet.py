# SPDX-License-Identifier: Apache-2.0
"""placement=fleet: Ray places, starts and restarts the processes of a run, and carries no messages.

The driver holds the work directory and owns all actors, so that they end with the driver. It
computes nothing and uses no device. A placement group reserves the trainer's resources, so that no
waiting searcher takes them while the trainer restarts. Ray restarts searchers that die; the driver
restarts the trainer from its newest checkpoint while searchers wait. Searchers find the trainer by
the addresses in WORKDIR/owner.json. Output reaches the driver through Ray's log forwarding.

Invariant: processes that fail repeatedly without a new checkpoint in between end the run with the
last cause; a return of the trainer clears the failures of searchers
(tests/run/test_fleet_actors.py).
"""

import contextlib
import functools
import logging
import math
import os
import secrets
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tba_jax.config.schema import Config
from tba_jax.devices.cluster import Address, PeerError, peer_errors
from tba_jax.devices.config import parse_resources
from tba_jax.devices.worker import StopFlag
from tba_jax.remote.channel import HEARTBEAT_S, Channel, ChannelServer, Endpoint, Unreachable
from tba_jax.remote.client import Client
from tba_jax.run.errors import RunError, UserError
from tba_jax.run.peers import connect, start_cluster
from tba_jax.storage.whole_files import read_json, write_json

OWNER = "owner.json"
"""File of the work directory with the addresses of the trainer."""
_LOOK_S = 0.2  # seconds between two checks of all actors
_ENDED_S = 2.0  # seconds between join requests after the end of the run
_MAX_FAILURES = 5  # failures of a process without a new checkpoint in between
_print = functools.partial(print, flush=True)


class TrainerProcess:
    """A trainer process as a Ray actor."""

    def __init__(self) -> None:
        self._interrupted = threading.Event()

    def address(self) -> str:
        """Return HOST:PORT of this machine with a free port."""
        import ray.util

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def run(
        self, config: Config, workdir: Path, token: str, number: int, *addresses: str
    ) -> dict[str, Any]:
        """Begin or continue the run; return its report.

        Args:
            number: number of this process in the trainer group; process 0 owns the buffer.
            addresses: addresses of all members; Ray waits for them before this call.

        Raises:
            PeerError: another process of the group ended.
        """
        start_s, server = time.perf_counter(), None
        from tba_jax.run.conduct import conduct

        if number == 0:
            server = ChannelServer(token, addresses[0].partition(":")[0])
            write_json(workdir / OWNER, {"address": server.endpoint.address})
        cluster = start_cluster(config, Address(addresses[0], len(addresses), number))
        link = connect(config, cluster, range(cluster.num_processes), server)
        options: Any = {"hold": None, "start_s": start_s, "link": link}
        with peer_errors(cluster):
            report = conduct(config, workdir, cluster, self._interrupted.is_set, **options)
        cluster.close()
        return report

    def interrupt(self) -> None:
        """Request a checkpoint after the current step, and the end of the process."""
        self._interrupted.set()


class SearcherProcess:
    """A process of searchers as a Ray actor; Ray runs `run` again when the process dies."""

    def run(self, config: Config, workdir: Path, token: str, searchers: range) -> None:
        """Search until the driver ends this process, or the trainer refuses it.

        After the end of the run this method waits and joins again: if the trainer dies before its
        last save, the next trainer needs the searchers.
        """
        from tba_jax.devices.platform import open_cache
        from tba_jax.run.search_process import search
        from tba_jax.run.shared import open_searchers

        def endpoint() -> Endpoint:
            try:
                return Endpoint(read_json(workdir / OWNER)["address"], token)
            except (OSError, ValueError) as error:
                raise Unreachable(f"no trainer has written {workdir / OWNER}") from error

        start_cluster(config)
        open_cache()
        shared, parts, weights = open_searchers(config, workdir, searchers)
        channel = Channel(endpoint, timeout_s=HEARTBEAT_S)
        name = f"{socket.gethostname()}/{os.getpid()}"
        # The driver decides how long searchers wait for a trainer.
        client = Client(channel, name, timeout_s=math.inf)
        with contextlib.closing(shared):
            while True:
                search(shared.identity, parts, weights, client)
                time.sleep(_ENDED_S)


def train_fleet(
    config: Config, workdir: Path, hold: StopFlag, *, interrupted: Callable[[], bool]
) -> dict[str, Any]:
    """Begin a run with placement=fleet, or continue the one in a folder that all machines see.

    Raises:
        UserError: Ray is not installed or not reachable.
        RunError: processes die without progress.
    """
    workdir, hosts = workdir.absolute(), config.fleet.trainer_hosts
    with connected(config) as ray:
        from ray.util.placement_group import placement_group

        _print(f"waiting for {hosts} x {config.fleet.trainer} for the trainer (fleet.trainer)")
        bundles = [parse_resources(config.fleet.trainer) or {}] * hosts
        fleet = Fleet(ray, config, workdir, placement_group(bundles, strategy="SPREAD"))
        try:  # Ray ends the actors with this connection
            while (report := fleet.look(interrupted())) is None:
                hold.check()
            return report
        finally:
            (workdir / OWNER).unlink(missing_ok=True)


@contextlib.contextmanager
def connected(config: Config) -> Iterator[Any]:
    """Connect to Ray, and keep the signal handlers of this process; raise UserError without Ray."""
    fleet = config.fleet
    options: dict[str, Any] = {"address": fleet.address, "logging_level": logging.ERROR}
    # Ray reads these variables when it is imported or starts a cluster.
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray would give workers the priority of background work (15): on a laptop with anything
        # else to do a step would take a minute.
        "RAY_worker_niceness": "0",
        # Ray would merge lines of several searchers that differ only in numbers.
        "RAY_DEDUP_LOGS": "0",
    }
    if fleet.address == "local":
        # Makes 127.0.0.1 the address of the node, so that all of Ray listens on loopback.
        # `ray.init(_node_ip_address="127.0.0.1")` replaces it by that of a network interface.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
        # Ray counts processes, not cores, so that a laptop can run all of them.
        cpus = fleet.trainer_hosts * _resources(fleet.trainer)["num_cpus"]
        num_processes = fleet.max_searchers // config.num_searchers
        cpus += num_processes * _resources(fleet.searcher)["num_cpus"]
        options |= {"num_cpus": max(1, math.ceil(cpus)), "include_dashboard": False}
        options |= {"object_store_memory": 2**27}  # no messages use the object store
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "config.placement = 'fleet' needs Ray, which cannot be imported "
            f"({error}); install it with: pip install 'tba_jax[fleet]'"
        ) from error
    # Ray replaces some handlers. Its processes inherit that SIGHUP is ignored: a closed terminal
    # must not end them before the run is saved.
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ray.init(**options)
    except Exception as error:  # raised where a node does not start in time
        first = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"config.fleet.address = {fleet.address!r}: Ray does not start ({first:.200}); its "
            "logs are in /tmp/ray/session_latest/logs. Start a cluster with `ray start --head`, or "
            "run the same command again if this machine was busy"
        ) from error
    finally:
        for number, handler in handlers.items():
            signal.signal(number, handler)
    try:
        yield ray
    finally:
        ray.shutdown()


def _resources(text: str) -> dict[str, Any]:
    """Return resources as options of a Ray actor."""
    found = parse_resources(text)
    assert found is not None, "validated"
    cpus, gpus = found.pop("CPU", 0.0), found.pop("GPU", 0.0)
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2", "COLUMNS": "1000"}  # do not wrap lines of the log
    if not (gpus or "TPU" in found):
        # An actor without a GPU resource sees all GPUs and would take their memory.
        variables["JAX_PLATFORMS"] = "cpu"
    runtime = {"env_vars": variables}
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": found, "runtime_env": runtime}


class Fleet:
    """The actors of a run."""

    def __init__(self, ray: Any, config: Config, workdir: Path, group: Any) -> None:
        self._ray, self._config, self._workdir, self._group = ray, config, workdir, group
        self._arguments = (config, workdir, secrets.token_hex(16))  # of every process
        self._is_interrupted = False
        self._failures = Counter[tuple[str, int]]()  # by process and step of the newest checkpoint
        self._trainers: list[Any] = []  # actors; empty until the placement group is ready
        self._training: list[Any] = []  # calls of `run` of the trainers
        self._searching: dict[Any, tuple[Any, range]] = {}  # call of `run` -> actor, searchers

    def look(self, is_interrupted: bool) -> dict[str, Any] | None:
        """Wait a moment, and restart processes that ended; return the report of a run that ended.

        Raises:
            RunError: processes fail without progress, or the trainer died after an interruption.
        """
        if not self._trainers:
            if is_interrupted:
                raise RunError("stopped before a machine for the trainer was free")
            if self._group.wait(_LOOK_S):
                self._start_trainer()
                self._start_searchers()
            return None
        if is_interrupted and not self._is_interrupted:
            self._is_interrupted = True
            self._trainers[0].interrupt.remote()
        calls, errors = [*self._training, *self._searching], self._ray.exceptions
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=_LOOK_S)
        for call in done:
            try:
                self._ray.get(call)
            except (errors.RayTaskError, errors.RayActorError) as error:
                cause = getattr(error, "cause", error)  # the error that was raised in the actor
                if call in self._searching:
                    self._restart_searchers(call, cause)
                elif isinstance(cause, errors.RayActorError | PeerError):
                    self._restart_trainer(cause)
                    return None
                else:
                    raise cause from None
        return self._ray.get(self._training[0]) if {*self._training} <= {*done} else None

    def _start_trainer(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        fleet, place = self._config.fleet, PlacementGroupSchedulingStrategy
        options = {"max_concurrency": 4, **_resources(fleet.trainer)}
        actor = self._ray.remote(TrainerProcess)
        self._trainers = [
            actor.options(scheduling_strategy=place(self._group, member), **options).remote()
            for member in range(fleet.trainer_hosts)
        ]
        # Run only when all are placed: `jax.distributed` waits a few minutes only.
        addresses = [each.address.remote() for each in self._trainers]
        self._training = [
            each.run.remote(*self._arguments, number, *addresses)
            for number, each in enumerate(self._trainers)
        ]

    def _start_searchers(self) -> None:
        actor = self._ray.remote(SearcherProcess).options(
            max_restarts=-1, max_task_retries=-1, **_resources(self._config.fleet.searcher)
        )
        each = self._config.num_searchers
        for first in range(0, self._config.fleet.max_searchers, each):
            self._search(actor.remote(), range(first, first + each))

    def _search(self, handle: Any, searchers: range) -> None:
        call = handle.run.remote(*self._arguments, searchers)
        self._searching[call] = handle, searchers

    def _restart_searchers(self, call: Any, cause: BaseException) -> None:
        """Restart a process of searchers whose code raised an error; Ray restarts dead ones."""
        handle, searchers = self._searching.pop(call)
        why = f"{type(cause).__name__}: {cause}"
        name = f"the process of searchers {searchers[0]} to {searchers[-1]}"
        self._count_failure(name, why)
        _print(f"{name} failed: {why}. Restarting it")
        self._ray.kill(handle, no_restart=False)
        self._search(handle, searchers)

    def _restart_trainer(self, cause: BaseException) -> None:
        """Restart all trainer processes after one of them died."""
        for each in self._trainers:
            self._ray.kill(each)
        why = "out of memory" if "out of memory" in str(cause).lower() else "its process ended"
        step = self._count_failure("the trainer", why)
        at = f"the newest checkpoint (step {step})" if step >= 0 else "the start"
        if self._is_interrupted:
            raise RunError(
                f"the trainer died before it had saved; the same command resumes from {at}"
            ) from cause
        # Searchers may have failed because the trainer was away.
        self._failures = Counter({k: n for k, n in self._failures.items() if k[0] == "the trainer"})
        _print(f"the trainer died ({why}). Restarting the trainer from {at}; searchers wait")
        self._start_trainer()

    def _count_failure(self, name: str, why: str) -> int:
        """Count a failure; return the step of the newest checkpoint or -1, or raise RunError."""
        names = (path.name for path in (self._workdir / "checkpoints").glob("*"))
        step = max((int(name) for name in names if name.isdigit()), default=-1)
        self._failures[name, step] += 1
        if (times := self._failures[name, step]) > _MAX_FAILURES:
            raise RunError(
                f"{name} failed {times} times without a checkpoint in between; the last time: "
                f"{why}. Fix the cause, then run the same command again to resume"
            )
        return step
