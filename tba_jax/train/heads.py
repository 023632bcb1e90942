# SPDX-License-Identifier: Apache-2.0
"""Heads on the policy's hidden states, linear or deeper: a learned log Z(x), or state values.

A learned log Z is an alternative to VarGrad for small groups and for groups from several samplers.
The estimate depends on the prompt's tokens alone, not on padding or on any response.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Remat, TransformerConfig, apply


class Hidden(NamedTuple):
    """One hidden layer of a head, float32: matrix, GELU, LayerNorm.

    Attributes:
        weight: [d d].
        bias, scale, shift: [d].
    """

    weight: Array
    bias: Array
    scale: Array
    shift: Array


class Head(NamedTuple):
    """Parameters of the head, float32.

    Attributes:
        weight: [d].
        bias: scalar.
        hidden: hidden layers, from the first to the last; () for a linear head.
    """

    weight: Array
    bias: Array
    hidden: tuple[Hidden, ...] = ()


def init_head(hidden_size: int, num_layers: int = 1) -> Head:
    """Return a head whose output is 0 for every prompt: log Z while the policy is the reference.

    Args:
        hidden_size: d.
        num_layers: number of layers; 1 is a linear head. FlowRL uses 3 with dropout 0.1; dropout is
            not implemented here.
    """
    keys = jax.random.split(jax.random.key(0), num_layers)

    def hidden(key: Array) -> Hidden:
        # Variance 1 / (3 d), as in torch's Linear.
        bound = hidden_size**-0.5
        shape = (hidden_size, hidden_size)
        return Hidden(
            jax.random.uniform(key, shape, jnp.float32, -bound, bound),
            jnp.zeros(hidden_size, jnp.float32),
            jnp.ones(hidden_size, jnp.float32),
            jnp.zeros(hidden_size, jnp.float32),
        )

    below = tuple(hidden(key) for key in keys[1:])
    return Head(jnp.zeros(hidden_size, jnp.float32), jnp.float32(0.0), below)


def _apply_hidden(layer: Hidden, x: Float[Array, "p d"]) -> Float[Array, "p d"]:
    x = jax.nn.gelu(x @ layer.weight + layer.bias[None], approximate=False)
    return layer.scale[None] * jax.nn.standardize(x, axis=-1, epsilon=1e-5) + layer.shift[None]


def read_out(head: Head, states: Float[Array, "*n d"]) -> Float[Array, "*n"]:
    """Return the head's output for each state, float32; gradients flow into head and states."""
    x = states.astype(jnp.float32).reshape(-1, states.shape[-1])
    for layer in head.hidden:
        x = _apply_hidden(layer, x)
    return (x @ head.weight + head.bias).reshape(states.shape[:-1])


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
        TBA, arXiv:2503.18929, appendix B.3; deeper heads: FlowRL, arXiv:2509.15207.
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
