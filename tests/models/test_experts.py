# SPDX-License-Identifier: Apache-2.0
"""Each token is computed by its best experts, on one device and divided over several."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config

from tba_jax.models import activations, experts

# Clamped and biased experts of gpt-oss, plain ones of Qwen3, and those beside a shared MLP.
FAMILIES = ("qwen3_moe", "gpt_oss", "qwen3_5_moe_text")


@pytest.mark.parametrize("family", FAMILIES)
def test_a_token_gets_the_weighted_sum_of_its_best_experts(family):
    config = tiny_config(family=family)
    layer = jax.tree.map(lambda x: np.asarray(x[0], np.float64), random_params(config)["layers"])
    rows = np.random.default_rng(1).normal(size=(9, config.hidden_size))
    leaves = {name: layer[name] for name in experts.LEAVES if name in layer}
    logits = rows @ layer["router"] + layer.get("router_bias", 0)
    weights = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
    wanted = np.zeros_like(rows)
    for n, (row, each) in enumerate(zip(rows, weights, strict=True)):
        best = np.argsort(-each)[: config.experts_per_token]
        for i in best:

            def product(name, x, i=i):
                bias = layer.get(f"{name}_bias", np.zeros(config.num_experts))
                return x @ layer[name][i] + bias[i]

            inner = activations.gated(
                config.activation, product("expert_gate", row), product("expert_up", row)
            )
            wanted[n] += product("expert_down", np.asarray(inner)) * each[i] / each[best].sum()
    with jax.enable_x64(True):
        got = experts.feed_forward(
            jnp.asarray(rows), jax.tree.map(jnp.asarray, leaves), config=config
        )
    np.testing.assert_allclose(got, wanted, atol=1e-6)


def test_products_of_rows_for_other_devices_reach_neither_result_nor_gradient(monkeypatch):
    """Such rows, which are in no group, are made nan in products and in their gradients."""

    real = jax.lax.ragged_dot

    @jax.custom_vjp
    def with_nan(x, kernels, sizes):
        return outside_nan(real(x, kernels, sizes), sizes)

    def outside_nan(x, sizes):
        return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], x, jnp.nan)

    def forward(x, kernels, sizes):
        return with_nan(x, kernels, sizes), (x, kernels, sizes)

    def backward(saved, cotangent):
        x, kernels, sizes = saved
        _, pull = jax.vjp(lambda *xs: real(*xs, sizes), x, kernels)
        of_x, of_kernels = pull(cotangent)
        return outside_nan(of_x, sizes), of_kernels, None

    with_nan.defvjp(forward, backward)
    config = tiny_config(family="gpt_oss", num_experts=4, experts_per_token=2)
    layer = jax.tree.map(lambda x: x[0], random_params(config)["layers"])
    leaves = {name: layer[name] for name in experts.LEAVES if name in layer}
    rows = jnp.asarray(np.random.default_rng(0).normal(size=(8, config.hidden_size)), jnp.float32)
    mesh = jax.make_mesh((1, 2), ("fsdp", "expert"), (jax.sharding.AxisType.Auto,) * 2)

    def found(mesh):
        def loss(rows, leaves):
            out = experts.feed_forward(rows, leaves, config=config, mesh=mesh)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(rows, leaves)

    wanted = found(None)
    monkeypatch.setattr(jax.lax, "ragged_dot", with_nan)
    for got, expected in zip(jax.tree.leaves(found(mesh)), jax.tree.leaves(wanted), strict=True):
        # Float32 sums in another order.
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)
