# SPDX-License-Identifier: Apache-2.0
"""Comparison of parameter trees, for everyone who replaces one by another."""

from typing import Any

import jax


def check_same_tree(old: Any, new: Any) -> None:
    """Refuse weights that programs compiled for the old ones would not accept.

    Raises:
        ValueError: naming the first leaf that differs in path, shape or dtype.
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
            f"published weights have another tree than the version before; differing: {names[:5]}"
        )
    for name, leaf in new_leaves.items():
        before = old_leaves[name]
        if (leaf.shape, leaf.dtype) != (before.shape, before.dtype):
            raise ValueError(
                f"published weight {name} is {leaf.shape} {leaf.dtype}, "
                f"the version before had {before.shape} {before.dtype}"
            )
