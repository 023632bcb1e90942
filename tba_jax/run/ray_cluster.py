# SPDX-License-Identifier: Apache-2.0
"""The driver of a fleet: starts every process of a run, and restarts processes that die.

The driver holds the work directory, shows the trainer's progress, and owns all actors, so that they
end with the driver. A trainer that dies restarts from its newest checkpoint while searchers wait;
Ray restarts searchers on free machines. The driver computes nothing and uses no device.

Invariant: the death of a process prints one line. Repeated deaths without progress end the run with
the last cause.
"""

import contextlib
import dataclasses
import ipaddress
import logging
import os
import secrets
import signal
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.config.schema import Config, plain
from tba_jax.devices.cluster import PeerError
from tba_jax.devices.config import parse_resources
from tba_jax.devices.worker import StopFlag, Worker
from tba_jax.remote.bounded_clock import BoundedClock
from tba_jax.remote.channel import OWNER_TIMEOUT_S
from tba_jax.report.writers import ProgressDisplay
from tba_jax.run.errors import FleetError, UserError
from tba_jax.run.lock import Hold
from tba_jax.run.workdir import Outcome, run_id_of

_LOOK_S = 0.2  # seconds between two checks of all actors
_REMIND_S = 60.0  # seconds between two lines about a missing machine
_LOOPBACK = "RAY_ENABLE_WINDOWS_OR_OSX_CLUSTER"  # read by Ray when it is imported
_MAX_FAILURES = 5  # maximum number of failures of a process without progress
_AGAIN_S = 1.0  # seconds before a failed searcher is restarted
# Ray ends a process without an exception when the GCS has been away for 60 s.
GCS_TIMEOUT_S = 30.0
# A GCS of this machine that does not answer for this long and refuses connections has ended.
REFUSED_S = 6.0
_PERIOD_S = 2.0


def train_fleet(
    config: Config,
    workdir: Path,
    hold: Hold,
    *,
    interrupted: Callable[[], bool],
    display: ProgressDisplay,
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
    with _ray(config, display) as ray:
        fleet = _Fleet(ray, config, workdir, hold, display)
        try:
            return fleet.run(interrupted)
        finally:
            fleet.close()


def set_variables(address: str) -> None:
    """Set Ray's environment variables that are unset; call before Ray is imported.

    Args:
        address: address of the cluster, or "local".
    """
    if address == "local":
        # Makes 127.0.0.1 the address of the node, so that all of Ray listens on loopback.
        # `ray.init(_node_ip_address="127.0.0.1")` replaces it by that of a network interface.
        os.environ.setdefault(_LOOPBACK, "0")
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    # Ray gives workers the priority of background work (15): on a laptop with anything else to do a
    # step would take a minute. It reads this when it starts a cluster, not when it joins one.
    os.environ.setdefault("RAY_worker_niceness", "0")


@contextlib.contextmanager
def _ray(config: Config, display: ProgressDisplay) -> Iterator[Any]:
    """Connect to Ray, and keep the signal handlers of this process."""
    address = config.fleet.address
    set_variables(address)
    # Ray prints a paragraph for each dead process; the driver prints one line instead.
    os.environ.setdefault("RAY_DEDUP_LOGS_SKIP_REGEX", "A worker died or was killed")
    try:
        import ray
    except ImportError as error:
        raise UserError(
            "config.placement = 'fleet' needs Ray, which cannot be imported "
            f"({error}); install it with: pip install 'tba_jax[fleet]'"
        ) from error
    numbers = (signal.SIGINT, signal.SIGTERM)
    handlers = [signal.getsignal(number) for number in numbers]
    options: dict[str, Any] = {"address": address}
    if address == "local":
        # Ray counts processes, not cores, so that a laptop can run all of them.
        wanted = [_resources(config.fleet.trainer)] * config.fleet.trainer_hosts
        wanted += [_resources(config.fleet.searcher)] * num_hosts(config)
        cpus = sum(each.get("num_cpus", 0) for each in wanted)
        options |= {"num_cpus": max(1, round(cpus + 0.5)), "include_dashboard": False}
        options |= {"object_store_memory": 2**27}  # no messages use the object store
    # Ray inherits this setting: a closed terminal must not end its processes before the run is
    # saved.
    hangup = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        ray.init(log_to_driver=False, logging_level=logging.ERROR, **options)
    except Exception as error:  # raised where a node does not start in time
        first = (str(error).strip().splitlines() or [""])[0]
        why = (
            f"no Ray cluster there ({first:.200}); start one with `ray start --head`, or give local"
        )
        if address == "local":
            why = (
                f"Ray did not start on this machine ({first:.200}). Its logs are in "
                "/tmp/ray/session_latest/logs; if the machine was busy, run the same command again"
            )
        raise UserError(f"config.fleet.address = {address!r}: {why}") from error
    finally:
        signal.signal(signal.SIGHUP, hangup)
    try:
        for number, handler in zip(numbers, handlers, strict=True):
            if handler is not None:
                signal.signal(number, handler)
        host = ray.util.get_node_ip_address()
        if address == "local" and not ipaddress.ip_address(host).is_loopback:
            display.note(
                f"config.fleet.address = 'local': Ray listens on every interface, as {host}: it "
                f"was imported before {_LOOPBACK}=0 was set. Set this environment variable before "
                "Python starts"
            )
        yield ray
    finally:
        ray.shutdown()


def num_hosts(config: Config) -> int:
    """Return the maximum number of searcher processes."""
    return config.fleet.max_searchers // config.num_searchers


def _resources(text: str) -> dict[str, Any]:
    """Return resources as options of a Ray actor."""
    found = parse_resources(text)
    assert found is not None, "validated"
    options: dict[str, Any] = {
        "num_cpus": found.pop("CPU", 0.0),
        "num_gpus": found.pop("GPU", 0.0),
    }
    has_accelerator = options["num_gpus"] or "TPU" in found
    options["resources"] = found
    # An actor without a GPU resource sees all GPUs and would take their memory.
    variables = {} if has_accelerator else {"JAX_PLATFORMS": "cpu"}
    variables["TF_CPP_MIN_LOG_LEVEL"] = "2"
    options["runtime_env"] = {"env_vars": variables}
    return options


@dataclasses.dataclass
class _Searchers:
    """The driver's record of a searcher process."""

    name: str
    numbers: range
    handle: Any
    asked: Any = None  # pending request for the status of the process
    asked_at: float = 0.0
    num_lines: int = 0
    is_up: bool = False
    is_over: bool = False
    failures: int = 0
    reminded_at: float = 0.0


class _Fleet:
    """The actors of a run."""

    def __init__(
        self,
        ray: Any,
        config: Config,
        workdir: Path,
        hold: Hold,
        display: ProgressDisplay,
    ) -> None:
        from tba_jax.run.ray_actors import actor_classes, trainer_name

        self._ray = ray
        self._name_of, self._num_trainers = trainer_name, 0
        self._trainer_class, self._searcher_class = actor_classes()
        self._config = config
        self._workdir = workdir
        self._hold = hold
        self._display = display
        self._namespace = f"tba_jax-{run_id_of(workdir)}-{uuid.uuid4().hex[:8]}"
        self._fields = plain(config)
        self._token = secrets.token_hex(16)
        self._deaths = 0
        self._step = self._newest_step()
        self._is_interrupted = False
        self._stop = StopFlag()
        context, is_local = ray.get_runtime_context(), config.fleet.address == "local"
        self._machines = Machines(
            ray.nodes,
            context.get_node_id(),
            # The GCS of another cluster may restart within Ray's own deadline.
            is_refused=lambda: is_local and refuses_connections(context.gcs_address),
        )
        self._machines.start(self._stop)
        self._make_trainer()
        each = config.num_searchers
        self._searchers = [
            self._make_searchers(range(first, first + each))
            for first in range(0, config.fleet.max_searchers, each)
        ]

    def run(self, interrupted: Callable[[], bool]) -> Outcome:
        """Start and supervise the actors until the trainer has ended."""
        while True:
            number = len(self._running)
            done, _ = self._ray.wait(self._running, num_returns=number, timeout=_LOOK_S)
            self._relay()
            if done and (outcome := self._ended(done)) is not None:
                return outcome
            if interrupted() and not self._is_interrupted:
                self._is_interrupted = True
                self._trainer.interrupt.remote()
            self._hold.check()
            self._check_cluster()
            for searchers in self._searchers:
                self._look_at(searchers)

    def _check_cluster(self) -> None:
        """Show machines that joined or left.

        Raises:
            FleetError: the cluster has failed.
        """
        self._stop.check()
        for line in self._machines.changes():
            self._display.note(line)
        if why := self._machines.failure():
            address = self._config.fleet.address
            start = "" if address == "local" else "Start the cluster again (ray start --head). "
            raise FleetError(
                f"config.fleet.address = {address!r}: {why}. {start}The same command resumes from "
                f"the newest checkpoint{_at(self._newest_step())}"
            )

    def close(self) -> None:
        """End all processes."""
        self._stop.set()
        for handle in [*self._members, *(each.handle for each in self._searchers)]:
            self._ray.kill(handle)

    def _make_trainer(self) -> None:
        options = _resources(self._config.fleet.trainer)
        # A new name each time: Ray may keep the name of a dead actor for minutes.
        self._members = [
            self._trainer_class.options(
                name=self._name_of(self._num_trainers, member),
                namespace=self._namespace,
                max_restarts=0,
                **options,
            ).remote(
                self._fields,
                str(self._workdir),
                self._token if member == 0 else "",
                self._num_trainers,
            )
            for member in range(self._config.fleet.trainer_hosts)
        ]
        self._trainer = self._members[0]
        self._num_trainers += 1
        # Start only when all are placed: `jax.distributed` waits a few minutes only.
        placed = self._placed = [each.address.remote() for each in self._members]
        self._running = [each.run.remote(i, *placed) for i, each in enumerate(self._members)]
        self._asked: Any = None
        self._heard_at = self._reminded_at = self._made_at = time.monotonic()
        self._is_up = False
        self._shown = 0

    def _make_searchers(self, slots: range) -> _Searchers:
        options = _resources(self._config.fleet.searcher)
        name = f"searcher-{slots[0]}"
        handle = self._searcher_class.options(
            name=name,
            namespace=self._namespace,
            max_restarts=-1,
            max_task_retries=0,
            max_concurrency=2,
            **options,
        ).remote(self._fields, str(self._workdir), list(slots), self._namespace)
        return _Searchers(name, slots, handle, reminded_at=time.monotonic())

    def _relay(self) -> None:
        """Show the trainer's progress, and kill a trainer that has stopped responding."""
        if self._asked is None:
            self._asked = self._trainer.output.remote(self._shown)
        done, _ = self._ray.wait([self._asked], timeout=0)
        now = time.monotonic()
        number = len(self._placed)
        _, missing = self._ray.wait(self._placed, num_returns=number, timeout=0)
        if missing and now - self._reminded_at > _REMIND_S:
            self._reminded_at = now
            machines = "a machine" if len(missing) == 1 else f"{len(missing)} machines"
            self._display.note(
                f"the trainer waits for {machines} with {self._config.fleet.trainer} "
                f"(config.fleet.trainer), for {now - self._made_at:.0f} s now"
            )
        if not done:
            silent_s = now - self._heard_at
            if self._is_up and silent_s > OWNER_TIMEOUT_S:
                self._display.note(
                    f"the trainer has not answered for {silent_s:.0f} s and is killed"
                )
                self._heard_at = now
                self._kill_trainer()
            return
        asked, self._asked = self._asked, None
        with contextlib.suppress(self._ray.exceptions.RayActorError):  # reported by `_ended`
            text = self._ray.get(asked, timeout=_LOOK_S)
            self._heard_at, self._is_up = now, True
            self._shown += len(text)
            print(text, end="", flush=True)

    def _kill_trainer(self) -> None:
        """Kill all processes of the trainer, because a part of a trainer group cannot continue."""
        for each in self._members:
            self._ray.kill(each)

    def _ended(self, done: Sequence[Any]) -> Outcome | None:
        """Return the outcome of the trainer's first process, if the trainer has ended.

        Returns None if processes of the trainer still run, or if one died and all were restarted.

        Args:
            done: members of `_running` that have ended.
        """
        try:
            self._ray.get(list(done), timeout=_LOOK_S)
            if len(done) == len(self._running):
                return Outcome(**self._ray.get(self._running[0], timeout=_LOOK_S))
        except self._ray.exceptions.RayTaskError as error:
            lost = _cause(error)
            if not (isinstance(lost, self._ray.exceptions.RayActorError | PeerError)):
                raise lost from None
            self._again(lost)
        except self._ray.exceptions.RayActorError as error:
            self._again(error)
        return None

    def _again(self, error: BaseException) -> None:
        """Restart the trainer after one of its processes died."""
        self._kill_trainer()
        step = self._newest_step()
        self._deaths = 1 if step > self._step else self._deaths + 1
        self._step = step
        who = "the trainer" if len(self._members) == 1 else "a process of the trainer"
        if self._is_interrupted:
            raise FleetError(
                f"{who} died before it had saved; the same command resumes from the newest "
                f"checkpoint{_at(step)}"
            ) from error
        if self._deaths > _MAX_FAILURES:
            raise FleetError(
                f"{who} died {self._deaths} times without a checkpoint in between; "
                f"the last time: {_brief(error)}. The same command "
                "resumes"
            ) from error
        rest = "the trainer" if len(self._members) == 1 else "all processes of the trainer"
        self._display.note(
            f"{who} died ({_brief(error)}). Restarting {rest} from the newest checkpoint"
            f"{_at(step)}; searchers wait"
        )
        self._make_trainer()

    def _newest_step(self) -> int:
        """Return the step of the newest checkpoint on disk, -1 without one."""
        folder = self._workdir / "checkpoints"
        steps = [int(p.name) for p in folder.glob("*") if p.name.isdigit()]
        return max(steps, default=-1)

    def _look_at(self, searchers: _Searchers) -> None:
        """Print new lines of a searcher process, and restart the process if it failed."""
        now = time.monotonic()
        if searchers.is_over or now < searchers.asked_at:
            return
        if searchers.asked is None:
            searchers.asked = searchers.handle.status.remote(searchers.num_lines)
        done, _ = self._ray.wait([searchers.asked], timeout=0)
        if not done:
            if not searchers.is_up and now - searchers.reminded_at > _REMIND_S:
                searchers.reminded_at = now
                self._display.note(
                    f"{searchers.name} waits for a machine with {self._config.fleet.searcher} "
                    "(config.fleet.searcher)"
                )
            return
        asked, searchers.asked, searchers.asked_at = searchers.asked, None, now + _AGAIN_S
        try:
            end, lines = self._ray.get(asked, timeout=_LOOK_S)
        except self._ray.exceptions.RayTaskError as error:
            self._failed(searchers, str(_cause(error)))
            return
        except self._ray.exceptions.RayActorError as error:
            if searchers.is_up:
                self._display.note(
                    f"{searchers.name} died ({_brief(error)}). Ray restarts it on a free machine"
                )
                self._trainer.searchers_died.remote(list(searchers.numbers))
            searchers.is_up, searchers.num_lines, searchers.reminded_at = False, 0, now
            return
        searchers.is_up = True
        searchers.num_lines += len(lines)
        for line in lines:
            self._display.note(f"{searchers.name}: {line}")
        if end:
            searchers.is_over = True
            self._display.note(f"{searchers.name}: {end}")
            if all(each.is_over for each in self._searchers) and end.startswith("refused"):
                raise FleetError(f"the trainer refused all searchers. The last reason: {end}")

    def _failed(self, searchers: _Searchers, why: str) -> None:
        """Restart a searcher process whose code raised an error, a limited number of times."""
        searchers.failures += 1
        searchers.is_up, searchers.num_lines = False, 0
        if searchers.failures > _MAX_FAILURES:
            raise FleetError(
                f"{searchers.name} failed {searchers.failures} times; "
                f"the last time: {why}. Fix the cause, then run the same command again to resume"
            )
        self._display.note(f"{searchers.name} failed: {why}. Restarting it")
        self._trainer.searchers_died.remote(list(searchers.numbers))
        self._ray.kill(searchers.handle, no_restart=False)


def _cause(error: Any) -> BaseException:
    """Return the error that was raised in the actor."""
    cause = getattr(error, "cause", None)
    return cause if isinstance(cause, Exception) else error


def _brief(error: BaseException) -> str:
    """Return a short reason for the death of an actor; lost machines are left to `Machines`."""
    return "out of memory" if "out of memory" in str(error).lower() else "its process ended"


def _at(step: int) -> str:
    return f" (step {step})" if step >= 0 else " (there is none: from the start)"


class Machines:
    """Machines of a Ray cluster, polled on a thread, because Ray's call has no deadline.

    Ray reports late, or not at all, on which machine a process died, but its list of machines is
    current within seconds. Each machine that joins or leaves is reported once, in one line.

    Args:
        list_nodes: `ray.nodes`.
        own: Ray's ID of the node that this process belongs to.
        is_refused: returns whether the GCS has ended: it refuses connections and will not restart.
    """

    def __init__(
        self,
        list_nodes: Callable[[], Sequence[Mapping[str, Any]]],
        own: str,
        clock: Callable[[], float] = time.monotonic,
        is_refused: Callable[[], bool] = lambda: False,
    ) -> None:
        self._list_nodes = list_nodes
        self._own = own
        self._is_refused = is_refused
        self._time = BoundedClock(clock, max_jump_s=GCS_TIMEOUT_S / 4)
        self._lock = threading.Lock()
        self._alive: dict[str, str] | None = None  # node ID -> name, from the newest list
        self._lines: list[str] = []
        self._answered_s = self._time()

    def start(self, stop: StopFlag) -> None:
        """Poll until `stop` is set; `stop.check()` raises the exception of a failed call."""
        Worker("machines", self.poll, stop, idle_s=_PERIOD_S).start()

    def poll(self) -> bool:
        """Update the list of machines once."""
        alive = {
            str(node["NodeID"]): f"{node['NodeManagerHostname']}/{node['NodeID'][:6]}"
            for node in self._list_nodes()
            if node["Alive"]
        }
        with self._lock:
            before = alive if self._alive is None else self._alive
            self._lines += [
                f"machine {before[i]} has left the cluster" for i in before if i not in alive
            ]
            self._lines += [
                f"machine {alive[i]} has joined the cluster" for i in alive if i not in before
            ]
            self._alive, self._answered_s = alive, self._time()
        return False

    def changes(self) -> list[str]:
        """Return a line for each machine that joined or left since the last call."""
        with self._lock:
            lines, self._lines = self._lines, []
            return lines

    def failure(self) -> str:
        """Return why this process can no longer use the cluster; "" while it can."""
        with self._lock:
            silent_s = self._time() - self._answered_s
            is_dead = self._alive is not None and self._own not in self._alive
        if silent_s > GCS_TIMEOUT_S or (silent_s > REFUSED_S and self._is_refused()):
            return f"Ray's control service (GCS) has not answered for {silent_s:.0f} s"
        return "the Ray node of the driver (its raylet process) is dead" if is_dead else ""


def refuses_connections(address: str) -> bool:
    """Return whether no process listens at HOST:PORT."""
    host, _, port = address.rpartition(":")
    try:
        socket.create_connection((host.strip("[]"), int(port)), timeout=0.5).close()
    except ConnectionRefusedError:
        return True
    except OSError:
        pass  # a host that is not reachable for a moment does not refuse connections
    return False
