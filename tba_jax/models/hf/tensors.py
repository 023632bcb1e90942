# SPDX-License-Identifier: Apache-2.0
"""Layout of a Hugging Face tensor in the leaves of our parameters.

Names and patterns are in `layouts`; shapes come from the declaration of the parameters, and a
tensor belongs to a model that has its leaves. Invariant: `join(split(x)) == x` bit for bit.
"""

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax.numpy as jnp
import numpy as np

from tba_jax.models.architecture import LayerKind, has_leaf

# Values of a four-bit float of MXFP4: sign, two bits of exponent, one of mantissa.
_FP4 = np.array([0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0], np.float32)
_FP4 = np.concatenate([_FP4, -_FP4])
_MXFP4_BLOCK = 32  # values that share a scale
_AXES = re.compile(r"\(([^)]*)\)|(\S+)")  # merged axes in parentheses, or one axis


class Rule(NamedTuple):
    """Leaves and layout of the tensors of one name.

    Attributes:
        leaves: names of the leaves that the tensor contains, separated by spaces.
        pattern: axes of the tensor -> axes of a leaf without layers (and without experts, if files
            have a tensor for each expert), as in einops. Axis `n` counts the leaves; without it,
            the leaves are adjacent along the tensor's first axis. Empty: the axes of the leaf.
        is_mxfp4: the files have four-bit blocks and their scales in place of the tensor.
    """

    leaves: str
    pattern: str = ""
    is_mxfp4: bool = False


Table = Mapping[str, Rule]
"""Name of a tensor -> its rule. `#` is the number of the layer, `*` that of the expert."""


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint, and the leaves (or layers of leaves) that it contains.

    Attributes:
        leaves: names in params, or in params["layers"] if the tensor belongs to a layer.
        layer: row of the tensor's layer in these leaves; -1: the tensor belongs to no layer.
        shapes: shape of each leaf in this tensor: without layers, and of one expert.
        pattern: as in `Rule`.
        num_experts: number of tensors, one for each expert, along the first axis of leaves. In
            their names, the expert's number replaces `*`. 0: a single tensor.
        is_mxfp4: as in `Rule`.
    """

    leaves: tuple[str, ...]
    layer: int
    shapes: tuple[tuple[int, ...], ...]
    pattern: str
    num_experts: int = 0
    is_mxfp4: bool = False

    @property
    def _axes(self) -> tuple[list[list[str]], list[str]]:
        """Merged axes of each axis of the tensor, and the axes of a leaf."""
        theirs, _, ours = self.pattern.partition(" -> ")
        return [(many or one).split() for many, one in _AXES.findall(theirs)], ours.split()

    @property
    def _order(self) -> list[int]:
        """Position in the tensor of each axis of a leaf, with all axes apart."""
        groups, ours = self._axes
        theirs = [axis for group in groups for axis in group if axis != "1"]
        return [theirs.index(axis) for axis in ours]

    @property
    def _parts(self) -> list[dict[str, int]]:
        """Sizes of the axes in each part of the tensor along its first axis."""
        _, ours = self._axes
        shapes = [(len(self.leaves), *self.shapes[0])] if "n" in ours else self.shapes
        return [dict(zip(ours, shape, strict=True)) for shape in shapes]

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor in files that have it in floating point."""
        groups, _ = self._axes
        shapes = [[math.prod(p.get(x, 1) for x in group) for group in groups] for p in self._parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def is_transposed(self) -> bool:
        """Whether axes of the leaves are in another order than those of the tensor."""
        return self._order != sorted(self._order)

    def parts(self, name: str) -> dict[str, tuple[int, ...]]:
        """Return names and shapes of the tensors in the files.

        Args:
            name: name of this tensor.
        """
        shape = self.shape
        if self.num_experts:
            return {name.replace("*", str(i)): shape for i in range(self.num_experts)}
        if self.is_mxfp4:
            scales = (*shape[:-1], shape[-1] // _MXFP4_BLOCK)
            return {f"{name}_blocks": (*scales, _MXFP4_BLOCK // 2), f"{name}_scales": scales}
        return {name: shape}

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
        """Return one array for each of `leaves`, without the layer axis: views of the tensor."""
        (first, *rest), ours = self._axes
        apart = [axis for group in (first, *rest) for axis in group if axis != "1"]
        out, start = [], 0
        for sizes in self._parts:
            end = start + math.prod(sizes[axis] for axis in first if axis != "1")
            grid = theirs[start:end].reshape([sizes[axis] for axis in apart])
            part = grid.transpose(self._order)
            out += list(part) if "n" in ours else [part]
            start = end
        return out

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Return the Hugging Face tensor that contains these arrays, in the order of `leaves`."""
        parts = [np.stack(ours)] if "n" in self._axes[1] else ours
        back = np.argsort(self._order)
        return np.concatenate([x.transpose(back).reshape(-1, *self.shape[1:]) for x in parts])


def bind(table: Table, abstract: Mapping[str, Any], kinds: Sequence[LayerKind]) -> dict:
    """Return the tensors of a model by name: those of a table whose leaves the model has.

    Args:
        table: names and layouts.
        abstract: the tree of parameters, of anything with a shape; its leaves of layers are under
            "layers", stacked on the first axis over the layers that have them.
        kinds: kind of each layer.
    """
    layers, out = abstract["layers"], {}

    def add(name: str, rule: Rule, tree: Mapping[str, Any], row: int) -> None:
        leaves = tuple(rule.leaves.split())
        if any(leaf not in tree for leaf in leaves):
            return
        outer = (row >= 0) + ("*" in name)
        shapes = tuple(tuple(tree[leaf].shape[outer:]) for leaf in leaves)
        same = " ".join("abcd"[: len(shapes[0])])
        num_experts = tree[leaves[0]].shape[outer - 1] if "*" in name else 0
        pattern = rule.pattern or f"{same} -> {same}"
        out[name] = HFTensor(leaves, row, shapes, pattern, num_experts, rule.is_mxfp4)

    for name, rule in table.items():
        if "#" not in name:
            add(name, rule, abstract, -1)
    for i, kind in enumerate(kinds):
        for name, rule in table.items():
            leaf = rule.leaves.split()[0]
            if "#" in name and has_leaf(kind, leaf):
                # A stacked leaf has rows only for the layers with the leaf.
                row = sum(has_leaf(earlier, leaf) for earlier in kinds[:i])
                add(name.replace("#", str(i)), rule, layers, row)
    return out


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
