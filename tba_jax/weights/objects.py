# SPDX-License-Identifier: Apache-2.0
"""Weights as objects of a store that other machines read: put in pieces, read without a copy.

A version is one object or a few of each array, and a list of references says which; that list
travels in messages. What the store is it does not know: it is handed `put` and `get`, in a fleet
those of Ray. Invariant: a version that is told of is stored whole, and its objects stay as long as
the transport holds its list.
"""

import functools
import itertools
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from typing import Any

import jax
import numpy as np

from tba_jax.weights.stored import Piece, Stored, StoreError
from tba_jax.weights.transport import DeliveringTransport, Layout, Parcel
from tba_jax.weights.versions import PublicationError

PIECE_BYTES = 2**26
"""Of an object at most, if a row of an array is not larger; stores move and free whole objects."""


def store_version(
    version: int, params: Any, put: Callable[[np.ndarray], Any], piece_bytes: int = PIECE_BYTES
) -> Stored:
    """Put a version into the store; of each array one device's part at a time is on the host.

    Args:
        version: of the weights.
        params: a tree of arrays, on devices of this process.
        put: as `Store.put`.
        piece_bytes: of an object, if rows are not larger.

    Raises:
        PublicationError: the store does not take it.
    """
    arrays = []
    try:
        for array in jax.tree.leaves(params):
            parts = [part for part in array.addressable_shards if part.replica_id == 0]
            arrays.append(
                tuple(
                    Piece(start, block.shape, put(_bytes_of(block)))
                    for part in parts
                    for start, block in _blocks(part.index, np.asarray(part.data), piece_bytes)
                )
            )
    except StoreError as error:
        size = sum(array.nbytes for array in jax.tree.leaves(params))
        raise PublicationError(
            f"publishing version {version} of the weights in the object store failed: {error}. A "
            f"version has {size:,} bytes, and a few are there at a time: give the store more room "
            "(`ray start --object-store-memory=BYTES`) or set --config.sync.transport=checkpoint; "
            "the same command goes on from the newest checkpoint"
        ) from error
    return Stored(version, tuple(arrays))


def _bytes_of(block: np.ndarray) -> np.ndarray:
    """Bytes, as stores need not know every dtype."""
    return np.ascontiguousarray(block).reshape(-1).view(np.uint8)


def _blocks(
    index: tuple[slice, ...], part: np.ndarray, piece_bytes: int
) -> Iterator[tuple[tuple[int, ...], np.ndarray]]:
    """(start in the array, rows of this part of it)."""
    first = tuple(each.start or 0 for each in index)
    if part.nbytes <= piece_bytes or not part.shape:
        yield first, part
        return
    step = max(1, piece_bytes * len(part) // part.nbytes)
    for row in range(0, len(part), step):
        yield (first[0] + row, *first[1:]), part[row : row + step]


def read_version(stored: Stored, abstract: Any, get: Callable[[Sequence[Any]], Any]) -> Any:
    """The arrays of a version.

    Args:
        stored: where they are.
        abstract: tree of jax.ShapeDtypeStruct with shardings.
        get: as `Store.get`.

    Raises:
        PublicationError: they cannot be read.
    """
    wanted, tree = jax.tree.flatten(abstract)
    try:
        if len(wanted) != len(stored.arrays):
            raise ValueError(f"it has {len(stored.arrays)} arrays, wanted {len(wanted)}")
        arrays = []
        for want, pieces in zip(wanted, stored.arrays, strict=True):
            found = get([piece.reference for piece in pieces])
            blocks = [
                (piece.start, data.view(want.dtype).reshape(piece.shape))
                for piece, data in zip(pieces, found, strict=True)
            ]
            part = functools.partial(_part, want.shape, want.dtype, blocks)
            arrays.append(jax.make_array_from_callback(want.shape, want.sharding, part))
    except (StoreError, ValueError) as error:
        raise PublicationError(
            f"version {stored.version} of the weights cannot be read from the object store: {error}"
        ) from error
    return jax.tree.unflatten(tree, arrays)


def _part(
    shape: tuple[int, ...],
    dtype: Any,
    blocks: Sequence[tuple[tuple[int, ...], np.ndarray]],
    index: tuple[slice, ...] | None,
) -> np.ndarray:
    """A part of an array: a block itself where it is one, else put together."""
    assert index is not None, "every device wants a part"
    ranges = [each.indices(size)[:2] for each, size in zip(index, shape, strict=True)]
    for start, block in blocks:
        ends = [(first, first + size) for first, size in zip(start, block.shape, strict=True)]
        if ends == ranges:
            return block
    out = np.empty([end - first for first, end in ranges], dtype)
    missing = out.size
    for start, block in blocks:
        into, out_of = [], []
        for (low, high), first, size in zip(ranges, start, block.shape, strict=True):
            begin, end = max(low, first), max(low, first, min(high, first + size))
            into.append(slice(begin - low, end - low))
            out_of.append(slice(begin - first, end - first))
        out[tuple(into)] = block[tuple(out_of)]
        missing -= out[tuple(into)].size
    if missing:
        raise ValueError(f"{missing:,} of {out.size:,} values of an array are nowhere")
    return out


class ObjectTransport(DeliveringTransport):
    """Weights for searchers on other machines, through a store.

    Whoever drives `poll` puts the newest publication there. Searchers are told `stored`.

    Args:
        put: as `Store.put`.
        program: copy and cast of the params, in its turn on the trainer's devices.
        shardings: of the readers in this process, as in DeliveringTransport.
        keep: versions that stay, at least 2.
        timeout_s: a delivery that takes longer has failed.
        layout: makes the trainer's layout what the readers want; None: it is that.
    """

    def __init__(
        self,
        put: Callable[[np.ndarray], Any],
        program: Callable[[Any], Any],
        shardings: Sequence[Any],
        *,
        keep: int,
        timeout_s: float,
        layout: Layout | None = None,
    ) -> None:
        super().__init__(program, shardings, timeout_s=timeout_s)
        self._put = put
        self._keep = keep
        self._layout: Layout = (lambda params: params) if layout is None else layout
        self._wanted: Callable[[], Collection[int]] = tuple
        self._lock = threading.Lock()
        self._stored: dict[int, Stored] = {}

    def keep_also(self, wanted: Callable[[], Collection[int]]) -> None:
        """Keep these versions beyond the newest ones; it is asked at every publication."""
        self._wanted = wanted

    def _carry(self, parcel: Parcel) -> None:
        """Put it into the store, and let the oldest one go."""
        version, params = parcel.version, parcel.params
        jax.block_until_ready(params)
        stored = store_version(version, params, self._put)
        wanted = set(self._wanted())
        with self._lock:
            newest = [*sorted(self._stored), version][-self._keep :]
            self._stored = {
                v: each
                for v, each in {**self._stored, version: stored}.items()
                if v in newest or v in wanted
            }
        parcel.params = self._layout(params)

    def stored(self, version: int) -> Stored | None:
        """Where a version is; None where it is no more."""
        with self._lock:
            return self._stored.get(version)

    def settle(self) -> None:
        """Nothing: that would wait for the store."""

    def close(self) -> None:
        """Let all versions go."""
        with self._lock:
            self._stored = {}


class StoredVersions:
    """Versions that a process was told of, as a `reading.Source`.

    Args:
        get: as `Store.get`.
    """

    def __init__(self, get: Callable[[Sequence[Any]], list[np.ndarray]]) -> None:
        self._get = get
        self._lock = threading.Lock()
        self._known: dict[int, Stored] = {}

    def note(self, told: Sequence[Stored]) -> int:
        """Remember where these are, and the newest before them.

        Returns:
            The newest version that is known, -1 without any.
        """
        with self._lock:
            if told:
                newest = max(itertools.chain(self._known, (each.version for each in told)))
                kept = {v: each for v, each in self._known.items() if v == newest}
                self._known = {**kept, **{each.version: each for each in told}}
            return max(self._known, default=-1)

    def forget(self) -> None:
        """They are of a trainer that is gone."""
        with self._lock:
            self._known = {}

    @property
    def newest(self) -> int:
        """The newest version that is known, -1 without any."""
        return self.note(())

    def path(self, version: int) -> str:
        """Its name, for people."""
        return f"version {version} in the object store"

    def damage(self, version: int) -> list[str]:
        """Why it cannot be read, as far as one knows without trying."""
        with self._lock:
            return [] if version in self._known else ["nobody said where it is"]

    def read(self, version: int, abstract: Any) -> Any:
        """As `Versions.read`."""
        with self._lock:
            stored = self._known.get(version)
        if stored is None:
            raise PublicationError(f"{self.path(version)}: nobody said where it is")
        return read_version(stored, abstract, self._get)
