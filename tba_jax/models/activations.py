# SPDX-License-Identifier: Apache-2.0
"""Activations of an MLP."""

import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

# Constants of gpt-oss: bound of gate and up, and slope of the sigmoid.
CLAMP, SLOPE = 7.0, 1.702

ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}


def gated(name: str, gate: Float[Array, "*b f"], up: Float[Array, "*b f"]) -> Float[Array, "*b f"]:
    """Return the inner activations of a gated MLP, for an activation by name."""
    if name == "clamped_swiglu":
        gate = jnp.minimum(gate, CLAMP)
        return gate * jax.nn.sigmoid(SLOPE * gate) * (jnp.clip(up, -CLAMP, CLAMP) + 1)
    return ACTIVATIONS[name](gate) * up
