# SPDX-License-Identifier: Apache-2.0
"""A learned log Z(x): a linear head on the policy's own view of the prompt.

The alternative to VarGrad where groups are small or of mixed origin. The invariant it owns: the
estimate depends on the prompt's tokens alone, not on padding or on any response.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig, apply


class LogZHead(NamedTuple):
    """Parameters of the head.

    Attributes:
        weight: float32 [d].
        bias: float32 scalar.
    """

    weight: Array
    bias: Array


def init_head(hidden_size: int) -> LogZHead:
    """A head that says 0 for every prompt, which is log Z where the policy is the reference."""
    return LogZHead(jnp.zeros(hidden_size, jnp.float32), jnp.float32(0.0))


def log_z(
    head: LogZHead,
    params: Any,
    prompts: Int[Array, "p s"],
    prompt_lengths: Int[Array, " p"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    remat: Remat,
    sharding: ComputeSharding | None = None,
) -> Float[Array, " p"]:
    """log Z(x) of every prompt: the head on the mean of its states after the last layer.

    Gradients flow into the head and, through the states, into the policy.

    Args:
        head: the head's parameters.
        params: the policy's.
        prompts: left-padded, as `Batch.prompts`.
        prompt_lengths: tokens of each prompt.
        config: model shape.
        compute_dtype: matmul inputs of the model; the head is float32.
        remat: as in `transformer.apply`.
        sharding: as in `logprobs.token_logprobs`.

    References:
        TBA, arXiv:2503.18929, appendix B.3.
    """
    size = prompts.shape[1]
    first = (size - prompt_lengths)[:, None]
    index = jnp.arange(size)[None]
    mask = index >= first
    positions = jnp.maximum(index - first, 0)
    if sharding is not None:
        params = sharding.ends(params, compute_dtype)
    hidden = apply(
        params,
        prompts,
        positions,
        mask,
        config=config,
        compute_dtype=compute_dtype,
        remat=remat,
        sharding=sharding,
    )
    pooled = jnp.mean(hidden.astype(jnp.float32), axis=1, where=mask[..., None])
    return pooled @ head.weight + head.bias
