# SPDX-License-Identifier: Apache-2.0
"""Products of groups of adjacent rows with a matrix for each group, as in a mixture of experts.

On GPUs `jax.lax.ragged_dot` multiplies all rows with all matrices, and copies the rows for each of
them. `in_blocks` multiplies blocks of rows one after the other, each with the matrix of its group.
"""

import functools

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int, Int32

LARGEST_BLOCK = 2048
"""Rows of a block at most: a product of this size uses all of a GPU."""
SMALLEST_BLOCK = 64
"""Rows of a block at least: a smaller block only reads its matrix."""
FEWEST_ROWS = 16
"""With fewer rows for each matrix, the product of all rows with all matrices should be faster.

Estimated for an H100 with 10 microseconds for each block, not measured.
"""


def grouped_product(
    x: Float[Array, "m k"], kernels: Float[Array, "g k n"], sizes: Int32[Array, " g"]
) -> Float[Array, "m n"]:
    """Return each row times the matrix of its group; rows after all groups are undefined.

    Args:
        x: rows, sorted by group.
        kernels: matrices.
        sizes: number of rows in each group.
    """
    block = block_rows(len(x), len(kernels))
    if block is None:
        return jax.lax.ragged_dot(x, kernels, sizes)
    blocks = functools.partial(in_blocks, block)
    return jax.lax.platform_dependent(
        x, kernels, sizes, cuda=blocks, default=lambda *xs: jax.lax.ragged_dot(*xs)
    )


def block_rows(m: int, g: int) -> int | None:
    """Return the rows of a block; None: the product of all rows with all matrices is faster.

    A block has about half of the rows of a mean group, so that few rows are padding.
    """
    if m < FEWEST_ROWS * g:
        return None
    half = m // (2 * g)
    return min(LARGEST_BLOCK, max(SMALLEST_BLOCK, 1 << (half.bit_length() - 1)))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def in_blocks(
    block: int,
    x: Float[Array, "m k"],
    kernels: Float[Array, "g k n"],
    sizes: Int32[Array, " g"],
) -> Float[Array, "m n"]:
    """Return `grouped_product`, with `block` rows at a time."""
    m = len(x)
    padded = jnp.pad(x, ((0, block), (0, 0)))

    def step(out: Array, at: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, start, _ = at
        rows = jax.lax.dynamic_slice_in_dim(padded, start, block)
        # Rows after the group are overwritten by the blocks of the next groups.
        return jax.lax.dynamic_update_slice_in_dim(out, rows @ kernels[group], start, 0), None

    out = jnp.zeros((m + block, kernels.shape[2]), x.dtype)
    return jax.lax.scan(step, out, _blocks(block, m, sizes))[0][:m]


def _blocks(
    block: int, m: int, sizes: Int32[Array, " g"]
) -> tuple[Int[Array, " b"], Int[Array, " b"], Int[Array, " b"]]:
    """Return (group, first row, number of rows) of each block; unused blocks start at row m."""
    last = jnp.cumsum(-(-sizes // block))
    index = jnp.arange(-(-m // block) + len(sizes))
    group = jnp.minimum(jnp.searchsorted(last, index, side="right"), len(sizes) - 1)
    end = jnp.cumsum(sizes)
    before = last - -(-sizes // block)
    start = (end - sizes)[group] + (index - before[group]) * block
    start = jnp.where(index < last[-1], start, m)
    return group, start, jnp.clip(end[group] - start, 0, block)


def _forward(block: int, x: Array, kernels: Array, sizes: Array) -> tuple[Array, tuple]:
    return in_blocks(block, x, kernels, sizes), (x, kernels, sizes)


def _backward(
    block: int, saved: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    x, kernels, sizes = saved
    of_x = in_blocks(block, cotangent, jnp.swapaxes(kernels, 1, 2), sizes)
    is_in_group = jnp.arange(len(x)) < jnp.sum(sizes)
    padded, later = (jnp.pad(y, ((0, block), (0, 0))) for y in (x, cotangent))

    def step(total: Array, at: tuple[Array, Array, Array]) -> tuple[Array, None]:
        group, start, num = at
        rows, given = (jax.lax.dynamic_slice_in_dim(y, start, block) for y in (padded, later))
        rows = jnp.where((jnp.arange(block) < num)[:, None], rows, 0)
        part = jnp.einsum("mk,mn->kn", rows, given, preferred_element_type=total.dtype)
        return total.at[group].add(part), None

    wide = jnp.promote_types(kernels.dtype, jnp.float32)
    total, _ = jax.lax.scan(step, jnp.zeros(kernels.shape, wide), _blocks(block, len(x), sizes))
    return jnp.where(is_in_group[:, None], of_x, 0), total.astype(kernels.dtype), None


in_blocks.defvjp(_forward, _backward)
