# SPDX-License-Identifier: Apache-2.0
"""Experts divided over devices; test_families compares their values with transformers."""

import jax
import jax.numpy as jnp
import numpy as np
from fake_models import random_params, tiny_config

from tba_jax.models import experts


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
