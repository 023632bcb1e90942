# SPDX-License-Identifier: Apache-2.0
"""Layout of a Hugging Face tensor in our leaves.

Invariant: `join(split(x)) == x` bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint, and our leaves (or layers of leaves) in it.

    Attributes:
        shape: the Hugging Face shape.
        layer: index of its layer; -1: none.
        leaves: names in params, or in params["layers"] if it belongs to a layer.
        grid: shape of the same elements with every axis fully factored.
        order: permutation of the grid's axes: first the axis of the leaves, then the axes of a
            leaf in our order.
    """

    shape: tuple[int, ...]
    layer: int
    leaves: tuple[str, ...]
    grid: tuple[int, ...]
    order: tuple[int, ...]

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """Return one array per leaf (or its layer), in our shape: views of `theirs`."""
        return list(theirs.reshape(self.grid).transpose(self.order))

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Return the Hugging Face tensor of these arrays, given in the order of `leaves`."""
        stacked = ours[0][None] if len(ours) == 1 else np.stack(ours)
        return stacked.transpose(np.argsort(self.order)).reshape(self.shape)


def plain(leaf: str, layer: int, shape: tuple[int, ...]) -> HFTensor:
    """Return a tensor with the same layout as our leaf."""
    grid = (1, *shape)
    return HFTensor(shape, layer, (leaf,), grid, tuple(range(len(grid))))


def split_vector(leaf: str, layer: int, axes: tuple[int, ...]) -> HFTensor:
    """Return a vector whose axis our leaf splits into `axes`."""
    size = int(np.prod(axes))
    order = tuple(range(len(axes) + 1))
    return HFTensor((size,), layer, (leaf,), (1, *axes), order)


def linear(leaf: str, layer: int, ins: tuple[int, ...], outs: tuple[int, ...]) -> HFTensor:
    """Return the weight of a torch Linear, [out, in]; our leaf is [*ins, *outs]."""
    m, n = len(outs), len(ins)
    return HFTensor(
        shape=(int(np.prod(outs)), int(np.prod(ins))),
        layer=layer,
        leaves=(leaf,),
        grid=(1, *outs, *ins),
        order=(0, *range(m + 1, m + n + 1), *range(1, m + 1)),
    )


def conv1d(leaf: str, layer: int, ins: tuple[int, ...], outs: tuple[int, ...]) -> HFTensor:
    """Return the weight of GPT-2's Conv1D, [in, out]: our leaf with merged axes."""
    grid = (1, *ins, *outs)
    shape = (int(np.prod(ins)), int(np.prod(outs)))
    return HFTensor(shape, layer, (leaf,), grid, tuple(range(len(grid))))
