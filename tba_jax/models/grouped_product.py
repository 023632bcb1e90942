# SPDX-License-Identifier: Apache-2.0
"""Products of groups of adjacent rows with a matrix for each group, as in a mixture of experts.

On GPUs `jax.lax.ragged_dot` multiplies all rows with all matrices, and copies the rows for each of
them. There `grouped_kernel` multiplies each row with its matrix alone. The kernel compiles for h100
and is checked in interpret mode, but not measured on a GPU.
"""

import functools

import jax
from jaxtyping import Array, Float, Int32


def grouped_product(
    x: Float[Array, "m k"],
    kernels: Float[Array, "g k n"],
    sizes: Int32[Array, " g"],
    *,
    has_kernel: bool = True,
) -> Float[Array, "m n"]:
    """Return each row times the matrix of its group; rows after all groups are undefined.

    Args:
        x: rows, sorted by group.
        kernels: matrices.
        sizes: number of rows in each group.
        has_kernel: whether to use the kernel on NVIDIA GPUs, if it supports dtype and sizes.
    """
    # Imported here: only models with experts need Pallas.
    from tba_jax.models import grouped_kernel

    if not (has_kernel and grouped_kernel.supports(x, kernels)):
        return jax.lax.ragged_dot(x, kernels, sizes)
    return jax.lax.platform_dependent(
        x,
        kernels,
        sizes,
        cuda=functools.partial(grouped_kernel.multiply, False),
        default=lambda *xs: jax.lax.ragged_dot(*xs),
    )
