# SPDX-License-Identifier: Apache-2.0
"""The program that copies trained weights for searchers."""

from collections.abc import Callable, Collection
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from tba_jax.models.quantized import Quantization, quantize


class Published(NamedTuple):
    """Weights that searchers receive: `version` is the trainer step of the publication."""

    version: int
    params: Any


class PublicationError(RuntimeError):
    """Weights could not be written or read; the message has the version and the remedy."""


def make_publish_program(
    dtype: jnp.dtype,
    layout: Callable[[Any], Any] | None = None,
    out_shardings: Any = None,
    quantization: Quantization = "none",
    float32_leaves: Collection[str] = (),
) -> Callable[[Any], Any]:
    """Return a jitted function that copies params in the rollout dtype and the searchers' layout.

    The function uses `jnp.copy`, because a jitted identity returns its input buffers, which the
    next donated train step deletes.

    Args:
        layout: function that rearranges the tree for the searchers; None: no change.
        out_shardings: tree of shardings of the result; None: XLA chooses.
        quantization: quantization of the copy; values other than "none" need the decoder's layout.
        float32_leaves: `TransformerConfig.float32_leaves`: leaves that stay float32.
    """

    def copy(path: Any, x: jax.Array) -> jax.Array:
        is_exact = path[-1].key in float32_leaves
        return jnp.copy(x.astype(jnp.float32 if is_exact else dtype))

    def publish(params: Any) -> Any:
        # The cast comes last: a cast before the layout would keep the whole stack in both dtypes.
        arranged = params if layout is None else layout(params)
        return quantize(jax.tree_util.tree_map_with_path(copy, arranged), quantization)

    return jax.jit(publish, out_shardings=out_shardings)
