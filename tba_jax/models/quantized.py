# SPDX-License-Identifier: Apache-2.0
"""Weights of the decoder in eight bits: each matrix of a layer as integers, or float8, and scales.

A decode step reads every weight for a few rows, so half the bytes are nearly half the time where
memory is the bound. What is multiplied stays in the compute dtype: the matrix is widened where it
is read, and the scale of an output channel multiplies its sum. Embeddings, output table, norms and
biases stay as they are. It knows neither meshes nor who decodes. The invariant it owns: a weight is
within half a step of its channel (int8), or half its last place (fp8), of what it was made from.
"""

from typing import Any, Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32

from tba_jax.models.transformer import Params

Quantization = Literal["none", "int8", "fp8"]
"""How the decoder holds the matrices of its layers.

none: as all other weights.
int8: integers from -127 to 127 times a scale for each output channel.
fp8: float8 e4m3 times such a scale; for GPUs that compute with it or widen it fast (Hopper).
"""

MATRICES = ("q", "k", "v", "o", "gate", "up", "down")

# Largest magnitude of each kind.
_KINDS: dict[str, tuple[Any, float]] = {
    "int8": (jnp.int8, 127.0),
    "fp8": (jnp.float8_e4m3fn, 448.0),
}


def scale_name(matrix: str) -> str:
    """Leaf of the scales of a matrix."""
    return f"{matrix}_scale"


def quantize(weights: Params, quantization: Quantization) -> Params:
    """Weights in the decoder's layout with the matrices of all layers in eight bits.

    Args:
        weights: layers apart, every matrix with two axes (`transformer.unstack_layers`).
        quantization: none returns them as they are.
    """
    if quantization == "none":
        return weights

    def of_layer(layer: Params) -> dict[str, Array]:
        found = dict(layer)
        for name in MATRICES:
            if name in layer:
                found[name], found[scale_name(name)] = _rounded(layer[name], quantization)
        return found

    return {**weights, "layers": tuple(of_layer(layer) for layer in weights["layers"])}


def _rounded(
    matrix: Float[Array, "i o"], quantization: Quantization
) -> tuple[Array, Float32[Array, " o"]]:
    """(values in eight bits, scale of each output channel)."""
    dtype, largest = _KINDS[quantization]
    x = matrix.astype(jnp.float32)
    most = jnp.max(jnp.abs(x), axis=0, keepdims=True)
    scale = jnp.where(most > 0, most / largest, 1.0)
    values = jnp.clip(x / scale, -largest, largest)  # a quotient may round past the largest
    return (jnp.round(values) if dtype == jnp.int8 else values).astype(dtype), scale[0]
