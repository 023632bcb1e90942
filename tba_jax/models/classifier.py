# SPDX-License-Identifier: Apache-2.0
"""Scores of whole sequences: classifiers and reward models on the trunk of `transformer`.

Invariant: a row's scores depend only on its valid tokens, not on their position in the row.
"""

from typing import Any

import jax.numpy as jnp
from jaxtyping import Array, Bool, Float32, Int

from tba_jax.models.transformer import Params, TransformerConfig, apply


def classify(
    params: Params,
    tokens: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    sharding: Any = None,
) -> Float32[Array, "b labels"]:
    """Return raw scores (no softmax) at the last valid token of each row, as in transformers.

    Rows may be padded on either side. transformers treats every token except the pad token as
    valid. If responses may end in the pad token, pass the mask of transformers to get equal scores.
    The scores of a row without valid tokens are finite but have no meaning.

    Args:
        params: parameters with the leaf `score`.
        tokens: token ids.
        mask: which tokens are valid.
        config: the architecture; num_labels > 0.
        compute_dtype: dtype of matmul inputs, as in `transformer.apply`.
        sharding: on a mesh, a `shardings.ComputeSharding`.
    """
    if sharding is not None:
        params = sharding.ends(params, compute_dtype)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    hidden = apply(
        params,
        tokens,
        positions,
        mask,
        config=config,
        compute_dtype=compute_dtype,
        sharding=sharding,
    )
    last = jnp.max(jnp.where(mask, jnp.arange(tokens.shape[1])[None], 0), axis=1)
    pooled = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    return jnp.einsum(
        "bd,nd->bn",
        pooled,
        params["score"].astype(compute_dtype),
        preferred_element_type=jnp.float32,
    )
