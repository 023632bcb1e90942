# SPDX-License-Identifier: Apache-2.0
"""The transformer on prompts with several responses each; every prompt is computed once.

Prompts and responses are two residual streams that pass every layer one after the other, so that
weights are gathered once per layer. A response sees its whole prompt, and itself causally. Its
softmax has two parts, merged by their normalisers, so that no prompt data is repeated per response;
only flash attention repeats keys and values. Invariant: the states equal those of each prompt and
response in a row of `transformer.apply`, up to rounding.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float, Int

from tba_jax.models import attention, delta
from tba_jax.models.architecture import LayerKind
from tba_jax.models.attention import capped, merge, partial, with_sinks
from tba_jax.models.block import Rope
from tba_jax.models.kv_cache import State
from tba_jax.models.layer_loop import Remat, run_layers
from tba_jax.models.transformer import (
    Params,
    TransformerConfig,
    embed,
    final_norm,
    kernels_of,
    rotary,
    run_layer,
    scores_of,
)


class Seen(NamedTuple):
    """Keys (after rotation) and values of prompts in one layer.

    Attributes:
        keys, values: [b x g e], keys and values of the prompts.
        mask: bool [b x], the valid positions.
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
    """Return (state at each prompt's last token, states of its responses), after the final norm.

    The output at a padded position is finite but has no meaning.

    Args:
        params: parameters from `init_params` or `model.load`, also in the decoder's layout.
        prompts: token IDs of the prompts, left-padded.
        responses: token IDs of c responses per prompt, right-padded.
        prompt_lengths: number of tokens of each prompt, at least one.
        config, compute_dtype, remat, sharding: as in `transformer.apply`.

    Raises:
        ValueError: as `transformer.apply`.
    """
    x, t = prompts.shape[1], responses.shape[2]
    start = (x - prompt_lengths)[:, None]
    index = jnp.arange(x)[None]
    mask = index >= start
    visible = attention.causal(mask)
    of_prompts = jnp.maximum(index - start, 0)
    after = prompt_lengths[:, None, None] + jnp.arange(t)[None, None]
    of_responses = jnp.broadcast_to(after, responses.shape)

    kernels = kernels_of(config, sharding)
    block: Any = {"config": config, "mesh": None if sharding is None else sharding.mesh}

    angles = rotary(of_prompts, config), rotary(of_responses, config)
    layers = [_layer_of(kind, visible, angles, kernels, block) for kind in config.pattern]
    kwargs: Any = {"config": config, "compute_dtype": compute_dtype}
    streams = (
        embed(params, prompts, of_prompts, **kwargs),
        embed(params, responses, of_responses, **kwargs),
    )
    prompt, response = run_layers(layers, streams, params, remat=remat, sharding=sharding, **kwargs)
    return (
        final_norm(params, prompt[:, -1], config=config),
        final_norm(params, response, config=config),
    )


def _layer_of(
    kind: LayerKind,
    visible: attention.Visible,
    angles: tuple[dict[LayerKind, Rope], dict[LayerKind, Rope]],
    kernels: attention.Kernels,
    block: dict[str, Any],
) -> Any:
    """Return the function of `run_layers` for layers of this kind.

    Args:
        visible: of the prompts.
        angles: rotary angles of prompts and responses.
        kernels: what decides the implementation of attention.
        block: keyword arguments of `run_layer`.
    """

    def keep(q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, Seen]:
        scores = scores_of(kind, block["config"], sinks)
        out = attention.attend_causal(q, k, v, visible, scores=scores, kernels=kernels)
        return out, Seen(k, v, visible.mask)

    def layer(streams: tuple[Array, Array], layer_params: Params) -> tuple[Array, Array]:
        prompt, response = streams
        first = functools.partial(delta.mix, visible=visible) if kind == "delta" else keep
        prompt, seen = run_layer(layer_params, prompt, angles[0][kind], first, **block)

        def look(q: Array, k: Array, v: Array, sinks: Array | None) -> tuple[Array, None]:
            scores = scores_of(kind, block["config"], sinks)
            return attend_after(q, k, v, seen, scores=scores, kernels=kernels), None

        then = functools.partial(_mix_after, state=seen) if kind == "delta" else look
        response, _ = run_layer(layer_params, response, angles[1][kind], then, **block)
        return prompt, response

    return layer


def _mix_after(x: delta.Inputs, state: State) -> tuple[Float[Array, "b c t h r f"], None]:
    """Return a delta layer's outputs for responses [b c t ...] after the state of their prompt."""
    b, c, t = x.qkv.shape[:3]

    def flat(y: Array) -> Array:
        return y.reshape(b * c, *y.shape[2:])

    rows = x._replace(qkv=flat(x.qkv), decay=flat(x.decay), rate=flat(x.rate))
    visible = attention.causal(jnp.ones((b * c, t), bool), is_right_padded=True)
    copies = jax.tree.map(lambda y: jnp.repeat(y, c, axis=0), state)
    out = delta.mix(rows, visible, copies)[0]
    return out.reshape(b, c, *out.shape[1:]), None


def attend_after(
    q: Float[Array, "b c t g r e"],
    k: Float[Array, "b c t g e"],
    v: Float[Array, "b c t g e"],
    seen: Seen,
    *,
    scores: attention.Scores = attention.PLAIN,
    kernels: attention.Kernels = attention.NO_KERNELS,
    implementation: attention.Implementation | None = None,
) -> Float[Array, "b c t g r e"]:
    """Return softmax attention of responses to their prompt and, causally, to themselves.

    Padding after a response is visible only to padding, so it needs no mask.

    Args:
        q, k, v: queries, keys and values of the responses; q and k rotated.
        seen: the prompts; at least one position of each is valid.
        scores: as in `attention.attend_causal`.
        kernels: what decides the implementation.
        implementation: xla: two parts, without repetition; cudnn and splash: one row per response;
            None: `kernels.select`.
    """
    if implementation is None:
        length = seen.keys.shape[1] + q.shape[2]
        implementation = kernels.select(q.dtype, q.shape[-1], scores, length)
    if implementation == "xla":
        return _in_parts(q, k, v, seen, scores)
    return _attend_in_rows(q, k, v, seen, scores, kernels, implementation)


def _in_parts(
    q: Float[Array, "b c t g r e"],
    k: Float[Array, "b c t g e"],
    v: Float[Array, "b c t g e"],
    seen: Seen,
    scores: attention.Scores = attention.PLAIN,
) -> Float[Array, "b c t g r e"]:
    """Attend to prompts and responses by einsum, without repetition of the prompts."""
    (b, c, t, g, r, e), x = q.shape, seen.mask.shape[1]
    scale = e**-0.5
    # The queries of all responses are the rows of one product with the prompt's keys, with batch
    # axes first. With another order XLA:CPU transposes the scores, the largest arrays here.
    before = _products(jnp.transpose(q, (0, 3, 4, 1, 2, 5)).reshape(b, g, r * c * t, e), seen.keys)
    padding = jnp.where(seen.mask, 0.0, attention.MASKED)[:, None, None]
    before = capped(before * scale, scores.cap) + padding
    if scores.window is not None:
        near = _near_prompt(t, x, scores.window)[None, None, None]
        before = (before.reshape(b, g, r * c, t, x) + near).reshape(b, g, r * c * t, x)
    to_prompt = partial(before, jnp.swapaxes(seen.values, 1, 2), "bgnx,bgxe->bgne")
    own = _products(
        jnp.transpose(q, (0, 1, 3, 4, 2, 5)).reshape(b * c, g, r * t, e), _flat(k)
    ).reshape(b * c, g, r, t, t)
    own = capped(own * scale, scores.cap) + _later(t, scores)[None, None, None]
    own = own.reshape(b * c, g, r * t, t)
    to_own = partial(own, jnp.swapaxes(_flat(v), 1, 2), "bgnx,bgxe->bgne")
    to_own = jax.tree.map(lambda y: y.reshape(b, c, g, r, t, -1), to_own)
    if scores.sinks is not None:
        to_own = with_sinks(to_own, scores.sinks[None, None, :, :, None, None])
    out = merge(
        jax.tree.map(lambda y: y.reshape(b, g, r, c, t, -1).transpose(0, 3, 1, 2, 4, 5), to_prompt),
        to_own,
    )
    return out.transpose(0, 1, 4, 2, 3, 5).astype(q.dtype)


def _later(t: int, scores: attention.Scores) -> Float[Array, "t t"]:
    """Return the mask bias of a response's queries for the keys of the response."""
    index = jnp.arange(t)
    is_seen = index[None, :] <= index[:, None]
    if scores.window is not None:
        is_seen = is_seen & (index[:, None] - index[None, :] < scores.window)
    return jnp.where(is_seen, 0.0, attention.MASKED)


def _near_prompt(t: int, x: int, window: int) -> Float[Array, "t x"]:
    """Return the mask bias of a response's queries for the keys of its left-padded prompt."""
    distance = jnp.arange(t)[:, None] + x - jnp.arange(x)[None, :]
    return jnp.where(distance < window, 0.0, attention.MASKED)


def _flat(x: Float[Array, "b c t g e"]) -> Float[Array, "bc t g e"]:
    """Merge the axes of rows and responses: each response becomes a row."""
    return x.reshape(-1, *x.shape[2:])


def _products(rows: Float[Array, "b g n e"], keys: Float[Array, "b x g e"]) -> Array:
    """Return the products [b g n x] of rows and keys, accumulated in float32 or wider."""
    wide = jnp.promote_types(rows.dtype, jnp.float32)
    keys = jnp.swapaxes(keys, 1, 2)
    return jnp.einsum("bgne,bgxe->bgnx", rows, keys, preferred_element_type=wide)


def _attend_in_rows(
    q: Float[Array, "b c t g r e"],
    k: Float[Array, "b c t g e"],
    v: Float[Array, "b c t g e"],
    seen: Seen,
    scores: attention.Scores = attention.PLAIN,
    kernels: attention.Kernels = attention.NO_KERNELS,
    implementation: attention.Implementation = "cudnn",
) -> Float[Array, "b c t g r e"]:
    """Attend with the prompt's keys and values repeated before those of each response.

    The log-sum-exp of a kernel has no gradient, so the attention to prompt and response cannot be
    merged from two calls. The causal mask of a kernel starts at the first key, so the prompt needs
    query positions, too. Computing the layers of the prompt once saves more than these products
    cost.
    """
    b, c, t = q.shape[:3]
    x = seen.keys.shape[1]

    def after(prompt: Array, own: Array) -> Array:
        repeated = jnp.broadcast_to(prompt[:, None], (b, c, *prompt.shape[1:]))
        return jnp.concatenate([repeated, own], axis=2).reshape(b * c, x + t, *own.shape[3:])

    nothing = jnp.zeros((b, x, *q.shape[3:]), q.dtype)
    visible = attention.causal(after(seen.mask, jnp.ones((b, c, t), bool)))
    rows = after(nothing, q), after(seen.keys, k), after(seen.values, v)
    how: Any = {"scores": scores, "kernels": kernels, "implementation": implementation}
    out = attention.attend_causal(*rows, visible, **how)
    return out[:, x:].reshape(q.shape)
