# SPDX-License-Identifier: Apache-2.0
"""A prompt computed once for its responses gives what rows of their own give.

Contract: log-probs, states and gradients of each kind of layer in every layout, with rows of
padding; every parameter has a gradient; and flash attention, which repeats the prompt.
"""

import functools
from dataclasses import replace

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import lay_out, make_draws, slow
from fake_models import KINDS, random_params, tiny_config

from tba_jax.models import attention, shared_prompts
from tba_jax.models.logprobs import Scoring
from tba_jax.train.scoring import make_score, rows_of
from tba_jax.train.state import Head

# Prompts of 5, 2 and 3 tokens, four responses to each, of up to six.
PROMPT_LENGTHS = np.array([5, 2, 3], np.int32)
B, C, X, T = 3, 4, 5, 6
OWN = {"row_multiple": 5}  # rows of padding
SHARED = {"row_multiple": 4, "shares_prompts": True}
PACKED = {"row_length": 24}
LAYOUTS = (OWN, SHARED, PACKED, PACKED | {"shares_prompts": True})
SLOW = [slow(family, True, 1) for family in (*KINDS, "gpt_neox")]


@functools.cache
def draws():
    found = make_draws(p=B, k=C, prompt=X, t=T, seed=4)
    return [
        d._replace(prompt=replace(d.prompt, tokens=d.prompt.tokens[X - n :]))
        for d, n in zip(found, PROMPT_LENGTHS, strict=True)
    ]


@pytest.mark.parametrize(
    ("family", "has_gradients", "step"),
    # By default gradients of attention, and values of delta layers, whose state forks.
    [("qwen2", True, 2), ("qwen3_5_text", False, 2), *SLOW],
)
def test_every_layout_has_numbers_and_gradients_of_rows_of_their_own(family, has_gradients, step):
    # A delta layer and a full one take less to compile than three.
    fewer = {} if has_gradients else {"num_layers": 2}
    config, rng = tiny_config(family=family, **fewer), np.random.default_rng(1)
    cotangent = rng.normal(size=(B, C, T, 2))  # of a log-prob, and of a number of the state before
    scoring = Scoring(0.7, compute_dtype="float64")
    options = {"config": config, "scoring": scoring}
    options["remat"] = "layers" if has_gradients else "none"
    score = make_score(None, T, has_head=True, **options)

    def found(trained, layout):
        batch = lay_out(draws(), **layout)

        def loss(trained):
            of_rows = score(trained, rows_of(batch)).reshape(-1, 2)
            each = jnp.take(of_rows, batch.source, axis=0, mode="fill", fill_value=0)
            each = jnp.where(batch.mask[..., None], each, 0)
            return jnp.sum(each * cotangent), each

        run = jax.grad(loss, has_aux=True) if has_gradients else lambda x: (None, loss(x)[1])
        return jax.device_get(jax.jit(run)(trained))

    with jax.enable_x64(True):
        head = Head(jnp.asarray(rng.normal(size=config.hidden_size)), jnp.float64(0.3))
        trained = random_params(config), head
        trained = jax.tree.map(lambda x: x.astype(jnp.float64), trained)
        wanted_gradient, wanted = found(trained, OWN)
        for layout in LAYOUTS[1::step]:  # test_step.py and test_delta.py have packed rows alone
            gradient, each = found(trained, layout)
            # Log-probs are rounded to float32 once; all before them is float64.
            chex.assert_trees_all_close(each, wanted, rtol=1e-6, atol=1e-6)
            chex.assert_trees_all_close(gradient, wanted_gradient, rtol=1e-5, atol=2e-5)
    assert np.abs(wanted).max() > 1
    for path, x in jax.tree_util.tree_leaves_with_path(wanted_gradient):
        assert np.abs(x).max() > 0, jax.tree_util.keystr(path)


@pytest.mark.parametrize("window", [None, 4])
def test_attention_behind_a_prompt_is_that_of_rows_of_their_own(monkeypatch, window):
    """The rows of flash attention, computed by the einsum, against the two parts."""
    shapes = [(B, X + C * T, *heads) for heads in ((2, 3, 4), (2, 4), (2, 4))]
    mask = jnp.asarray(np.arange(X)[None] >= X - PROMPT_LENGTHS[:, None])
    scores = attention.Scores(window)
    plain = attention.attend_causal

    def by_einsum(*args, kernels, **kwargs):
        assert args[0].shape[:2] == (B * C, X + T) and kernels.wanted == "splash"
        return plain(*args, **kwargs)

    def with_gradients(implementation):
        def run(*args):
            rows, how = shared_prompts.Rows(mask, C), {"kernels": attention.Kernels(implementation)}
            out = shared_prompts.attend(*args, rows, scores=scores, **how)
            return jnp.where(is_valid[:, :, None, None, None], out, 0)

        out, pull = jax.vjp(jax.jit(run), *arrays)
        return out, pull(cotangent)

    with jax.enable_x64(True):
        rng = np.random.default_rng(2)
        *arrays, cotangent = (jnp.asarray(rng.normal(size=x)) for x in [*shapes, shapes[0]])
        is_valid = jnp.pad(mask, ((0, 0), (0, C * T)), constant_values=True)
        wanted = with_gradients("xla")
        monkeypatch.setattr(attention, "attend_causal", by_einsum)
        got = with_gradients("splash")
    assert np.abs(wanted[1][1]).max() > 0.1
    chex.assert_trees_all_close(got, wanted, rtol=0, atol=1e-12)
