# SPDX-License-Identifier: Apache-2.0
"""Publish and fetch of versioned policy weights: the one channel from trainer to searchers.

A publication is an immutable `(version, params)` pair in the rollout dtype. It is never an alias of
train state, whose buffers the next donated train step deletes. Two transports give searchers the
same `latest()`: in memory, and through Orbax checkpoints in the work directory. Its invariant: a
reader sees a complete version or the one before.
"""

import json
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from etils import epath

from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models.trees import check_same_tree


class PublicationError(RuntimeError):
    """Weights could not be written; the message says which and what to do."""


class Published(NamedTuple):
    """Weights as searchers see them: the trainer step of publication, and the params."""

    version: int
    params: Any


class Transport(Protocol):
    """What trainer and searchers need of a weight channel."""

    def publish(self, version: int, params: Any) -> None:
        """Make `params` the newest version; returns when the source may be donated."""
        ...

    def latest(self, reader: int) -> Published | None:
        """Newest complete version, on that reader's devices; None before the first one.

        Readers are this process's searchers, counted from 0.
        """
        ...

    def poll(self) -> bool:
        """Move a newly completed version to the searchers; True when there was one."""
        ...

    def close(self) -> None:
        """Finish what is under way."""
        ...


Layout = Callable[[Any], Any]


def make_publish_program(
    dtype: jnp.dtype, layout: Layout | None = None, out_shardings: Any = None
) -> Callable[[Any], Any]:
    """Jitted copy and cast of a params tree to the rollout dtype, in the layout readers want.

    `jnp.copy` is what makes it a copy: a jitted identity returns its input buffers, which the next
    donated train step deletes.

    Args:
        dtype: rollout dtype.
        layout: as the readers want the tree; None: as it is.
        out_shardings: of its result on the devices of the params, a tree; None: XLA's choice.
    """

    def program(params: Any) -> Any:
        # Cast last: layers cut out of a cast stack would need the whole stack in both dtypes.
        arranged = params if layout is None else layout(params)
        return jax.tree.map(lambda x: jnp.copy(x.astype(dtype)), arranged)

    return jax.jit(program, out_shardings=out_shardings)


class MemoryTransport:
    """Weights handed over inside one process.

    Args:
        dtype: rollout dtype.
        shardings: for each searcher a tree of shardings in the readers' layout, or one; None where
            the publish program leaves the weights where the searcher wants them.
        layout: what readers want the tree to look like (the decoder wants layers apart); None: as
            the trainer has it.
        published: a tree of shardings on the trainer's devices, in which the publish program
            leaves its copy; None: XLA's choice.
        site: the trainer's devices.
    """

    def __init__(
        self,
        dtype: jnp.dtype,
        shardings: Sequence[Any],
        layout: Layout | None = None,
        published: Any = None,
        site: Site = ANY_DEVICE,
    ) -> None:
        self._program = site.in_turn(make_publish_program(dtype, layout, published))
        self._shardings = list(shardings)
        self._lock = threading.Lock()
        self._published: list[Published] | None = None

    def publish(self, version: int, params: Any) -> None:
        """Copy, cast, move to each searcher's devices, wait until ready, swap.

        Raises:
            ValueError: when the tree differs from the version before.
        """
        self.put(version, self._program(params))

    def put(self, version: int, params: Any) -> None:
        """Swap in params that already are a copy in the rollout dtype and the readers' layout."""
        delivered: list[Any] = []
        for i, wanted in enumerate(self._shardings):
            first = self._shardings.index(wanted)  # searchers on the same devices share one copy
            if first < i:
                delivered.append(delivered[first])
            else:
                delivered.append(params if wanted is None else hand_over(params, wanted))
        # A searcher must never adopt arrays that are still being computed: its thread would wait
        # on the device inside a round, where nobody counts the wait.
        jax.block_until_ready(delivered)
        with self._lock:
            if self._published is not None:
                check_same_tree(self._published[0].params, params)
            self._published = [Published(version, x) for x in delivered]

    def latest(self, reader: int) -> Published | None:
        """Newest version on that reader's devices."""
        with self._lock:
            return None if self._published is None else self._published[reader]

    def poll(self) -> bool:
        """Nothing to move: publication is complete when `publish` returns."""
        return False

    def close(self) -> None:
        """Nothing is under way."""


class CheckpointTransport:
    """Weights handed over as versioned Orbax checkpoints under WORKDIR/weights.

    The trainer writes `weights/<version>` asynchronously and then names it in `versions.json`, the
    completion marker. Whoever drives `poll` (a worker thread beside asynchronous searchers, the
    synchronous driver itself) restores the newest named version into an in-memory mailbox; searcher
    threads never call Orbax.

    Args:
        workdir: the run's directory.
        keep: versions kept on disk, at least 2 (one may be being read while one is written).
        dtype, shardings, layout, published, site: as MemoryTransport; files have the trainer's
            layout.
    """

    def __init__(
        self,
        workdir: str,
        *,
        keep: int,
        dtype: jnp.dtype,
        shardings: Sequence[Any],
        layout: Layout | None = None,
        published: Any = None,
        site: Site = ANY_DEVICE,
    ) -> None:
        self._folder = epath.Path(workdir) / "weights"
        self._folder.mkdir(parents=True, exist_ok=True)
        self._marker = epath.Path(workdir) / "versions.json"
        self._keep = keep
        self._program = site.in_turn(make_publish_program(dtype))
        # With a layout only: without one the copy that was restored already is what readers want.
        self._layout: Layout = lambda params: params
        if layout is not None:
            self._layout = site.in_turn(jax.jit(layout, out_shardings=published))
        self._mailbox = MemoryTransport(dtype, shardings)
        self._writer = ocp.AsyncCheckpointer(ocp.StandardCheckpointHandler())
        self._reader = ocp.Checkpointer(ocp.StandardCheckpointHandler())
        self._abstract: Any = None
        self._in_flight: int | None = None
        self._reading: int | None = None
        self._left_over: list[int] = []
        self._lock = threading.Lock()  # guards _in_flight: trainer publishes, poller completes

    def publish(self, version: int, params: Any) -> None:
        """Copy and cast, then write in the background; waits only for the save before this one.

        Raises:
            PublicationError: when storage refuses.
        """
        copied = self._program(params)
        jax.block_until_ready(copied)
        with self._lock:
            self._complete()
            if self._abstract is None:
                self._abstract = jax.tree.map(
                    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), copied
                )
            check_same_tree(self._abstract, copied)
            self._guard(
                f"publishing weights {self._folder / str(version)}",
                lambda: self._writer.save(
                    self._folder / str(version), args=ocp.args.StandardSave(copied), force=True
                ),
            )
            self._in_flight = version

    def _complete(self) -> None:
        """Wait for the save under way, then mark it complete and drop old versions."""
        if self._in_flight is None:
            return
        self._guard(
            f"publishing weights {self._folder / str(self._in_flight)}",
            self._writer.wait_until_finished,
        )
        versions = [v for v in self._marked() if v != self._in_flight] + [self._in_flight]
        versions, old = versions[-self._keep :], versions[: -self._keep]

        def mark() -> None:
            temporary = self._marker.with_suffix(".tmp")
            temporary.write_text(json.dumps({"versions": versions, "time": time.time()}))
            temporary.replace(self._marker)

        self._guard(f"publishing weights {self._folder / str(self._in_flight)}", mark)
        stale = [*old, *self._left_over]
        # On slow storage the version being read may be `keep` behind; it goes at the next turn.
        self._left_over = [v for v in stale if v == self._reading]
        for version in stale:
            if version not in self._left_over:
                (self._folder / str(version)).rmtree(missing_ok=True)
        self._in_flight = None

    def _marked(self) -> list[int]:
        if not self._marker.exists():
            return []
        return list(json.loads(self._marker.read_text())["versions"])

    def _guard(self, what: str, action: Callable[[], Any]) -> None:
        try:
            action()
        except (OSError, ValueError, RuntimeError) as error:
            raise PublicationError(
                f"{what} failed: {type(error).__name__}: {_brief(error)}. Make room or fix the "
                "storage, then run the same command again"
            ) from error

    def poll(self) -> bool:
        """Complete the save under way and restore it for the searchers."""
        with self._lock:
            version = self._in_flight
            if version is None:
                return False
            self._complete()
            self._reading = version
        # Outside the lock: the trainer may publish meanwhile; it spares the version being read.
        params = self._reader.restore(
            self._folder / str(version), args=ocp.args.StandardRestore(self._abstract)
        )
        self._reading = None
        self._mailbox.put(version, self._layout(params))
        return True

    def latest(self, reader: int) -> Published | None:
        """Newest restored version on that reader's devices."""
        return self._mailbox.latest(reader)

    def close(self) -> None:
        """Wait for the save under way and release Orbax's threads."""
        with self._lock:
            self._complete()
            self._writer.close()
            self._reader.close()


class MergingTransport:
    """A transport of adapters whose readers get whole weights.

    Adapters travel; each searcher's devices have held the base since the run began. They are merged
    by the searcher that takes a version up, so that the trainer waits for the transfer alone, and
    once for all that share devices.

    Args:
        adapters: the transport that adapters travel by.
        merges: of each reader: adapters on its devices -> weights as its decoder wants them.
            Readers with the same function share what it returned last.
    """

    def __init__(self, adapters: Transport, merges: Sequence[Callable[[Any], Any]]) -> None:
        self._adapters = adapters
        self._merges = list(merges)
        self._group = [self._merges.index(merge) for merge in self._merges]
        self._locks = [threading.Lock() for _ in self._merges]
        self._merged: dict[int, Published] = {}

    def publish(self, version: int, params: Any) -> None:
        """Publish adapters, as the transport that they travel by does."""
        self._adapters.publish(version, params)

    def latest(self, reader: int) -> Published | None:
        """Newest version as whole weights on that reader's devices."""
        published = self._adapters.latest(reader)
        if published is None:
            return None
        group = self._group[reader]
        with self._locks[group]:
            merged = self._merged.get(group)
            if merged is None or merged.version < published.version:
                # Dropped first: a searcher between two rounds then holds one merged copy, not two.
                merged = None
                self._merged.pop(group, None)
                weights = self._merges[group](published.params)
                merged = Published(published.version, jax.block_until_ready(weights))
                self._merged[group] = merged
            return merged

    def poll(self) -> bool:
        """As the transport that adapters travel by."""
        return self._adapters.poll()

    def close(self) -> None:
        """As the transport that adapters travel by."""
        self._adapters.close()


def _brief(error: BaseException) -> str:
    """First line of an error's text; the middle of a long one is left out, as the end has why."""
    line = (str(error).strip().splitlines() or ["(no message)"])[0]
    line = line.split(" [tensorstore_spec=")[0]  # a long dump, after the reason
    return line if len(line) <= 400 else f"{line[:150]} ... {line[-240:]}"
