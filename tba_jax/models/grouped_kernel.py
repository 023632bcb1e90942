# SPDX-License-Identifier: Apache-2.0
"""Products of groups of rows with a matrix for each group: Pallas (Triton) kernels for NVIDIA GPUs.

A block of rows belongs to one group. Each program multiplies a block with some columns of the
matrix of its group, which it reads where it is. Invariant: rows after all groups are neither read
nor written, whatever they contain.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import triton as plgpu
from jaxtyping import Array, Float, Int, Int32

_LEAST = 16  # rows and columns of a tensor-core product at least
_MOST_ROWS, _MOST_COLUMNS, _MOST_INNER = 128, 128, 64
_STAGES = 3


def supports(x: Float[Array, "m k"], kernels: Float[Array, "g k n"]) -> bool:
    """Return whether the kernels support these dtypes and sizes."""
    is_narrow = x.dtype == kernels.dtype and x.dtype in (jnp.bfloat16, jnp.float16)
    return is_narrow and all(n % _LEAST == 0 for n in kernels.shape[1:])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def multiply(
    interpret: bool,
    x: Float[Array, "m k"],
    kernels: Float[Array, "g k n"],
    sizes: Int32[Array, " g"],
) -> Float[Array, "m n"]:
    """Return each row times the matrix of its group, with a gradient; rows after all groups are 0.

    Args:
        interpret: whether to run interpreted, on any device.
        x, kernels, sizes: as in `product`.
    """
    return _in_groups(product(x, kernels, sizes, interpret=interpret), sizes)


def _forward(interpret: bool, x: Array, kernels: Array, sizes: Array) -> tuple[Array, tuple]:
    return multiply(interpret, x, kernels, sizes), (x, kernels, sizes)


def _backward(
    interpret: bool, saved: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    x, kernels, sizes = saved
    of_x = product(cotangent, kernels, sizes, transposed=True, interpret=interpret)
    of_kernels = sums(x, cotangent, sizes, interpret=interpret)
    return _in_groups(of_x, sizes), of_kernels, None


multiply.defvjp(_forward, _backward)


def _in_groups(x: Float[Array, "m n"], sizes: Int32[Array, " g"]) -> Float[Array, "m n"]:
    """Return x with 0 in rows after all groups, which `product` does not write."""
    return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], x, 0)


def product(
    x: Float[Array, "m k"],
    kernels: Float[Array, "g k n"],
    sizes: Int32[Array, " g"],
    *,
    transposed: bool = False,
    interpret: bool = False,
) -> Float[Array, "m n"]:
    """Return each row times the matrix of its group; rows after all groups are undefined.

    Args:
        x: rows, sorted by group.
        kernels: matrices, or, if `transposed`, [g n k].
        sizes: number of rows in each group.
        transposed: whether to multiply with the transposed matrices.
        interpret: whether to run interpreted, on any device.
    """
    (m, k), g = x.shape, len(kernels)
    n = kernels.shape[1 if transposed else 2]
    rows = _rows(m, g)
    columns, inner = _divisor(n, _MOST_COLUMNS), _divisor(k, _MOST_INNER)
    blocks = _blocks(rows, m, sizes)
    return pl.pallas_call(
        functools.partial(
            _multiply, rows=rows, columns=columns, inner=inner, transposed=transposed
        ),
        grid=(n // columns, len(blocks[0])),  # blocks of a group one after the other
        out_shape=jax.ShapeDtypeStruct((m, n), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=_warps(rows, columns), num_stages=_STAGES),
        interpret=interpret,
        name="grouped_product",
    )(*blocks, x, kernels)


def _multiply(
    group_ref: Any,
    start_ref: Any,
    num_ref: Any,
    x_ref: Any,
    kernels_ref: Any,
    out_ref: Any,
    *,
    rows: int,
    columns: int,
    inner: int,
    transposed: bool,
) -> None:
    """Compute some columns of a block of rows."""
    first, block = pl.program_id(0) * columns, pl.program_id(1)
    group, start, num = group_ref[block], start_ref[block], num_ref[block]
    is_row = (jnp.arange(rows) < num)[:, None]

    @pl.when(num > 0)
    def _() -> None:
        def add(i: Array, total: Array) -> Array:
            part = pl.ds(i * inner, inner)
            of_rows = x_ref.at[pl.ds(start, rows), part]
            given = plgpu.load(of_rows, mask=jnp.broadcast_to(is_row, (rows, inner)), other=0)
            at = pl.ds(first, columns)
            if transposed:
                return total + plgpu.dot(given, plgpu.load(kernels_ref.at[group, at, part]).T)
            return total + plgpu.dot(given, plgpu.load(kernels_ref.at[group, part, at]))

        zeros = jnp.zeros((rows, columns), jnp.float32)
        total = jax.lax.fori_loop(0, x_ref.shape[1] // inner, add, zeros)
        plgpu.store(
            out_ref.at[pl.ds(start, rows), pl.ds(first, columns)],
            total.astype(out_ref.dtype),
            mask=jnp.broadcast_to(is_row, total.shape),
        )


def sums(
    x: Float[Array, "m k"],
    y: Float[Array, "m n"],
    sizes: Int32[Array, " g"],
    *,
    interpret: bool = False,
) -> Float[Array, "g k n"]:
    """Return the sum of the outer products x[i] y[i] of the rows of each group.

    Sums are float32, and then rounded to the dtype of the rows.

    Args:
        x, y: rows, sorted by group.
        sizes: number of rows in each group.
        interpret: whether to run interpreted, on any device.
    """
    (m, k), n, g = x.shape, y.shape[1], len(sizes)
    above, columns = _divisor(k, _MOST_COLUMNS), _divisor(n, _MOST_COLUMNS)
    ends = jnp.cumsum(sizes)
    return pl.pallas_call(
        functools.partial(
            _add_up, rows=min(_MOST_INNER, _rows(m, g)), above=above, columns=columns
        ),
        grid=(n // columns, k // above, g),
        out_shape=jax.ShapeDtypeStruct((g, k, n), x.dtype),
        compiler_params=plgpu.CompilerParams(num_warps=_warps(above, columns), num_stages=_STAGES),
        interpret=interpret,
        name="grouped_sums",
    )(ends - sizes, ends, x, y)


def _add_up(
    start_ref: Any,
    end_ref: Any,
    x_ref: Any,
    y_ref: Any,
    out_ref: Any,
    *,
    rows: int,
    above: int,
    columns: int,
) -> None:
    """Compute a tile of the sum of one group."""
    group = pl.program_id(2)
    at_x = pl.ds(pl.program_id(1) * above, above)
    at_y = pl.ds(pl.program_id(0) * columns, columns)
    start, end = start_ref[group], end_ref[group]

    def add(i: Array, total: Array) -> Array:
        first = start + i * rows
        is_row = (first + jnp.arange(rows) < end)[:, None]

        def load(ref: Any, at: Any, width: int) -> Array:
            mask = jnp.broadcast_to(is_row, (rows, width))
            return plgpu.load(ref.at[pl.ds(first, rows), at], mask=mask, other=0)

        return total + plgpu.dot(load(x_ref, at_x, above).T, load(y_ref, at_y, columns))

    zeros = jnp.zeros((above, columns), jnp.float32)
    total = jax.lax.fori_loop(0, pl.cdiv(end - start, rows), add, zeros)
    out_ref[group, at_x, at_y] = total.astype(out_ref.dtype)


def _rows(m: int, g: int) -> int:
    """Return the rows of a block: about half of a mean group, so that few rows are padding."""
    half = max(1, m // (2 * g))
    return min(_MOST_ROWS, max(_LEAST, 1 << (half.bit_length() - 1)))


def _warps(rows: int, columns: int) -> int:
    """Return the warps of a program with a tile of this size; Triton's usual numbers."""
    return 8 if rows * columns >= _MOST_ROWS * _MOST_COLUMNS else 4


def _divisor(n: int, most: int) -> int:
    """Return the largest power of two up to `most` that divides n."""
    return min(most, n & -n)


def _blocks(
    rows: int, m: int, sizes: Int32[Array, " g"]
) -> tuple[Int[Array, " b"], Int[Array, " b"], Int[Array, " b"]]:
    """Return (group, first row, number of rows) of each block; unused blocks have no rows."""
    last = jnp.cumsum(-(-sizes // rows))
    index = jnp.arange(-(-m // rows) + len(sizes))
    # The default method is a loop with a launch for each step.
    group = jnp.searchsorted(last, index, side="right", method="compare_all")
    group = jnp.minimum(group, len(sizes) - 1)
    end = jnp.cumsum(sizes)
    before = last - -(-sizes // rows)
    start = (end - sizes)[group] + (index - before[group]) * rows
    return group, start, jnp.clip(end[group] - start, 0, rows)
