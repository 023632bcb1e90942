# SPDX-License-Identifier: Apache-2.0
"""Publish and fetch of versioned policy weights: the one channel from trainer to searchers.

A publication is an immutable `(version, params)` pair in the rollout dtype. It is never an alias of
train state, whose buffers the next donated train step deletes. All transports give searchers
the same `latest()`; the one in memory is here. Its invariant: a reader sees a complete version or
the one before.
"""

import abc
import dataclasses
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp

from tba_jax.devices.sharding import hand_over
from tba_jax.models.quantized import Quantization, quantize
from tba_jax.models.trees import check_same_tree
from tba_jax.weights.versions import PublicationError


class Published(NamedTuple):
    """Weights as searchers see them: the trainer step of publication, and the params."""

    version: int
    params: Any


class Transport(Protocol):
    """What trainer and searchers need of a weight channel."""

    @property
    def delivery_s(self) -> float:
        """Seconds from the publication delivered last until readers had it."""
        ...

    @property
    def is_publishing(self) -> bool:
        """Whether another version had to wait for the one before."""
        ...

    def publish(self, version: int, params: Any) -> None:
        """Make `params` the next version; returns when the source may be donated.

        Nothing is waited for: whoever drives `poll` delivers it.

        Raises:
            PublicationError: nothing has been delivered for too long.
        """
        ...

    def latest(self, reader: int) -> Published | None:
        """Newest complete version, on that reader's devices; None before the first one.

        Readers are this process's searchers, counted from 0.
        """
        ...

    def poll(self, wait_s: float = 0.0) -> bool:
        """Deliver what was published last; True when there was something.

        Args:
            wait_s: longest wait for something to be published.

        Raises:
            PublicationError: storage refuses. ValueError: the tree differs from the one before.
        """
        ...

    def settle(self) -> None:
        """Have what was published last delivered, unless that takes storage."""
        ...

    def close(self) -> None:
        """Finish what is under way; what was not begun is dropped."""
        ...


Layout = Callable[[Any], Any]


def make_publish_program(
    dtype: jnp.dtype,
    layout: Layout | None = None,
    out_shardings: Any = None,
    quantization: Quantization = "none",
) -> Callable[[Any], Any]:
    """Jitted copy and cast of a params tree to the rollout dtype, in the layout readers want.

    `jnp.copy` is what makes it a copy: a jitted identity returns its input buffers, which the next
    donated train step deletes.

    Args:
        dtype: rollout dtype.
        layout: as the readers want the tree; None: as it is.
        out_shardings: of its result on the devices of the params, a tree; None: XLA's choice.
        quantization: of the copy, which the decoder's layout alone can have.
    """

    def publish(params: Any) -> Any:
        # Cast last: layers cut out of a cast stack would need the whole stack in both dtypes.
        arranged = params if layout is None else layout(params)
        copied = jax.tree.map(lambda x: jnp.copy(x.astype(dtype)), arranged)
        leaves, tree = jax.tree.flatten(quantize(copied, quantization))
        smallest = min(range(len(leaves)), key=lambda i: leaves[i].size)
        leaves[smallest] = _after_some_work(leaves[smallest])
        return jax.tree.unflatten(tree, leaves)

    return jax.jit(publish, out_shardings=out_shardings)


def _after_some_work(x: jax.Array) -> jax.Array:
    """The same values, after some thousand operations on a few numbers.

    XLA:CPU runs a program of fewer than 1,000 floating-point operations on the thread that calls
    it, as one that is over at once; a copy has none, and takes 0.7 s for a gigabyte.
    """
    halves = jax.lax.optimization_barrier(jnp.full(32, 0.5, jnp.float32))  # else done already
    total = halves
    for _ in range(24):
        total = total * halves + halves
    return jnp.where(jnp.sum(total) > 0, x, jnp.zeros_like(x))


@dataclasses.dataclass
class Parcel:
    """A publication on its way; who carries it lets go of the weights as early as it can.

    Attributes:
        version: of the weights.
        params: as they were published, then as they arrived.
        since: when they were published, by `time.monotonic`.
    """

    version: int
    params: Any
    since: float


class Undelivered:
    """The newest publication that was not delivered yet; it replaces one that nobody took.

    So a publisher never waits for a slow delivery, and readers get the newest. Of the trainer's
    copies one at most waits here.

    Args:
        timeout_s: without a delivery for so long, publications are refused.
    """

    def __init__(self, timeout_s: float) -> None:
        self._timeout_s = timeout_s
        self._changed = threading.Condition()
        self._waiting: Parcel | None = None
        self._since: float | None = None  # of the first publication after the last delivery

    def put(self, version: int, params: Any) -> None:
        """The newest; an older one that waits is dropped."""
        now = time.monotonic()
        with self._changed:
            self._since = now if self._since is None else self._since
            if now - self._since > self._timeout_s:
                raise PublicationError(
                    f"publishing weights failed: nothing published in the last "
                    f"{now - self._since:.0f} s has reached the searchers (wanted within "
                    f"config.checkpoint.timeout_s = {self._timeout_s:.0f} s): devices or storage "
                    "hang. Mend them or allow more time, then run the same command again"
                )
            self._waiting = Parcel(version, params, now)
            self._changed.notify_all()

    def wait(self, wait_s: float) -> None:
        """Return when there is something to take, or after so many seconds."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting is not None, wait_s)

    def take(self) -> Parcel | None:
        """The publication to deliver."""
        with self._changed:
            taken, self._waiting = self._waiting, None
            return taken

    def note_delivery(self) -> None:
        """What was taken has been delivered."""
        with self._changed:
            self._since = None if self._waiting is None else self._waiting.since


class Mailbox:
    """The newest version on each reader's devices.

    Args:
        shardings: as in DeliveringTransport.
    """

    def __init__(self, shardings: Sequence[Any]) -> None:
        self._shardings = list(shardings)
        self._lock = threading.Lock()
        self._published: list[Published] | None = None

    def put(self, version: int, params: Any) -> None:
        """Move a copy in the readers' dtype and layout to each reader's devices, and swap.

        Raises:
            ValueError: the tree differs from the version before.
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
        # A searcher must never adopt arrays that are still being computed: its thread would wait
        # on the device inside a round, where nobody counts the wait.
        jax.block_until_ready(delivered)
        with self._lock:
            self._published = [Published(version, x) for x in delivered]

    def latest(self, reader: int) -> Published | None:
        """Newest version on that reader's devices."""
        with self._lock:
            return None if self._published is None else self._published[reader]


class DeliveringTransport(abc.ABC):
    """A transport whose deliveries end on the devices of this process's searchers.

    Whoever drives `poll` delivers the newest publication; one that was replaced before it was begun
    never travels. A subclass says how it travels.

    Args:
        program: as `make_publish_program` makes it, in its turn on the trainer's devices.
        shardings: for each searcher a tree of shardings in the readers' layout, or one; None where
            the weights are where the searcher wants them already.
        timeout_s: a delivery that takes longer has failed.
    """

    is_publishing = False

    def __init__(
        self, program: Callable[[Any], Any], shardings: Sequence[Any], *, timeout_s: float
    ) -> None:
        self.delivery_s = 0.0
        self._program = program
        self._mailbox = Mailbox(shardings)
        self._undelivered = Undelivered(timeout_s)
        self._delivering = threading.Lock()

    def publish(self, version: int, params: Any) -> None:
        """Launch copy and cast; the device does them before a later step that is donated."""
        self._undelivered.put(version, self._program(params))

    def poll(self, wait_s: float = 0.0) -> bool:
        """Carry the newest publication to each searcher's devices, wait until ready, swap."""
        self._undelivered.wait(wait_s)
        with self._delivering:
            parcel = self._undelivered.take()
            if parcel is None:
                return False
            self._carry(parcel)
            self._mailbox.put(parcel.version, parcel.params)
            self._undelivered.note_delivery()
            self.delivery_s = time.monotonic() - parcel.since
            return True

    def latest(self, reader: int) -> Published | None:
        """Newest version that was delivered, on that reader's devices."""
        return self._mailbox.latest(reader)

    @abc.abstractmethod
    def _carry(self, parcel: Parcel) -> None:
        """Have its weights travel; afterwards they are what arrived, in the readers' layout."""


class MemoryTransport(DeliveringTransport):
    """Weights handed over inside one process."""

    def _carry(self, parcel: Parcel) -> None:
        """They are here."""

    def settle(self) -> None:
        """Deliver what is published, or wait for whoever does."""
        self.poll()

    def close(self) -> None:
        """Nothing is under way."""
