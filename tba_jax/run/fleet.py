# SPDX-License-Identifier: Apache-2.0
"""placement=fleet: Ray places, starts and restarts the processes of a run, and carries no messages.

The driver holds the work directory and owns all actors, so that they end with the driver. It
computes nothing and uses no device. A placement group reserves the trainer's resources, so that no
waiting searcher takes them while the trainer restarts. Ray restarts searchers that die; the driver
restarts the trainer from its newest checkpoint while searchers wait. Searchers find the trainer by
the addresses in WORKDIR/owner.json. Output reaches the driver through Ray's log forwarding.

Invariant: processes that fail repeatedly without a new checkpoint in between end the run with the
last cause (tests/run/test_fleet_actors.py).
"""

import contextlib
import logging
import math
import os
import secrets
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from tba_jax.config.schema import Config, freeze, plain
from tba_jax.devices.cluster import Address, PeerError, peer_errors
from tba_jax.devices.config import parse_resources
from tba_jax.devices.worker import StopFlag
from tba_jax.remote.channel import HEARTBEAT_S, Channel, Endpoint, Unreachable
from tba_jax.remote.client import Client
from tba_jax.run.errors import FleetError, UserError
from tba_jax.run.lock import Hold
from tba_jax.run.peers import OwnerServer, connect, start_cluster
from tba_jax.run.workdir import Outcome
from tba_jax.storage.whole_files import read_json, write_json

OWNER = "owner.json"
"""File of the work directory with the addresses of the trainer."""
_LOOK_S = 0.2  # seconds between two checks of all actors
_REMIND_S = 60.0  # seconds between two lines about a missing machine
_ENDED_S = 2.0  # seconds between join requests after the end of the run
_MAX_FAILURES = 5  # failures of a process without a new checkpoint in between


class TrainerProcess:
    """A trainer process as a Ray actor; `run` returns the outcome when the run ends.

    Args:
        fields: config of the run as plain values.
        token: bearer token of the run's channel.
        num_restarts: how often the driver has restarted the trainer.
    """

    def __init__(self, fields: dict[str, Any], workdir: str, token: str, num_restarts: int) -> None:
        self._config, self._workdir = freeze(fields), Path(workdir)
        self._token, self._num_restarts = token, num_restarts
        self._interrupted = threading.Event()

    def address(self) -> str:
        """Return HOST:PORT of this machine with a free port."""
        import ray.util

        host = ray.util.get_node_ip_address()
        with socket.socket() as probe:
            probe.bind((host, 0))
            return f"{host}:{probe.getsockname()[1]}"

    def run(self, number: int, *addresses: str) -> dict[str, Any]:
        """Begin or continue the run.

        Args:
            number: number of this process in the trainer group; process 0 owns the buffer.
            addresses: addresses of all members; Ray waits for them before this call.

        Raises:
            PeerError: another process of the group ended.
        """
        start_s = time.perf_counter()
        from rich.console import Console

        from tba_jax.run.conduct import conduct

        config, server = self._config, None
        if number == 0:
            is_local = config.fleet.address == "local"
            server = OwnerServer(self._token, is_local=is_local, num_restarts=self._num_restarts)
            write_json(self._workdir / OWNER, {"addresses": server.endpoint.addresses})
        cluster = start_cluster(config, Address(addresses[0], len(addresses), number))
        with peer_errors(cluster):
            outcome = conduct(
                config,
                self._workdir,
                cluster,
                self._interrupted.is_set,
                hold=None,
                start_s=start_s,
                console=Console(
                    file=sys.stdout,
                    force_terminal=False,
                    highlight=False,
                    quiet=number > 0,
                    width=1000,
                ),
                link=connect(config, cluster, range(cluster.num_processes), server),
            )
        cluster.close()
        return outcome._asdict()

    def interrupt(self) -> None:
        """Request a checkpoint after the current step, and the end of the process."""
        self._interrupted.set()


class SearcherProcess:
    """A process of searchers as a Ray actor; Ray runs `run` again when the process dies."""

    def __init__(
        self, fields: dict[str, Any], workdir: str, searchers: list[int], token: str
    ) -> None:
        self._config, self._workdir = freeze(fields), Path(workdir)
        self._searchers, self._token = searchers, token

    def run(self) -> None:
        """Search until the driver ends this process.

        After the end of the run this method waits and joins again: if the trainer dies before its
        last save, the next trainer needs the searchers.

        Raises:
            PeerError: the trainer refuses this process.
        """
        from tba_jax.devices.program_cache import open_cache
        from tba_jax.run.search_process import open_search_process, search

        start_cluster(self._config)
        open_cache()
        process = open_search_process(self._config, self._workdir, self._searchers)
        channel = Channel(self._endpoint, timeout_s=HEARTBEAT_S)
        name = f"{socket.gethostname()}/{os.getpid()}"
        # The driver decides how long searchers wait for a trainer.
        client = Client(channel, name, timeout_s=math.inf, log=_print)
        try:
            while True:
                search(process, client, StopFlag())
                time.sleep(_ENDED_S)
        finally:
            process.shared.rewards.close()

    def _endpoint(self) -> Endpoint:
        try:
            return Endpoint(tuple(read_json(self._workdir / OWNER)["addresses"]), self._token)
        except (OSError, ValueError) as error:
            raise Unreachable(f"no trainer has written {self._workdir / OWNER}") from error


def _print(line: str) -> None:
    print(line, flush=True)


class Failures:
    """Counter of the failures of a process since the run's newest checkpoint.

    Args:
        newest_step: returns the step of the newest checkpoint; -1 without one.
    """

    def __init__(self, newest_step: Callable[[], int]) -> None:
        self._newest_step = newest_step
        self._step, self._count = newest_step(), 0

    def add(self, name: str, why: str) -> None:
        """Count a failure.

        Raises:
            FleetError: too many failures without progress.
        """
        step = self._newest_step()
        self._count = 1 if step > self._step else self._count + 1
        self._step = step
        if self._count > _MAX_FAILURES:
            raise FleetError(
                f"{name} failed {self._count} times without a checkpoint in between; the last "
                f"time: {why}. Fix the cause, then run the same command again to resume"
            )


def train_fleet(
    config: Config, workdir: Path, hold: Hold, *, interrupted: Callable[[], bool]
) -> Outcome:
    """Begin a run with placement=fleet, or continue the run in the work directory.

    Args:
        workdir: work directory, visible on all machines.
        interrupted: returns True if the run must stop; an interrupted run can be continued.

    Raises:
        UserError: Ray is not installed or not reachable.
        FleetError: processes die without progress.
    """
    workdir = workdir.absolute()
    with connected(config) as ray:
        fleet = _Fleet(ray, config, workdir)
        is_interrupted = False
        try:  # Ray ends the actors with this connection
            while (outcome := fleet.look()) is None:
                hold.check()
                if interrupted() and not is_interrupted:
                    is_interrupted = True
                    fleet.interrupt()
            return outcome
        finally:
            (workdir / OWNER).unlink(missing_ok=True)


@contextlib.contextmanager
def connected(config: Config) -> Iterator[Any]:
    """Connect to Ray, and keep the signal handlers of this process.

    Raises:
        UserError: Ray is not installed, or does not start.
    """
    address = config.fleet.address
    # Ray reads these variables when it is imported or starts a cluster.
    variables = {
        "RAY_USAGE_STATS_ENABLED": "0",
        # Ray gives workers the priority of background work (15): on a laptop with anything else to
        # do a step would take a minute.
        "RAY_worker_niceness": "0",
        # Ray would merge lines of several searchers that differ only in numbers.
        "RAY_DEDUP_LOGS": "0",
    }
    if address == "local":
        # Makes 127.0.0.1 the address of the node, so that all of Ray listens on loopback.
        # `ray.init(_node_ip_address="127.0.0.1")` replaces it by that of a network interface.
        variables["RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"] = "0"
    for name, value in variables.items():
        os.environ.setdefault(name, value)
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "config.placement = 'fleet' needs Ray, which cannot be imported "
            f"({error}); install it with: pip install 'tba_jax[fleet]'"
        ) from error
    options: dict[str, Any] = {"address": address}
    remedy = "start one with `ray start --head`, or give local"
    if address == "local":
        # Ray counts processes, not cores, so that a laptop can run all of them.
        trainers = _resources(config.fleet.trainer)["num_cpus"] * config.fleet.trainer_hosts
        num_processes = config.fleet.max_searchers // config.num_searchers
        cpus = trainers + _resources(config.fleet.searcher)["num_cpus"] * num_processes
        options |= {"num_cpus": max(1, round(cpus + 0.5)), "include_dashboard": False}
        options |= {"object_store_memory": 2**27}  # no messages use the object store
        remedy = (
            "Ray's logs are in /tmp/ray/session_latest/logs; if the machine was busy, run the same "
            "command again"
        )
    handlers = {n: signal.getsignal(n) for n in (signal.SIGINT, signal.SIGTERM)}
    # Ray inherits this setting: a closed terminal must not end its processes before the run is
    # saved.
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ray.init(logging_level=logging.ERROR, **options)
    except Exception as error:  # raised where a node does not start in time
        first = (str(error).strip().splitlines() or [""])[0]
        raise UserError(
            f"config.fleet.address = {address!r}: Ray does not start ({first:.200}); {remedy}"
        ) from error
    finally:
        signal.signal(signal.SIGHUP, hangup)
    try:
        for number, handler in handlers.items():
            signal.signal(number, handler)
        yield ray
    finally:
        ray.shutdown()


def _resources(text: str) -> dict[str, Any]:
    """Return resources as options of a Ray actor."""
    found = parse_resources(text)
    assert found is not None, "validated"
    cpus, gpus = found.pop("CPU", 0.0), found.pop("GPU", 0.0)
    variables = {"TF_CPP_MIN_LOG_LEVEL": "2"}
    if not (gpus or "TPU" in found):
        # An actor without a GPU resource sees all GPUs and would take their memory.
        variables["JAX_PLATFORMS"] = "cpu"
    runtime = {"env_vars": variables}
    return {"num_cpus": cpus, "num_gpus": gpus, "resources": found, "runtime_env": runtime}


class _Fleet:
    """The actors of a run."""

    def __init__(self, ray: Any, config: Config, workdir: Path) -> None:
        from ray.util.placement_group import placement_group

        self._ray, self._config, self._workdir = ray, config, workdir
        self._token, self._num_trainers = secrets.token_hex(16), 0
        bundle = parse_resources(config.fleet.trainer)
        assert bundle is not None, "validated"
        self._group = placement_group([bundle] * config.fleet.trainer_hosts, strategy="SPREAD")
        self._is_interrupted, self._reminded_at = False, time.monotonic()
        self._members: list[Any] = []  # empty until the placement group is ready
        self._running: list[Any] = []  # calls of `run` of the members
        self._deaths = Failures(self._newest_step)
        self._searchers: dict[Any, tuple[Any, Failures]] = {}  # call of `run` -> actor, failures

    def look(self) -> Outcome | None:
        """Wait a moment, and restart processes that ended; return the outcome of a finished run.

        Raises:
            FleetError: processes fail without progress, or the trainer died after an interruption.
        """
        if not self._members:
            self._place()
            return None
        errors = self._ray.exceptions
        number = len(self._running)
        done, _ = self._ray.wait(self._running, num_returns=number, timeout=_LOOK_S)
        try:
            self._ray.get(done)
            if len(done) == number:
                return Outcome(**self._ray.get(self._running[0]))
        except (errors.RayTaskError, errors.RayActorError) as error:
            cause = _cause(error)
            if not isinstance(cause, errors.RayActorError | PeerError):
                raise cause from None
            self._restart(cause)
        calls = [*self._searchers]
        done, _ = self._ray.wait(calls, num_returns=len(calls), timeout=0)
        for call in done:
            self._search_again(call)
        return None

    def interrupt(self) -> None:
        """Request a checkpoint and the end of the trainer."""
        self._is_interrupted = True
        if not self._members:
            raise FleetError("stopped before a machine for the trainer was free")
        self._members[0].interrupt.remote()

    def _place(self) -> None:
        """Start the processes once the trainer's resources are reserved."""
        fleet, each = self._config.fleet, self._config.num_searchers
        if self._group.wait(_LOOK_S):
            self._start_trainer()
            for first in range(0, fleet.max_searchers, each):
                self._start_searchers(range(first, first + each))
        elif time.monotonic() - self._reminded_at > _REMIND_S:
            self._reminded_at = time.monotonic()
            wanted = f"{fleet.trainer_hosts} x {fleet.trainer}"
            _print(f"the trainer waits for {wanted} (config.fleet.trainer)")

    def _start_trainer(self) -> None:
        from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

        actor = self._ray.remote(max_concurrency=4)(TrainerProcess)
        self._members = [
            actor.options(
                max_restarts=0,
                scheduling_strategy=PlacementGroupSchedulingStrategy(self._group, member),
                **_resources(self._config.fleet.trainer),
            ).remote(plain(self._config), str(self._workdir), self._token, self._num_trainers)
            for member in range(self._config.fleet.trainer_hosts)
        ]
        self._num_trainers += 1
        # Run only when all are placed: `jax.distributed` waits a few minutes only.
        addresses = [each.address.remote() for each in self._members]
        self._running = [each.run.remote(i, *addresses) for i, each in enumerate(self._members)]

    def _start_searchers(self, numbers: range) -> None:
        actor = self._ray.remote(SearcherProcess).options(
            max_restarts=-1, max_task_retries=-1, **_resources(self._config.fleet.searcher)
        )
        fields, workdir = plain(self._config), str(self._workdir)
        handle = actor.remote(fields, workdir, list(numbers), self._token)
        self._searchers[handle.run.remote()] = handle, Failures(self._newest_step)

    def _restart(self, error: BaseException) -> None:
        """Restart all trainer processes after one of them died."""
        for each in self._members:
            self._ray.kill(each)
        step = self._newest_step()
        at = f"(step {step})" if step >= 0 else "(there is none: from the start)"
        if self._is_interrupted:
            raise FleetError(
                f"the trainer died before it had saved; the same command resumes from the newest "
                f"checkpoint {at}"
            ) from error
        why = "out of memory" if "out of memory" in str(error).lower() else "its process ended"
        self._deaths.add("the trainer", why)
        _print(
            f"the trainer died ({why}). Restarting the trainer from the newest checkpoint {at}; "
            "searchers wait"
        )
        self._start_trainer()

    def _search_again(self, call: Any) -> None:
        """Restart a process of searchers whose code raised an error.

        Ray itself restarts a process that died.
        """
        handle, failures = self._searchers.pop(call)
        try:
            self._ray.get(call)
        except self._ray.exceptions.RayTaskError as error:
            why = f"{type(_cause(error)).__name__}: {_cause(error)}"
            failures.add("a process of searchers", why)
            _print(f"a process of searchers failed: {why}. Restarting it")
            self._ray.kill(handle, no_restart=False)
        self._searchers[handle.run.remote()] = handle, failures

    def _newest_step(self) -> int:
        """Return the step of the newest checkpoint on disk, -1 without one."""
        folder = self._workdir / "checkpoints"
        return max((int(x.name) for x in folder.glob("*") if x.name.isdigit()), default=-1)


def _cause(error: Any) -> BaseException:
    """Return the error that was raised in the actor."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error
