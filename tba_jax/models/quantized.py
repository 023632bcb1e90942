# SPDX-License-Identifier: Apache-2.0
"""8-bit weights of the decoder: each matrix of a layer as integers, with scales.

A decode step reads every weight for a few rows. Where memory bandwidth is the limit, half of the
bytes take nearly half of the time. Products use the compute dtype: a matrix is converted when
it is read, and the scale of an output channel multiplies the sum. Embeddings, output table, norms
and biases keep their dtype. Invariant: the error of a weight is at most half a step of its channel.
"""

from typing import Literal

import jax.numpy as jnp
from jaxtyping import Array, Float, Float32, Int8

from tba_jax.models import config, experts
from tba_jax.models.transformer import Params

Quantization = Literal["none", "int8"]
"""Format of the decoder's layer matrices.

none: the dtype of all other weights.
int8: integers from -127 to 127 times a scale for each output channel.
"""

MATRICES = (*config.MATRICES, *experts.MATRICES)

_LARGEST = 127.0


def scale_name(matrix: str) -> str:
    """Return the name of the leaf with the scales of a matrix."""
    return f"{matrix}_scale"


def quantize(weights: Params, quantization: Quantization) -> Params:
    """Return weights in the decoder's layout with the layers' matrices in 8 bits.

    Args:
        weights: layers separate, every matrix with two axes (`transformer.unstack_layers`).
        quantization: format; "none" returns the weights unchanged.
    """
    if quantization == "none":
        return weights

    def of_layer(layer: Params) -> dict[str, Array]:
        found = dict(layer)
        for name in MATRICES:
            if name in layer:
                found[name], found[scale_name(name)] = _rounded(layer[name])
        return found

    return {**weights, "layers": tuple(of_layer(layer) for layer in weights["layers"])}


def _rounded(
    matrix: Float[Array, "*e i o"],
) -> tuple[Int8[Array, "*e i o"], Float32[Array, "*e o"]]:
    """Return (8-bit values, scale of each output channel, separate for each expert)."""
    x = matrix.astype(jnp.float32)
    most = jnp.max(jnp.abs(x), axis=-2, keepdims=True)
    scale = jnp.where(most > 0, most / _LARGEST, 1.0)
    # A quotient may be rounded above the largest.
    values = jnp.clip(x / scale, -_LARGEST, _LARGEST)
    return jnp.round(values).astype(jnp.int8), scale[..., 0, :]
