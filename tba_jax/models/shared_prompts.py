# SPDX-License-Identifier: Apache-2.0
"""The transformer over prompts with several responses each, every prompt computed once.

Prompts and responses are two residual streams that pass every layer one after the other, so that a
layer's weights are gathered once. A response sees all of its prompt and itself up to each position:
a softmax in two parts, merged by their normalisers, so that nothing of a prompt is repeated for its
responses; for flash attention its keys and values are. It does not know rows of several sequences,
losses or log-probs. The invariant it owns: states are those of each prompt and response alone in a
row of `transformer.apply`, to rounding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tba_jax.models import attention
from tba_jax.models.layer_loop import Remat, run_layers
from tba_jax.models.partial_softmax import Partial, merge
from tba_jax.models.transformer import (
    Params,
    TransformerConfig,
    choose_attention,
    embed,
    final_norm,
    rotary,
    run_layer,
)


class Seen(NamedTuple):
    """A layer's keys (after rotation) and values of prompts, and which positions are valid.

    Attributes:
        keys, values: [b x g e].
        mask: bool [b x].
    """

    keys: Array
    values: Array
    mask: Array


def apply(
    params: Params,
    prompts: Int[Array, "b x"],
    responses: Int[Array, "b c t"],
    prompt_lengths: Int[Array, " b"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    remat: Remat = "none",
    sharding: Any = None,
) -> tuple[Float[Array, "b d"], Float[Array, "b c t d"]]:
    """(state at the last token of each prompt, states of its responses), after the final norm.

    What comes out at a padded position is finite and meaningless.

    Args:
        params: from `init_params` or `model.load`, or these in the decoder's layout.
        prompts: left-padded.
        responses: c to each prompt, right-padded.
        prompt_lengths: tokens of each prompt; at least one.
        config, compute_dtype, remat, sharding: as in `transformer.apply`.

    Raises:
        ValueError: as `transformer.apply`.
    """
    x, t = prompts.shape[1], responses.shape[2]
    first = (x - prompt_lengths)[:, None]
    index = jnp.arange(x)[None]
    mask = index >= first
    visible = attention.causal(mask)
    of_prompts = jnp.maximum(index - first, 0)
    after = prompt_lengths[:, None, None] + jnp.arange(t)[None, None]
    of_responses = jnp.broadcast_to(after, responses.shape)
    angles = rotary(of_prompts, config), rotary(of_responses, config)

    implementation = choose_attention(config, compute_dtype, sharding)

    def keep(q: Array, k: Array, v: Array) -> tuple[Array, Seen]:
        out = attention.attend_causal(q, k, v, visible, implementation=implementation)
        return out, Seen(k, v, mask)

    def layer(streams: tuple[Array, Array], layer_params: Params) -> tuple[Array, Array]:
        prompt, response = streams
        prompt, seen = run_layer(layer_params, prompt, angles[0], keep, config=config)

        def look(q: Array, k: Array, v: Array) -> tuple[Array, None]:
            return attend_after(q, k, v, seen, implementation=implementation), None

        return prompt, run_layer(layer_params, response, angles[1], look, config=config)[0]

    kwargs: Any = {"config": config, "compute_dtype": compute_dtype}
    streams = (
        embed(params, prompts, of_prompts, **kwargs),
        embed(params, responses, of_responses, **kwargs),
    )
    prompt, response = run_layers(
        layer, streams, params, compute_dtype=compute_dtype, remat=remat, sharding=sharding
    )
    return (
        final_norm(params, prompt[:, -1], config=config),
        final_norm(params, response, config=config),
    )


def attend_after(
    q: Float[Array, "b c t g r e"],
    k: Float[Array, "b c t g e"],
    v: Float[Array, "b c t g e"],
    seen: Seen,
    *,
    implementation: attention.Implementation = "xla",
) -> Float[Array, "b c t g r e"]:
    """Softmax attention of responses to their prompt and, causally, to themselves.

    Padding behind a response is seen by padding alone, so it needs no mask.

    Args:
        q, k, v: of the responses; q and k rotated.
        seen: the prompts; at least one position of each is valid.
        implementation: xla: in two parts, nothing is repeated; else, by that implementation, in
            rows of their own.
    """
    if implementation != "xla":
        return _attend_in_rows(q, k, v, seen, implementation)
    index, scale = jnp.arange(q.shape[2]), q.shape[-1] ** -0.5
    wide = jnp.promote_types(q.dtype, jnp.float32)
    # The queries of all responses are the rows of one product with the prompt's keys.
    before = jnp.einsum("bctgre,bxge->bgrctx", q, seen.keys, preferred_element_type=wide)
    padding = jnp.where(seen.mask, 0.0, attention.MASKED)[:, None, None, None, None]
    own = jnp.einsum("bctgre,bcuge->bcgrtu", q, k, preferred_element_type=wide)
    later = jnp.where(index[None, :] <= index[:, None], 0.0, attention.MASKED)
    parts = (
        _partial(before * scale + padding, seen.values, "bgrctx,bxge->bctgre"),
        _partial(own * scale + later[None, None, None, None], v, "bcgrtu,bcuge->bctgre"),
    )
    return merge(*parts).astype(q.dtype)


def _attend_in_rows(
    q: Float[Array, "b c t g r e"],
    k: Float[Array, "b c t g e"],
    v: Float[Array, "b c t g e"],
    seen: Seen,
    implementation: attention.Implementation,
) -> Float[Array, "b c t g r e"]:
    """The same with keys and values of the prompt before those of each response.

    For flash attention: what it gives back of a part (cuDNN's residual) has no gradient, so its
    parts cannot be merged; and its causal mask begins at the first key, so queries stand at the
    prompt too. Beside what is saved (the layers of the prompt) these products are few.
    """
    b, c, t = q.shape[:3]
    x = seen.keys.shape[1]

    def after(prompt: Array, own: Array) -> Array:
        repeated = jnp.broadcast_to(prompt[:, None], (b, c, *prompt.shape[1:]))
        return jnp.concatenate([repeated, own], axis=2).reshape(b * c, x + t, *own.shape[3:])

    nothing = jnp.zeros((b, x, *q.shape[3:]), q.dtype)
    visible = attention.causal(after(seen.mask, jnp.ones((b, c, t), bool)))
    rows = after(nothing, q), after(seen.keys, k), after(seen.values, v)
    out = attention.attend_causal(*rows, visible, implementation=implementation)
    return out[:, x:].reshape(q.shape)


def _partial(scores: Array, values: Array, equation: str) -> Partial:
    """The softmax over these scores, its parts as [b c t g r ...]."""
    # Whatever is subtracted cancels, so no gradient has to flow through it.
    most = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True))
    weights = jnp.exp(scores - most)
    total = jnp.sum(weights, axis=-1, keepdims=True)
    wide = scores.dtype
    out = jnp.einsum(equation, weights.astype(values.dtype), values, preferred_element_type=wide)
    axes = (0, 3, 4, 1, 2, 5) if equation.startswith("bgr") else (0, 1, 4, 2, 3, 5)
    return Partial(out, most.transpose(axes), total.transpose(axes))
