# SPDX-License-Identifier: Apache-2.0
"""Products of groups of adjacent rows with a matrix for each group, as in a mixture of experts.

On GPUs `jax.lax.ragged_dot` multiplies all rows with all matrices, and copies the rows for each of
them. There `grouped_kernel` multiplies each row with its matrix alone. The kernel compiles for h100
and is checked in interpret mode, but not measured on a GPU.
"""

import functools

import jax
import jax.numpy as jnp
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
        cuda=functools.partial(by_kernel, False),
        default=lambda *xs: jax.lax.ragged_dot(*xs),
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def by_kernel(
    interpret: bool,
    x: Float[Array, "m k"],
    kernels: Float[Array, "g k n"],
    sizes: Int32[Array, " g"],
) -> Float[Array, "m n"]:
    """Return `grouped_product` by the kernel, or interpreted; rows after all groups are 0."""
    from tba_jax.models import grouped_kernel

    out = grouped_kernel.product(x, kernels, sizes, interpret=interpret)
    return _in_groups(out, sizes)


def _forward(interpret: bool, x: Array, kernels: Array, sizes: Array) -> tuple[Array, tuple]:
    return by_kernel(interpret, x, kernels, sizes), (x, kernels, sizes)


def _backward(
    interpret: bool, saved: tuple[Array, Array, Array], cotangent: Array
) -> tuple[Array, Array, None]:
    from tba_jax.models import grouped_kernel

    x, kernels, sizes = saved
    of_x = grouped_kernel.product(cotangent, kernels, sizes, transposed=True, interpret=interpret)
    of_kernels = grouped_kernel.sums(x, cotangent, sizes, kernels.dtype, interpret=interpret)
    return _in_groups(of_x, sizes), of_kernels, None


by_kernel.defvjp(_forward, _backward)


def _in_groups(x: Float[Array, "m n"], sizes: Int32[Array, " g"]) -> Float[Array, "m n"]:
    """Return x with 0 in rows after all groups, which a kernel does not write."""
    return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], x, 0)
