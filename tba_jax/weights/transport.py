# SPDX-License-Identifier: Apache-2.0
"""Transports of policy weights from the trainer to searchers, and the transport in memory.

A publication is an immutable pair (version, params) in the rollout dtype. It shares no buffers with
the train state, because the next train step deletes them (donation). Invariant: `latest` returns
only complete versions (tests/weights/test_transport.py).
"""

import abc
import dataclasses
import threading
import time
from collections.abc import Callable, Collection, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from tba_jax.devices.sharding import hand_over
from tba_jax.models.quantized import Quantization, quantize
from tba_jax.models.trees import check_same_tree
from tba_jax.storage.saves import TIMEOUT_S
from tba_jax.weights.versions import PublicationError

DELIVERY_S = 0.1
"""Seconds for which a thread waits for a publication before it checks whether to stop."""
_UNUSED_S = 60.0  # time after which a version without an evaluation is dropped


class Published(NamedTuple):
    """Weights that searchers receive: `version` is the trainer step of the publication."""

    version: int
    params: Any


class Transport(Protocol):
    """Transport of the trainer's published weights to searchers."""

    @property
    def delivery_s(self) -> float:
        """Publication latency of the newest delivered version, in seconds."""
        ...

    @property
    def is_publishing(self) -> bool:
        """Whether a new publication would wait for the previous publication."""
        ...

    def publish(self, version: int, params: Any) -> None:
        """Publish `params` as the next version; return when the source arrays may be donated.

        Does not wait for the delivery; `poll` delivers.

        Args:
            params: tree of arrays in the trainer's layout.

        Raises:
            PublicationError: no publication was delivered within the timeout.
        """
        ...

    def latest(self, reader: int) -> Published | None:
        """Return the newest complete version on the reader's devices; None before the first.

        Args:
            reader: index of a searcher of this process, from 0.
        """
        ...

    def poll(self, wait_s: float = 0.0) -> bool:
        """Deliver the newest publication; return whether there was one.

        Args:
            wait_s: longest wait for a publication, in seconds.

        Raises:
            PublicationError: storage fails.
            ValueError: the tree differs from that of the previous version.
        """
        ...

    def settle(self) -> None:
        """Deliver the newest publication now; do nothing if the delivery needs storage."""
        ...

    def close(self) -> None:
        """Finish the current delivery; drop a publication whose delivery has not begun."""
        ...


Layout = Callable[[Any], Any]


def make_publish_program(
    dtype: jnp.dtype,
    layout: Layout | None = None,
    out_shardings: Any = None,
    quantization: Quantization = "none",
    float32_leaves: Collection[str] = (),
) -> Callable[[Any], Any]:
    """Return a jitted function that copies params in the rollout dtype and the searchers' layout.

    The function uses `jnp.copy`, because a jitted identity returns its input buffers, which the
    next donated train step deletes.

    Args:
        layout: function that rearranges the tree for the searchers; None: no change.
        out_shardings: tree of shardings of the result; None: XLA chooses.
        quantization: quantization of the copy; values other than "none" need the decoder's layout.
        float32_leaves: `TransformerConfig.float32_leaves`: leaves that stay float32.
    """

    def copy(path: Any, x: jax.Array) -> jax.Array:
        is_exact = path[-1].key in float32_leaves
        return jnp.copy(x.astype(jnp.float32 if is_exact else dtype))

    def publish(params: Any) -> Any:
        # The cast comes last: a cast before the layout would keep the whole stack in both dtypes.
        arranged = params if layout is None else layout(params)
        copied = jax.tree_util.tree_map_with_path(copy, arranged)
        leaves, tree = jax.tree.flatten(quantize(copied, quantization))
        smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
        leaves[smallest] = _after_some_work(leaves[smallest])
        return jax.tree.unflatten(tree, leaves)

    return jax.jit(publish, out_shardings=out_shardings)


def _after_some_work(x: jax.Array) -> jax.Array:
    """Return the input unchanged, after some thousand operations on a few of its numbers.

    XLA:CPU runs a program of fewer than 1,000 floating-point operations on the calling thread. A
    copy has no such operations, and would block that thread for 0.7 s per gigabyte.
    """
    halves = jax.lax.optimization_barrier(
        jnp.full(32, 0.5, jnp.float32)
    )  # otherwise XLA evaluates the expression at compile time
    total = halves
    for _ in range(24):
        total = total * halves + halves
    return jnp.where(jnp.sum(total) > 0, x, jnp.zeros_like(x))


@dataclasses.dataclass
class Delivery:
    """A publication that is being delivered.

    Attributes:
        version: trainer step of the publication.
        params: the published weights; after `_carry`, the delivered weights.
        since: time of the publication, by `time.monotonic`.
    """

    version: int
    params: Any
    since: float


class Undelivered:
    """The newest publication that has not been delivered, if any.

    A newer publication replaces it, so that the trainer never waits for a slow delivery and
    searchers get the newest weights.

    Args:
        timeout_s: time without a finished delivery after which `put` fails, in seconds.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: Delivery | None = None
        # Time of the first publication after the last delivery.
        self._since: float | None = None

    def put(self, version: int, params: Any) -> None:
        """Replace the waiting publication.

        Raises:
            PublicationError: no publication was delivered within the timeout.
        """
        now = time.monotonic()
        with self._changed:
            self._since = now if self._since is None else self._since
            if now - self._since > self._timeout_s:
                raise PublicationError(
                    f"publishing weights failed: no publication has reached the searchers for "
                    f"{now - self._since:.0f} s: devices or storage hang. Repair them, then run "
                    "the same command again"
                )
            self._waiting = Delivery(version, params, now)
            self._changed.notify_all()

    def wait(self, wait_s: float) -> None:
        """Wait for a publication, at most `wait_s` seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None, wait_s)

    def take(self) -> Delivery | None:
        """Remove and return the waiting publication; None if there is none."""
        with self._changed:
            taken, self._waiting = self._waiting, None
            return taken

    def note_delivery(self) -> None:
        """Record that the publication that `take` returned last was delivered."""
        with self._changed:
            self._since = None if self._waiting is None else self._waiting.since


class Delivered:
    """The newest delivered version, on each searcher's devices."""

    def __init__(self, shardings: Sequence[Any]) -> None:
        self._shardings = list(shardings)
        self._lock = threading.Lock()
        self._published: list[Published] | None = None

    def put(self, version: int, params: Any) -> None:
        """Copy params to each searcher's devices, then replace the previous version.

        Args:
            params: weights in the searchers' dtype and layout.

        Raises:
            ValueError: the tree differs from that of the previous version.
        """
        with self._lock:
            before = self._published
        if before is not None:
            check_same_tree(before[0].params, params)
        delivered: list[Any] = []
        for i, wanted in enumerate(self._shardings):
            first = self._shardings.index(wanted)  # searchers on the same devices share one copy
            if first < i:
                delivered.append(delivered[first])
            else:
                delivered.append(params if wanted is None else hand_over(params, wanted))
        # A searcher must never receive arrays that are still being computed: its thread would then
        # wait for the device inside a round, where the wait is not measured.
        jax.block_until_ready(delivered)
        with self._lock:
            self._published = [Published(version, x) for x in delivered]

    def latest(self, reader: int) -> Published | None:
        """Return the newest version on the reader's devices; None before the first."""
        with self._lock:
            return None if self._published is None else self._published[reader]


class DeliveringTransport(abc.ABC):
    """Base of transports that deliver to the devices of this process's searchers.

    `poll` delivers the newest publication; a publication that is replaced before its delivery is
    dropped. A subclass transfers the weights in `_carry`.

    Args:
        program: result of `make_publish_program`, launched under the trainer's device lock.
        shardings: for each searcher, a sharding or a tree of shardings in the searchers' layout;
            None if the published weights already have the searcher's sharding.
        timeout_s: time without a finished delivery after which `publish` fails, in seconds.
    """

    is_publishing = False

    def __init__(
        self,
        program: Callable[[Any], Any],
        shardings: Sequence[Any],
        *,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        self.delivery_s = 0.0
        self._program = program
        self._delivered = Delivered(shardings)
        self._undelivered = Undelivered(timeout_s)
        self._delivering = threading.Lock()

    def publish(self, version: int, params: Any) -> None:
        """Launch copy and cast; the device runs both before the next donated step."""
        self._undelivered.put(version, self._program(params))

    def poll(self, wait_s: float = 0.0) -> bool:
        """Deliver the newest publication; return whether there was one."""
        self._undelivered.wait(wait_s)
        with self._delivering:
            delivery = self._undelivered.take()
            if delivery is None:
                return False
            self._carry(delivery)
            self._delivered.put(delivery.version, delivery.params)
            self._undelivered.note_delivery()
            self.delivery_s = time.monotonic() - delivery.since
            return True

    def latest(self, reader: int) -> Published | None:
        """Return the newest delivered version on the reader's devices; None before the first."""
        return self._delivered.latest(reader)

    @abc.abstractmethod
    def _carry(self, delivery: Delivery) -> None:
        """Transfer the weights; set `delivery.params` to the result in the searchers' layout."""


class MemoryTransport(DeliveringTransport):
    """Transport inside one process."""

    def _carry(self, delivery: Delivery) -> None:
        """Do nothing: the weights are in memory."""

    def settle(self) -> None:
        """Deliver the newest publication, or wait for the thread that is delivering it."""
        self.poll()

    def close(self) -> None:
        """Do nothing: there is no background work."""


class PublishedWeights:
    """Weights that a trainer process publishes in memory to its own searchers.

    A version stays available until its evaluation is done, also after newer publications.
    """

    def __init__(self, transport: Transport, num_searchers: int) -> None:
        self.transport = transport
        self._num_searchers = num_searchers
        self._lock = threading.Lock()
        self._kept: dict[int, list[Published]] = {}
        self._used_s: dict[int, float] = {}  # version -> last time at which it was needed

    def keep(self) -> None:
        """Keep the newest version for its evaluation; called after its publication."""
        self.transport.settle()
        latest = [self.transport.latest(i) for i in range(self._num_searchers)]
        found = [each for each in latest if each is not None]
        if found:
            with self._lock:
                self._kept[found[0].version] = found
                self._used_s[found[0].version] = time.monotonic()

    def keep_only(self, versions: Sequence[int]) -> None:
        """Drop all versions but these, whose evaluations are not finished."""
        with self._lock:
            self._kept = {
                version: self._kept[version] for version in self._kept if version in versions
            }

    def reset(self, version: int) -> None:
        """Do nothing: trainer and searchers of a process end together."""

    def announce(self, version: int, evaluated: Sequence[int]) -> None:
        """Drop versions whose evaluation is over; called in processes that do not request it."""
        now = time.monotonic()
        with self._lock:
            for kept in list(self._kept):
                if kept in evaluated:
                    self._used_s[kept] = now
                elif evaluated or now - self._used_s[kept] > _UNUSED_S:
                    if evaluated and kept > max(evaluated):
                        continue  # its evaluation was not requested yet
                    del self._kept[kept], self._used_s[kept]

    def poll(self) -> bool:
        """Deliver the newest publication; called on a separate thread."""
        return self.transport.poll(DELIVERY_S)

    def latest(self, i: int) -> Published | None:
        """Return the newest version for searcher i of this process; None before the first."""
        return self.transport.latest(i)

    def at(self, version: int, i: int) -> Published | None:
        """Return a version for searcher i; None if it was dropped."""
        with self._lock:
            if version in self._kept:
                return self._kept[version][i]
        latest = self.transport.latest(i)
        return latest if latest is not None and latest.version == version else None
