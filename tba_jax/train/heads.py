# SPDX-License-Identifier: Apache-2.0
"""Linear heads on the policy's hidden states: a learned log Z(x), or values of states.

A learned log Z is an alternative to VarGrad for small groups and for groups from several samplers.
The estimate depends on the prompt's tokens alone, not on padding or on any response.
"""

from typing import Any, NamedTuple

import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig, apply


class Head(NamedTuple):
    """Parameters of a linear head, float32.

    Attributes:
        weight: [d].
        bias: scalar.
    """

    weight: Array
    bias: Array


def init_head(hidden_size: int) -> Head:
    """Return a head whose output is 0 for every prompt: log Z while the policy is the reference.

    Args:
        hidden_size: d.
    """
    return Head(jnp.zeros(hidden_size, jnp.float32), jnp.float32(0.0))


def read_out(head: Head, states: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """Return the head's output for each state, float32; gradients flow into head and states."""
    return states.astype(jnp.float32) @ head.weight + head.bias


def log_z(
    head: Head,
    params: Any,
    prompts: Int[Array, "p s"],
    prompt_lengths: Int[Array, " p"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    remat: Remat,
    sharding: ComputeSharding | None = None,
) -> Float[Array, " p"]:
    """Return log Z(x) of every prompt: the head on the mean of the prompt's last hidden states.

    Gradients flow into the head and, through the states, into the policy.

    Args:
        head: parameters of the head.
        params: parameters of the policy.
        prompts: left-padded, as `Batch.prompts`.
        prompt_lengths: tokens of each prompt.
        config: model shape.
        compute_dtype: dtype of matmul inputs of the model; the head is float32.
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
    return read_out(head, pooled)
