# SPDX-License-Identifier: Apache-2.0
"""Attention in rows of a prompt with several responses behind it; every prompt is computed once.

A response sees its whole prompt, and itself causally. Its softmax has two parts, so that no prompt
data is repeated per response; only flash attention repeats the prompt. Invariant: the outputs equal
those of each response in a row with its own prompt, up to rounding.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float

from tba_jax.models import attention, delta


class Rows(NamedTuple):
    """Rows of a left-padded prompt of x positions, then c right-padded responses of t positions.

    Attributes:
        mask: bool [b x], the valid positions of prompts, at least one.
        num_responses: c.
    """

    mask: Bool[Array, "b x"]
    num_responses: int

    def split(self, y: Float[Array, "b s *rest"]) -> tuple[Array, Array]:
        """Return (prompts [b x ...], responses [b c t ...])."""
        x = self.mask.shape[1]
        # The gradient of a split is a concatenation, and not a sum of padded arrays.
        prompt, responses = jax.lax.split(y, (x, y.shape[1] - x), axis=1)
        return prompt, responses.reshape(len(y), self.num_responses, -1, *y.shape[2:])

    def join(self, prompt: Array, responses: Array) -> Float[Array, "b s *rest"]:
        """Return the inverse of `split`."""
        flat = responses.reshape(len(prompt), -1, *prompt.shape[2:])
        return jnp.concatenate([prompt, flat], axis=1)


def attend(
    q: Float[Array, "b s g r e"],
    k: Float[Array, "b s g e"],
    v: Float[Array, "b s g e"],
    rows: Rows,
    *,
    scores: attention.Scores = attention.PLAIN,
    kernels: attention.Kernels = attention.NO_KERNELS,
) -> Float[Array, "b s g r e"]:
    """Return softmax attention of prompts and responses; arguments as in `attend_causal`.

    Padding after a response is visible only to padding, so it needs no mask.
    """
    # Of prompts (x) and responses (y).
    (q_x, q_y), (k_x, k_y), (v_x, v_y) = (rows.split(part) for part in (q, k, v))
    (b, c, t, *_), x = q_y.shape, rows.mask.shape[1]
    kernels = kernels._replace(wanted=kernels.select(q.dtype, q.shape[-1], scores, x + t))
    if kernels.wanted == "xla":
        visible = attention.causal(rows.mask)
        of_prompts = attention.attend_causal(q_x, k_x, v_x, visible, scores=scores)
        return rows.join(of_prompts, _after_prompts(q_y, k_y, v_y, k_x, v_x, rows.mask, scores))

    # The log-sum-exp of a kernel has no gradient, so two calls cannot be merged: each response is
    # in a row with a copy of its prompt.
    def row(prompt: Array, own: Array) -> Array:
        repeated = jnp.broadcast_to(prompt[:, None], (b, c, *prompt.shape[1:]))
        return jnp.concatenate([repeated, own], axis=2).reshape(b * c, x + t, *own.shape[3:])

    visible = attention.causal(row(rows.mask, jnp.ones((b, c, t), bool)))
    how: Any = {"scores": scores, "kernels": kernels}
    out = attention.attend_causal(row(q_x, q_y), row(k_x, k_y), row(v_x, v_y), visible, **how)
    out = out.reshape(b, c, x + t, *out.shape[2:])
    return rows.join(out[:, 0, :x], out[:, :, x:])


def _after_prompts(
    q: Float[Array, "b c t g r e"],
    k: Float[Array, "b c t g e"],
    v: Float[Array, "b c t g e"],
    prompt_k: Float[Array, "b x g e"],
    prompt_v: Float[Array, "b x g e"],
    mask: Bool[Array, "b x"],
    scores: attention.Scores,
) -> Float[Array, "b c t g r e"]:
    """Attend to prompts and responses by einsum, without repetition of the prompts."""
    (b, c, t, g, r, e), x = q.shape, mask.shape[1]
    distance = jnp.arange(t)[:, None] + x - jnp.arange(x)[None, :]
    near = True if scores.window is None else distance < scores.window
    bias = jnp.where(mask[:, None, :] & jnp.broadcast_to(near, (1, t, x)), 0.0, attention.MASKED)
    # The queries of all responses are the rows of one product with the prompt's keys, with batch
    # axes first. With another order XLA:CPU transposes the scores, the largest arrays here.
    rows = jnp.transpose(q, (0, 3, 1, 4, 2, 5))
    keys, values = (jnp.swapaxes(y, 1, 2) for y in (prompt_k, prompt_v))
    before = attention.score(rows.reshape(b, g, c * r * t, e), keys, scores.cap)
    before = before.reshape(b, g, c, r, t, x) + bias[:, None, None, None]

    own_keys, own_values = (jnp.transpose(y, (0, 3, 1, 2, 4)) for y in (k, v))
    own = attention.score(rows.reshape(b, g, c, r * t, e), own_keys, scores.cap)
    visible = attention.causal(jnp.ones((1, t), bool))
    bias = jnp.where(visible.seen(scores.window), 0.0, attention.MASKED)
    own = own.reshape(b, g, c, r, t, t) + bias[:, None, None, None]

    before, own = attention.softmax((before, own), scores.sinks_like((b, g, c, r, t), (1, 3)))
    out = attention.average(before.reshape(b, g, c * r * t, x), values).reshape(rows.shape)
    own = attention.average(own.reshape(b, g, c, r * t, t), own_values)
    return jnp.transpose(out + own.reshape(rows.shape), (0, 2, 4, 1, 3, 5)).astype(q.dtype)


def mix(x: delta.Inputs, visible: Rows) -> tuple[Float[Array, "b s h r f"], None]:
    """Return (outputs of a delta layer, None); responses continue the state of their prompt."""
    parts = {name: visible.split(getattr(x, name)) for name in ("qkv", "decay", "rate")}
    prompts = x._replace(**{name: prompt for name, (prompt, _) in parts.items()})
    of_prompts, state = delta.mix(prompts, attention.causal(visible.mask))
    flat = {name: y.reshape(-1, *y.shape[2:]) for name, (_, y) in parts.items()}
    each = attention.causal(jnp.ones(flat["qkv"].shape[:2], bool), is_right_padded=True)
    copies = jax.tree.map(lambda y: jnp.repeat(y, visible.num_responses, axis=0), state)
    of_responses = delta.mix(x._replace(**flat), each, copies)[0]
    return visible.join(of_prompts, of_responses), None
