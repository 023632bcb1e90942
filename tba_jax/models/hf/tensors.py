# SPDX-License-Identifier: Apache-2.0
"""Layout of a Hugging Face tensor in the leaves of our parameters.

Invariant: `join(split(x)) == x` bit for bit.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import jax.numpy as jnp
import numpy as np

# Values of a four-bit float of MXFP4: sign, two bits of exponent, one of mantissa.
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_MXFP4_BLOCK = 32  # values that share a scale


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint, and the leaves (or layers of leaves) that it contains.

    Attributes:
        shape: the Hugging Face shape.
        layer: index of the tensor's layer; -1: the tensor belongs to no layer.
        leaves: names in params, or in params["layers"] if the tensor belongs to a layer.
        grid: shape of the same elements with every axis fully factored.
        order: permutation of the grid's axes: first the axis of the leaves, then the axes of a
            leaf in the order of params.
        num_experts: number of tensors, one for each expert, along the first axis of leaves. In
            their names, the expert's number replaces `*`. 0: a single tensor.
        widths: sizes of the leaves' parts along the second axis of the grid; the first axis counts
            groups of such parts, and `order` permutes the axes of one part. Empty: all leaves have
            one shape.
        shapes: shapes of the leaves, if `widths` are given.
        is_mxfp4: the files have four-bit blocks and their scales in place of the tensor.
    """

    shape: tuple[int, ...]
    layer: int
    leaves: tuple[str, ...]
    grid: tuple[int, ...]
    order: tuple[int, ...]
    num_experts: int = 0
    widths: tuple[int, ...] = ()
    shapes: tuple[tuple[int, ...], ...] = ()
    is_mxfp4: bool = False

    def parts(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors in the files.

        Args:
            name: name of this tensor.
        """
        if self.num_experts:
            return {name.replace("*", str(i)): self.shape for i in range(self.num_experts)}
        if self.is_mxfp4:
            *outer, size = self.shape
            scales = (*outer, size // _MXFP4_BLOCK)
            return {f"{name}_blocks": (*scales, _MXFP4_BLOCK // 2), f"{name}_scales": scales}
        return {name: self.shape}

    def leaf_arrays(self, parts: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return one array for each of `leaves`, without the layer axis, from those of `parts`."""
        if self.is_mxfp4:
            return self.split(_from_mxfp4(parts[0], parts[1]))
        if not self.num_experts:
            return self.split(parts[0])
        return [np.stack(arrays) for arrays in zip(*map(self.split, parts), strict=True)]

    def file_arrays(self, ours: Sequence[np.ndarray]) -> list[np.ndarray]:
        """Return the arrays of `parts` from the arrays of `leaves`; never four-bit arrays."""
        if not self.num_experts:
            return [self.join(ours)]
        return [self.join([leaf[i] for leaf in ours]) for i in range(self.num_experts)]

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """Return one array for each of `leaves`, without the layer axis: a view if possible."""
        if self.widths:
            parts = np.split(theirs.reshape(self.grid), np.cumsum(self.widths)[:-1], axis=1)
            pairs = zip(parts, self.shapes, strict=True)
            return [part.transpose(self.order).reshape(shape) for part, shape in pairs]
        return list(theirs.reshape(self.grid).transpose(self.order))

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Return the Hugging Face tensor that contains these arrays, in the order of `leaves`."""
        if self.widths:
            parts = []
            for leaf, width in zip(ours, self.widths, strict=True):
                part = (self.grid[0], width, *self.grid[2:])
                part = leaf.reshape([part[axis] for axis in self.order])
                parts.append(part.transpose(np.argsort(self.order)))
            return np.concatenate(parts, axis=1).reshape(self.shape)
        stacked = ours[0][None] if len(ours) == 1 else np.stack(ours)
        return stacked.transpose(np.argsort(self.order)).reshape(self.shape)


def plain(leaf: str, layer: int, shape: tuple[int, ...]) -> HFTensor:
    """Return the layout of a tensor that files store like our leaf."""
    grid = (1, *shape)
    return HFTensor(shape, layer, (leaf,), grid, tuple(range(len(grid))))


def split_vector(leaf: str, layer: int, axes: tuple[int, ...]) -> HFTensor:
    """Return the layout of a vector in files that is a leaf with several axes here."""
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


def linear_parts(
    leaves: Mapping[str, tuple[int, ...]], layer: int, size: int, *, groups: int = 1
) -> HFTensor:
    """Return the weight of a torch Linear whose outputs are those of several leaves.

    Args:
        leaves: name -> shape of the outputs; a leaf is [size, *outputs].
        layer: index of the layer.
        size: number of inputs.
        groups: number of groups of outputs; each has an equal part of each leaf.
    """
    widths = tuple(int(np.prod(outs)) // groups for outs in leaves.values())
    return HFTensor(
        shape=(groups * sum(widths), size),
        layer=layer,
        leaves=tuple(leaves),
        grid=(groups, sum(widths), size),
        order=(2, 0, 1),
        widths=widths,
        shapes=tuple((size, *outs) for outs in leaves.values()),
    )


def each_expert(num_experts: int, tensor: HFTensor) -> HFTensor:
    """Return the layout of a leaf that files store as one tensor for each expert (first axis)."""
    return dataclasses.replace(tensor, num_experts=num_experts)


def _from_mxfp4(blocks: np.ndarray, scales: np.ndarray) -> np.ndarray:
    """Return bfloat16 [e out in] of four-bit values [e out in/32 16], two per byte, and exponents.

    Exact: the values have two significant bits.
    """
    num, rows, groups, half = blocks.shape
    out = np.empty((num, rows, groups * 2 * half), jnp.bfloat16)
    pairs = np.stack([_FP4[np.arange(256) % 16], _FP4[np.arange(256) // 16]], axis=-1)
    for i in range(num):  # one expert at a time, to bound memory
        exponents = scales[i].astype(np.int32)[..., None] - 127
        values = pairs[blocks[i]].reshape(rows, groups, 2 * half)
        out[i] = np.ldexp(values, exponents).reshape(rows, -1)
    return out
