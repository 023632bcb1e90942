# SPDX-License-Identifier: Apache-2.0
"""Gated DeltaNet: chunks, single tokens, packed rows and shared prompts compute one recurrence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import attention, delta
from tba_jax.models.kv_cache import State

# Key heads, value heads of each, sizes of keys and values, tokens of the convolution.
H, R, K, F, T = 2, 3, 8, 5, 4
# Float32 sums in another order; outputs are of order 1.
TOLERANCE = {"atol": 1e-5, "rtol": 0}


def random_inputs(b, s, seed=0):
    """As projections are; keys of neighbours are alike, so that corrections are large."""
    rng = np.random.default_rng(seed)
    qkv = rng.normal(size=(b, s, H, 2 * K + R * F)) + 2 * rng.normal(size=(b, 1, H, 1))
    return delta.Inputs(
        qkv.astype(np.float32),
        rng.normal(size=(H, 2 * K + R * F, T)).astype(np.float32),
        -rng.exponential(0.2, (b, s, H, R)).astype(np.float32),
        rng.uniform(0.5, 1, (b, s, H, R)).astype(np.float32),
        K,
    )


@jax.jit
def mixed(qkv, taps, decay, rate, mask, ends):
    return delta.mix(delta.Inputs(qkv, taps, decay, rate, K), attention.causal(mask), None, ends)


def recurrence(x, row, index):
    """(outputs, state) of the tokens at these indices, one after the other, in float64."""
    qkv, taps, decay, rate = (np.asarray(y, np.float64) for y in x[:4])
    tokens = np.concatenate([np.zeros((T - 1, *qkv.shape[2:])), qkv[row, index]])
    state, outs = np.zeros((H, R, K, F)), []

    def unit(y):
        return y / np.sqrt((y * y).sum(-1, keepdims=True) + 1e-6)

    for i, at in enumerate(index):
        z = sum(tokens[i + t] * taps[..., t] for t in range(T))
        z = z / (1 + np.exp(-z))
        q, k, v = unit(z[:, :K]) * K**-0.5, unit(z[:, K : 2 * K]), z[:, 2 * K :].reshape(H, R, F)
        state = state * np.exp(decay[row, at])[..., None, None]
        wrong = v - np.einsum("hk,hrkf->hrf", k, state)
        state = state + np.einsum("hk,hrf,hr->hrkf", k, wrong, rate[row, at])
        outs.append(np.einsum("hk,hrkf->hrf", q, state))
    return np.stack(outs), state


@pytest.mark.parametrize("side", ["left", "right"])
def test_chunks_and_single_tokens_compute_the_recurrence(side):
    """Two rows of several chunks, one of them padded; the states after both ways are the same."""
    s, short = 2 * delta.CHUNK + 9, 70
    x, mask = random_inputs(2, s), np.ones((2, s), bool)
    padding = slice(0, s - short) if side == "left" else slice(short, s)
    mask[1, padding] = False
    ends = np.array([s, short]) if side == "right" else None
    out, state = mixed(*x[:4], mask, ends)

    def step(state, token):
        qkv, decay, rate, mask = (y[:, None] for y in token)
        visible = attention.causal(mask, is_right_padded=True)
        out, new = delta.mix(delta.Inputs(qkv, x.taps, decay, rate, K), visible, state)
        # Rows are not decoded after their end.
        return jax.tree.map(lambda a, b: jnp.where(_like(mask, a), a, b), new, state), out[:, 0]

    empty = State(jnp.zeros((2, H, R, K, F)), jnp.zeros((2, H, T - 1, 2 * K + R * F)))
    tokens = [jnp.moveaxis(jnp.asarray(y), 1, 0) for y in (x.qkv, x.decay, x.rate, mask)]
    last, steps = jax.jit(lambda *tokens: jax.lax.scan(step, empty, tokens))(*tokens)
    np.testing.assert_allclose(np.moveaxis(steps, 0, 1)[mask], out[mask], **TOLERANCE)
    for a, b in zip(last, state, strict=True):
        np.testing.assert_allclose(a, b, **TOLERANCE)
    for row in range(2):
        wanted, after = recurrence(x, row, np.flatnonzero(mask[row]))
        assert np.abs(wanted).max() > 0.5
        np.testing.assert_allclose(out[row][mask[row]], wanted, **TOLERANCE)
        np.testing.assert_allclose(state.memory[row], after, **TOLERANCE)


def _like(mask, x):
    return mask.reshape(-1, *[1] * (x.ndim - 1))


# (prompt, tokens), of a row: boundaries within chunks, at their ends, and several in one.
PARTS = [("p", 66), ("r", 5), ("r", 57), ("p", 2), ("r", 1), ("r", 3), ("p", 20), ("r", 50)]


@pytest.mark.parametrize("is_shared", [False, True])
def test_packed_sequences_do_not_see_one_another_and_share_their_prompt(is_shared):
    length = sum(n for _, n in PARTS) + 10
    segments, contexts = np.zeros((1, length), int), np.zeros((1, length), int)
    is_prompt, spans, at = np.zeros((1, length), bool), [], 0
    for i, (kind, n) in enumerate(PARTS):
        span = slice(at, at + n)
        segments[0, span], is_prompt[0, span] = i + 1, kind == "p"
        contexts[0, span] = sum(k == "p" for k, _ in PARTS[: i + 1])
        spans.append(np.arange(at, at + n))
        at += n
    x = random_inputs(1, length)

    def total(qkv):
        visible = attention.packed(segments, *((contexts, is_prompt) if is_shared else ()))
        out, _ = delta.mix(delta.Inputs(qkv, *x[1:]), visible)
        return jnp.sum(out[:, :at] ** 2), out

    run = jax.jit(jax.value_and_grad(total, has_aux=True))
    (_, out), gradient = run(x.qkv)
    prompt = spans[0]
    for (kind, n), span in zip(PARTS, spans, strict=True):
        prompt = span if kind == "p" else prompt
        path = span if kind == "p" or not is_shared else np.concatenate([prompt, span])
        np.testing.assert_allclose(out[0, span], recurrence(x, 0, path)[0][-n:], **TOLERANCE)

    # A numeric derivative in the direction of a random change.
    change = np.random.default_rng(1).normal(size=x.qkv.shape).astype(np.float32)
    more, less = (run(x.qkv + size * change)[0][0] for size in (1e-2, -1e-2))
    slope = (more - less) / 2e-2
    np.testing.assert_allclose(np.vdot(gradient, change), slope, rtol=1e-2)
