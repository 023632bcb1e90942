# SPDX-License-Identifier: Apache-2.0
"""Permutation of rows whose gradient is a gather."""

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int


@jax.custom_vjp
def permuted(
    x: Float[Array, "..."], order: Int[Array, "*b s"], inverse: Int[Array, "*b s"]
) -> Float[Array, "..."]:
    """Return the rows of x [*b s ...] in another order, which `inverse` undoes.

    The gradient of plain indexing would be a slower scatter-add, because XLA does not know that the
    indices are unique.
    """
    index = order.reshape(*order.shape, *[1] * (x.ndim - order.ndim))
    return jnp.take_along_axis(x, index, axis=order.ndim - 1)


def _forward(x: Array, order: Array, inverse: Array) -> tuple[Array, tuple[Array, Array]]:
    return permuted(x, order, inverse), (order, inverse)


def _backward(saved: tuple[Array, Array], cotangent: Array) -> tuple[Array, None, None]:
    return permuted(cotangent, *saved[::-1]), None, None


permuted.defvjp(_forward, _backward)
