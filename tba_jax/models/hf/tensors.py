# SPDX-License-Identifier: Apache-2.0
"""Layout of a Hugging Face tensor in the leaves of our parameters.

Shapes come from the declaration of the parameters, and a tensor belongs to a model that has its
leaves. Invariant: `join(split(x)) == x` bit for bit.
"""

import functools
import math
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from tba_jax.models.architecture import TransformerConfig, has_leaf

_AXES = re.compile(r"\(([^)]*)\)|(\S+)")  # merged axes in parentheses, or one axis


class Rule(NamedTuple):
    """Leaves and layout of the tensors of one name.

    Attributes:
        leaves: names of the leaves that the tensor contains, separated by spaces.
        pattern: axes of the tensor -> axes of a leaf without layers (and without experts, if files
            have a tensor for each expert), as in einops. Axis `n` counts the leaves; without it,
            the leaves are adjacent along the tensor's first axis. Empty: the axes of the leaf.
    """

    leaves: str
    pattern: str = ""


Table = Mapping[str, Rule]
"""Name of a tensor -> its rule. `#` is the number of the layer, `*` that of the expert."""


def linear(name: str, leaf: str, pattern: str = "", bias: str = "") -> Table:
    """Return the rules of a matrix and its bias; the axes of both are in `pattern` and `bias`."""
    return {f"{name}.weight": Rule(leaf, pattern), f"{name}.bias": Rule(f"{leaf}_bias", bias)}


def within(prefix: str, *tables: Table) -> Table:
    """Return the rules of all tables with a prefix before each name."""
    return {prefix + name: rule for table in tables for name, rule in table.items()}


class HFTensor(NamedTuple):
    """A tensor of a Hugging Face checkpoint, and the parts of leaves that it contains.

    Attributes:
        leaves: names in params, or in params["layers"] if the tensor belongs to a layer.
        at: rows of these leaves: () for whole leaves, (layer,) or (layer, expert).
        shapes: shape of each leaf at this place.
        pattern: as in `Rule`.
    """

    leaves: tuple[str, ...]
    at: tuple[int, ...]
    shapes: tuple[tuple[int, ...], ...]
    pattern: str

    @property
    def shape(self) -> tuple[int, ...]:
        """Shape of the tensor."""
        axes = _parse(self.pattern)
        shapes = [[math.prod(p.get(x, 1) for x in g) for g in axes.groups] for p in self._parts]
        return (sum(shape[0] for shape in shapes), *shapes[0][1:])

    @property
    def is_transposed(self) -> bool:
        """Whether axes of the leaves are in another order than those of the tensor."""
        order = _parse(self.pattern).order
        return order != sorted(order)

    @property
    def _parts(self) -> list[dict[str, int]]:
        """Sizes of the axes in each part of the tensor along its first axis."""
        ours = _parse(self.pattern).ours
        shapes = [(len(self.leaves), *self.shapes[0])] if "n" in ours else self.shapes
        return [dict(zip(ours, shape, strict=True)) for shape in shapes]

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """Return one array for each of `leaves`: views of the tensor."""
        axes, out, start = _parse(self.pattern), [], 0
        for sizes in self._parts:
            end = start + math.prod(sizes.get(axis, 1) for axis in axes.groups[0])
            grid = theirs[start:end].reshape([sizes[axis] for axis in axes.apart])
            part = grid.transpose(axes.order)
            out += list(part) if "n" in axes.ours else [part]
            start = end
        return out

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """Return the Hugging Face tensor that contains these arrays, in the order of `leaves`."""
        axes = _parse(self.pattern)
        parts = [np.stack(ours)] if "n" in axes.ours else ours
        back = np.argsort(axes.order)
        return np.concatenate([x.transpose(back).reshape(-1, *self.shape[1:]) for x in parts])


class _Axes(NamedTuple):
    groups: list[list[str]]  # merged axes of each axis of the tensor
    ours: list[str]  # axes of a leaf
    apart: list[str]  # axes of the tensor, none merged
    order: list[int]  # position in `apart` of each axis of a leaf


@functools.cache
def _parse(pattern: str) -> _Axes:
    theirs, _, ours = pattern.partition(" -> ")
    groups = [(many or one).split() for many, one in _AXES.findall(theirs)]
    apart = [axis for group in groups for axis in group if axis != "1"]
    return _Axes(groups, ours.split(), apart, [apart.index(axis) for axis in ours.split()])


def bind(
    table: Table, abstract: Mapping[str, Any], config: TransformerConfig
) -> dict[str, HFTensor]:
    """Return the tensors of a model by name: those of a table whose leaves the model has.

    Args:
        table: names and layouts.
        abstract: the tree of parameters, of anything with a shape; its leaves of layers are under
            "layers", stacked on the first axis over the layers that have them.
    """
    out: dict[str, HFTensor] = {}

    def add(name: str, rule: Rule, tree: Mapping[str, Any], *at: int) -> None:
        leaves = tuple(rule.leaves.split())
        if any(leaf not in tree for leaf in leaves):
            return
        shapes = tuple(tuple(tree[leaf].shape[len(at) :]) for leaf in leaves)
        if "*" in name:
            for expert in range(shapes[0][0]):
                add(name.replace("*", str(expert)), rule, tree, *at, expert)
            return
        same = " ".join("abcd"[: len(shapes[0])])
        out[name] = HFTensor(leaves, at, shapes, rule.pattern or f"{same} -> {same}")

    for name, rule in table.items():
        if "#" not in name:
            add(name, rule, abstract)
    for i, kind in enumerate(config.layer_kinds):
        for name, rule in table.items():
            leaf = rule.leaves.split()[0]
            if "#" in name and has_leaf(kind, leaf):
                row = config.row(leaf, i)
                add(name.replace("#", str(i)), rule, abstract["layers"], row)
    return out
