# SPDX-License-Identifier: Apache-2.0
"""The processes of a fleet as actors of Ray, and the line between them.

Actors only pass on: what they do is in `training` and `searching`. Nothing heavy is imported, and
no device touched, before an actor is asked to work. Invariant: no call waits without a deadline.
"""

import contextlib
import socket
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import ray
import ray.exceptions
import ray.util
from ml_collections import ConfigDict

from tba_jax.config.schema import Config, freeze
from tba_jax.devices.worker import StopFlag, Worker, WorkerError
from tba_jax.evaluation.evaluator import Part
from tba_jax.flow.rounds import RoundCommit
from tba_jax.run.fleet.link import Unreachable
from tba_jax.run.fleet.machines import machine_name
from tba_jax.run.fleet.messages import (
    RUN_ENDED,
    Answer,
    Caller,
    Hello,
    Vitals,
    Welcome,
    encode,
    encode_part,
)
from tba_jax.weights.stored import StoreError

_TRAINER = "trainer-"
_ENDED_S = 2.0  # between questions whether the run goes on after all


def trainer_name(number: int, member: int = 0) -> str:
    """Name of an actor of the trainer in the namespace of its driver.

    Args:
        number: of trainers that this driver made before.
        member: of a gang; searchers look for the first.
    """
    return f"{_TRAINER}{number}" if member == 0 else f"member-{number}-{member}"


_GONE = (
    ray.exceptions.RayActorError,
    ray.exceptions.GetTimeoutError,
    ray.exceptions.ObjectStoreFullError,
    ray.exceptions.OutOfMemoryError,
    ray.exceptions.RaySystemError,
)


def restored(fields: dict[str, Any]) -> Config:
    """A config that came as plain values, so that versions that differ can say so themselves."""
    return freeze(ConfigDict(fields))


class RayStore:
    """The object store of the cluster; who puts an object owns it, and it goes with its owner.

    Args:
        deadline_s: of a read.
    """

    def __init__(self, deadline_s: float) -> None:
        self._deadline_s = deadline_s

    def put(self, array: np.ndarray) -> Any:
        """A reference to a copy of it."""
        with _store_errors():
            return ray.put(array)

    def get(self, references: Sequence[Any]) -> list[np.ndarray]:
        """What they refer to, as views of the store."""
        with _store_errors():
            return ray.get(list(references), timeout=self._deadline_s)


@contextlib.contextmanager
def _store_errors() -> Iterator[None]:
    """What Ray raises, as a StoreError."""
    try:
        yield
    except ray.exceptions.RayError as error:
        raise StoreError(f"{type(error).__name__}: {_first_line(error):.200}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [""])[0]


class TrainerProcess:
    """`training.TrainerHost` in a process of its own."""

    def __init__(self, fields: dict[str, Any], workdir: str, accept_changed: list[str]) -> None:
        from tba_jax.run.fleet.training import TrainerHost

        config = restored(fields)
        store = RayStore(config.fleet.silence_s)
        self._host = TrainerHost(config, Path(workdir), accept_changed, store)

    @ray.method(concurrency_group="driver")
    def address(self) -> str:
        """HOST:PORT of this machine that is free at the moment."""
        with socket.socket() as probe:
            probe.bind(("", 0))
            return f"{ray.util.get_node_ip_address()}:{probe.getsockname()[1]}"

    @ray.method(concurrency_group="run")
    def run(self, number: int = 0, *addresses: str) -> dict[str, Any]:
        """`TrainerHost.run`.

        Args:
            number: of this member of a gang.
            addresses: of all members: Ray calls this when all of them are there.
        """
        return self._host.run(number, addresses[0] if addresses else "")._asdict()

    @ray.method(concurrency_group="searchers")
    def join(self, hello: Hello) -> tuple[Welcome, float]:
        """`TrainerHost.join`."""
        return self._host.join(hello)

    @ray.method(concurrency_group="searchers")
    def assign(self, caller: Caller, wanted: int, seen: int, vitals: Vitals) -> Answer:
        """`TrainerHost.assign`."""
        return self._host.assign(caller, wanted, seen, vitals)

    @ray.method(concurrency_group="searchers")
    def put(self, caller: Caller, data: bytes) -> Answer:
        """`TrainerHost.put`."""
        return self._host.put(caller, data)

    @ray.method(concurrency_group="searchers")
    def hand_in(self, caller: Caller, loan: tuple[int, int], data: bytes) -> Answer:
        """`TrainerHost.hand_in`."""
        return self._host.hand_in(caller, loan, data)

    @ray.method(concurrency_group="driver")
    def news(self, since: int) -> tuple[int, list[tuple[str, tuple[Any, ...]]]]:
        """`TrainerHost.news`."""
        return self._host.news(since)

    @ray.method(concurrency_group="driver")
    def interrupt(self) -> None:
        """`TrainerHost.interrupt`."""
        self._host.interrupt()


class RayLine:
    """Messages to the trainer's actor, whichever has its name now.

    Args:
        namespace: of the run.
        deadline_s: of a call.
    """

    def __init__(self, namespace: str, deadline_s: float) -> None:
        self._namespace = namespace
        self._deadline_s = deadline_s
        self._handle: Any = None

    def join(self, hello: Hello) -> tuple[Welcome, float]:
        """Be let in."""
        return self._call("join", hello)

    def assign(self, caller: Caller, wanted: int, seen: int, vitals: Vitals) -> Answer:
        """Ask for tickets."""
        return self._call("assign", caller, wanted, seen, vitals)

    def put(self, caller: Caller, commits: Sequence[RoundCommit]) -> Answer:
        """Bring what is finished."""
        return self._call("put", caller, encode(commits))

    def hand_in(self, caller: Caller, loan: tuple[int, int], part: Part | None) -> Answer:
        """Bring a part of an evaluation."""
        return self._call("hand_in", caller, loan, b"" if part is None else encode_part(part))

    def _call(self, method: str, *arguments: Any) -> Any:
        try:
            if self._handle is None:
                self._handle = self._newest()
            reference = getattr(self._handle, method).remote(*arguments)
            return ray.get(reference, timeout=self._deadline_s)
        except _GONE as error:
            self._handle = None
            raise Unreachable(f"{type(error).__name__}: {_first_line(error):.200}") from None
        except ValueError as error:
            if self._handle is not None:
                raise
            raise Unreachable("the trainer has just gone") from error

    def _newest(self) -> Any:
        """The trainer that was made last; the names of those that died may still be taken."""
        named: Any = ray.util.list_named_actors(all_namespaces=True)
        numbers = [
            int(each["name"].removeprefix(_TRAINER))
            for each in named
            if each["namespace"] == self._namespace and each["name"].startswith(_TRAINER)
        ]
        if not numbers:
            raise Unreachable("there is no trainer at the moment")
        return ray.get_actor(trainer_name(max(numbers)), namespace=self._namespace)


class SearcherProcess:
    """`searching.search` in a process of its own, begun again by itself when Ray restarts it."""

    def __init__(
        self, fields: dict[str, Any], workdir: str, slots: Sequence[int], namespace: str
    ) -> None:
        self._config = restored(fields)
        self._workdir, self._slots = Path(workdir), tuple(slots)
        self._line = RayLine(namespace, self._config.fleet.silence_s)
        self._lines: list[str] = []
        self._end = ""
        self._stop = StopFlag()
        Worker(f"fleet-{slots[0]}", self._search, self._stop).start()

    def _search(self) -> bool:
        from tba_jax.devices.program_cache import open_cache
        from tba_jax.run.fleet.searching import open_party, search
        from tba_jax.run.joining import start_cluster

        start_cluster(self._config)
        open_cache(self._config.compilation_cache)
        store = RayStore(self._config.fleet.silence_s)
        party = open_party(self._config, self._workdir, self._slots, store, lambda text: None)
        host = machine_name(socket.gethostname(), ray.get_runtime_context().get_node_id())
        try:
            self._end = self._until_dismissed(
                lambda: search(party, self._line, host, self._lines.append)
            )
        finally:
            party.shared.rewards.close()
        self._stop.set()
        return True

    def _until_dismissed(self, search: Callable[[], str]) -> str:
        """Why it may not search any more.

        That the run has ended is no reason: the trainer may die before it has saved, and then
        another one goes on. Who knows ends this process.
        """
        while (end := search()).endswith(RUN_ENDED):
            if end != RUN_ENDED:  # which it is told whenever it asks again
                self._lines.append(end)
            self._stop.wait(_ENDED_S)
        return end

    def status(self, since: int) -> tuple[str, list[str]]:
        """Why it has ended ("" while it goes on), and lines from number `since` on.

        Raises:
            WorkerError: it failed.
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
    """`TrainerProcess` and `SearcherProcess` as classes of actors."""
    remote: Any = ray.remote
    groups = {"run": 1, "searchers": 8, "driver": 2}
    return remote(concurrency_groups=groups)(TrainerProcess), remote(SearcherProcess)
