# SPDX-License-Identifier: Apache-2.0
"""How one tensor of a Hugging Face checkpoint lies in our leaves.

The invariant it owns: `join(split(x)) == x` bit for bit.
"""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint and the leaves of ours, or layers of them, it holds.

    Attributes:
        shape: the Hugging Face shape.
        layer: index of the layer it belongs to; -1: none.
        leaves: names in params, or in params["layers"] when it belongs to a layer.
        grid: the same elements with every factor of their axes apart.
        order: permutation of the grid's axes that puts the axis of the leaves first and leaves
            the rest as our leaves have it.
    """

    shape: tuple[int, ...]
    layer: int
    leaves: tuple[str, ...]
    grid: tuple[int, ...]
    order: tuple[int, ...]

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """One array per leaf (or its layer), in the shape of ours: views of `theirs`."""
        return list(theirs.reshape(self.grid).transpose(self.order))

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """The Hugging Face tensor of these arrays, given in the order of `leaves`."""
        stacked = ours[0][None] if len(ours) == 1 else np.stack(ours)
        return stacked.transpose(np.argsort(self.order)).reshape(self.shape)


def plain(leaf: str, layer: int, shape: tuple[int, ...]) -> HFTensor:
    """A tensor that lies as ours does."""
    grid = (1, *shape)
    return HFTensor(shape, layer, (leaf,), grid, tuple(range(len(grid))))


def split_vector(leaf: str, layer: int, axes: tuple[int, ...]) -> HFTensor:
    """A vector whose axis ours splits into `axes`."""
    size = int(np.prod(axes))
    order = tuple(range(len(axes) + 1))
    return HFTensor((size,), layer, (leaf,), (1, *axes), order)


def linear(leaf: str, layer: int, ins: tuple[int, ...], outs: tuple[int, ...]) -> HFTensor:
    """The weight of a torch Linear, [out, in]; ours is [*ins, *outs]."""
    m, n = len(outs), len(ins)
    return HFTensor(
        shape=(int(np.prod(outs)), int(np.prod(ins))),
        layer=layer,
        leaves=(leaf,),
        grid=(1, *outs, *ins),
        order=(0, *range(m + 1, m + n + 1), *range(1, m + 1)),
    )


def conv1d(leaf: str, layer: int, ins: tuple[int, ...], outs: tuple[int, ...]) -> HFTensor:
    """The weight of GPT-2's Conv1D, [in, out]: ours with merged axes."""
    grid = (1, *ins, *outs)
    shape = (int(np.prod(ins)), int(np.prod(outs)))
    return HFTensor(shape, layer, (leaf,), grid, tuple(range(len(grid))))
