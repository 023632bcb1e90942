# SPDX-License-Identifier: Apache-2.0
"""Splash attention against the plain path: interpreted here, compiled for TPUs that are absent."""

import importlib.util
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import slow
from fake_models import tiny_config
from jax.sharding import SingleDeviceSharding

from tba_jax.devices.site import any_device
from tba_jax.models import attention, shared_prompts, transformer
from tba_jax.models.shardings import ComputeSharding
from tba_jax.planning import chips

G, R = 2, 2


def arrays(*shapes):
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes]


def with_gradients(run, args, weight):
    """(output, gradients of its sum weighted so); what has no weight has none."""

    def loss(*args):
        out = run(*args)
        return jnp.sum(out * weight), out

    grads, out = jax.jit(jax.grad(loss, argnums=tuple(range(len(args))), has_aux=True))(*args)
    return out, grads


def assert_same(run, wanted, args, weight):
    """Values and gradients, to the rounding of float32 sums in another order."""
    (out, grads), (wanted_out, wanted_grads) = (
        with_gradients(f, args, weight) for f in (run, wanted)
    )
    assert np.isfinite(out).all()
    is_weighed = np.asarray(weight) != 0
    np.testing.assert_allclose(out * is_weighed, wanted_out * is_weighed, atol=1e-5, rtol=1e-5)
    for got, expected in zip(grads, wanted_grads, strict=True):
        assert np.abs(expected).max() > 0.1
        np.testing.assert_allclose(got, expected, atol=2e-5, rtol=2e-5)


SINKS = jnp.asarray(np.linspace(-1.1, 2.3, G * R).reshape(G, R), jnp.float32)


@pytest.mark.parametrize(("window", "cap"), [(None, 2.0), (7, None)])
@pytest.mark.parametrize("shares", [False, True])
@pytest.mark.parametrize("length", [40, slow(400)])
def test_packed_rows_with_windows_caps_and_sinks(length, shares, window, cap):
    """Row 0: a prompt and its two responses, twice; row 1: one response, then padding."""
    n = length // 8
    of_sequences = np.array([[1, 2, 3, 3, 4, 5, 5, 6], [1, 2, 2, 2, 0, 0, 0, 0]])
    of_prompts = np.array([[1, 1, 1, 1, 2, 2, 2, 2], [3, 3, 3, 3, 0, 0, 0, 0]])
    starts = np.array([[1, 0, 0, 0, 1, 0, 0, 0], [1, 0, 0, 0, 0, 0, 0, 0]])
    segments, contexts, is_prompt = (
        jnp.asarray(np.repeat(x, n, axis=1), jnp.int32) for x in (of_sequences, of_prompts, starts)
    )
    rows = attention.packed(segments, *((contexts, is_prompt > 0) if shares else ()))
    head_dim = 16
    args = arrays((2, length, G, R, head_dim), *[(2, length, G, head_dim)] * 2)
    weight = arrays(args[0].shape)[0] * (segments > 0)[:, :, None, None, None]

    def attend(implementation):
        def run(*args):
            scores = attention.Scores(window, cap, args[3])
            how = {"scores": scores, "implementation": implementation}
            return attention.attend_causal(*args[:3], rows, **how)

        return run

    assert_same(attend("splash"), attend("xla"), [*args, SINKS], weight)


def compiled_layers(topology, head_dim, apply):
    """The program of the gradient of `apply(params, config=..., ...)`, for a TPU."""
    config = tiny_config(
        hidden_size=128,
        num_heads=2,
        num_kv_heads=1,
        head_dim=head_dim,
        mlp_size=128,
    )
    where = SingleDeviceSharding(chips.parse_topology(topology).devices()[0])
    params = jax.tree.map(
        lambda p: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=where),
        transformer.abstract_params(config, jnp.bfloat16),
    )
    kwargs = {
        "config": config,
        "compute_dtype": jnp.bfloat16,
        "sharding": ComputeSharding(config, any_device("tpu")),
    }

    def loss(params):
        return sum(jnp.sum(x.astype(jnp.float32)) for x in jax.tree.leaves(apply(params, **kwargs)))

    return jax.jit(jax.grad(loss)).lower(params).compile().as_text()


TOPOLOGIES = pytest.mark.parametrize(
    ("topology", "head_dim"),
    [
        ("v5e:2x2", 64),
        ("v5p:2x2x1", 80),
        ("v6e:2x2", 96),
        ("v6e:2x2", 128),
        ("v5e:2x2", 256),
    ],
)
needs_libtpu = pytest.mark.skipif(
    importlib.util.find_spec("libtpu") is None,
    reason="libtpu is not installed (pip install libtpu)",
)


@pytest.mark.slow
@needs_libtpu
@TOPOLOGIES
def test_layers_compile_for_tpus_without_scores_in_memory(topology, head_dim):
    """Three kernels: forward, and gradients of queries and of keys."""
    b, c, x, t = 2, 4, 320, 384

    def behind_a_prompt(params, **kwargs):
        tokens = jnp.zeros((b, x + c * t), jnp.int32)
        rows = shared_prompts.Rows(jnp.arange(x)[None] >= jnp.full((b, 1), x // 2), c)
        return transformer.apply(params, tokens, tokens, rows, **kwargs)

    def packed(params, **kwargs):
        index = jnp.broadcast_to(jnp.arange(t, dtype=jnp.int32), (b, t))
        visible = attention.packed(1 + index // 64, 1 + index // 128, index % 128 < 64)
        return transformer.apply(params, index % 23, index, visible, **kwargs)

    for apply in (behind_a_prompt, packed):
        text = compiled_layers(topology, head_dim, apply)
        assert len(re.findall(r"custom_call_target=\"tpu_custom_call\"", text)) == 3
        assert not re.search(rf"f32\[[\d,]*{t},({t}|{x}|{x + t})\]", text)
