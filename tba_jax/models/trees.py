# SPDX-License-Identifier: Apache-2.0
"""Comparison of parameter trees, before one replaces another."""

from typing import Any

import jax


def check_same_tree(old: Any, new: Any) -> None:
    """Refuse weights that programs for the old weights would not accept.

    Raises:
        ValueError: names the first leaf with another path, shape or dtype.
    """
    old_leaves = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(old)
    }
    new_leaves = {
        jax.tree_util.keystr(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(new)
    }
    if old_leaves.keys() != new_leaves.keys():
        names = sorted(old_leaves.keys() ^ new_leaves.keys())
        raise ValueError(
            "the tree of the published weights differs from the previous version in the leaves "
            f"{names[:5]}"
        )
    for name, leaf in new_leaves.items():
        before = old_leaves[name]
        if (leaf.shape, leaf.dtype) != (before.shape, before.dtype):
            raise ValueError(
                f"published weight {name} is {leaf.shape} {leaf.dtype}, "
                f"the version before had {before.shape} {before.dtype}"
            )
