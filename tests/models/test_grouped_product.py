# SPDX-License-Identifier: Apache-2.0
"""Products of rows with the matrix of their group."""

import dataclasses
import functools
import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config

from tba_jax.devices.absent import traced_for
from tba_jax.models import experts, grouped_kernel, transformer
from tba_jax.models.grouped_product import grouped_product
from tba_jax.planning.chips import parse_topology
from tba_jax.planning.hlo_cost import program_cost


def values(sizes, m, k=32, n=48, dtype=jnp.bfloat16):
    rng = np.random.default_rng(0)
    x, kernels, weights = (
        jnp.asarray(rng.normal(size=shape), dtype) for shape in ((m, k), (len(sizes), k, n), (m, n))
    )
    is_in_group = (jnp.arange(m) < sum(sizes))[:, None]
    # Rows after all groups are undefined: they have no weight in the loss.
    weights = jnp.where(is_in_group, weights, 0).astype(jnp.float32)
    return x, kernels, jnp.asarray(sizes, jnp.int32), weights, is_in_group


@pytest.mark.parametrize(
    ("sizes", "m"),
    [
        ((5, 0, 8, 3), 16),
        ((0, 0, 16, 0), 16),
        ((1, 2, 3, 1), 16),
        ((0, 0, 0, 0), 16),
        ((70, 50, 3, 90), 240),  # blocks of 16, several of a group, and rows after all groups
        ((300, 212), 512),  # blocks of 128
    ],
)
def test_the_kernel_gives_the_product_and_the_gradients_of_ragged_dot(sizes, m):
    """Rows after all groups are nan, and nothing of them is seen."""
    x, kernels, num, weights, is_in_group = values(sizes, m)
    bad = jnp.where(is_in_group, x, jnp.nan)

    def found(product, x):
        def loss(x, kernels):
            out = product(x, kernels, num)
            seen = jnp.where(is_in_group, out, 0).astype(jnp.float32)
            return jnp.sum(seen * weights), out

        return jax.grad(loss, argnums=(0, 1), has_aux=True)(x, kernels)

    (of_x, of_kernels), out = found(lambda *xs: grouped_kernel.multiply(True, *xs), bad)
    (wanted_of_x, wanted_of_kernels), wanted = found(jax.lax.ragged_dot, x)
    for got, expected in ((out, wanted), (of_x, wanted_of_x)):
        got, expected = (jnp.where(is_in_group, y, 0) for y in (got, expected))
        # Float32 sums in another order, rounded to bfloat16: one unit of 2^-8.
        np.testing.assert_allclose(*map(np.float32, (got, expected)), rtol=2**-8, atol=1e-6)
    np.testing.assert_allclose(
        *map(np.float32, (of_kernels, wanted_of_kernels)), rtol=2**-8, atol=1e-6
    )
    assert not np.where(is_in_group, 0, np.float32(out)).any()
    assert not np.where(is_in_group, 0, np.float32(of_x)).any()


def test_what_the_kernel_does_not_support_is_left_to_ragged_dot():
    def supports(k, n, dtype):
        x, kernels, *_ = values((5, 11), 16, k, n, dtype)
        return grouped_kernel.supports(x, kernels)

    assert supports(32, 48, jnp.bfloat16) and supports(2880, 16, jnp.float16)
    assert not supports(32, 48, jnp.float32)  # Triton would round the products
    assert not supports(24, 48, jnp.bfloat16) and not supports(32, 40, jnp.bfloat16)
    x, kernels, *_ = values((5, 11), 16)
    assert not grouped_kernel.supports(x, kernels.astype(jnp.float16))


@pytest.mark.parametrize("has_kernel", [True, False])
def test_only_nvidia_gpus_have_the_kernel(has_kernel):
    x, kernels, num, *_ = values((600, 600), 1200)
    lowered = jax.jit(functools.partial(grouped_product, has_kernel=has_kernel))
    jaxpr = str(jax.make_jaxpr(lowered)(x, kernels, num))
    assert ("pallas_call" in jaxpr) == has_kernel
    np.testing.assert_array_equal(
        *map(np.float32, (lowered(x, kernels, num), jax.lax.ragged_dot(x, kernels, num)))
    )


@pytest.mark.parametrize("attention", ["auto", "xla"])
def test_without_attention_kernels_experts_have_none_either(attention, monkeypatch):
    """`model.attention=xla` rules out every kernel as the cause of an error."""
    given = []

    def recorded(x, kernels, sizes, *, has_kernel):
        given.append(has_kernel)
        return jax.lax.ragged_dot(x, kernels, sizes)

    monkeypatch.setattr(experts, "grouped_product", recorded)
    config = dataclasses.replace(tiny_config(family="qwen3_moe"), attention=attention)
    tokens = jnp.ones((1, 4), jnp.int32)
    transformer.apply(
        random_params(config), tokens, tokens, tokens > 0, config=config, compute_dtype=jnp.float32
    )
    assert {*given} == {attention == "auto"}


@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="the compiler for NVIDIA GPUs is not installed (pip install 'jax[cuda12]')",
)
@pytest.mark.filterwarnings("ignore:The Pallas Triton backend:DeprecationWarning")
def test_an_h100_needs_no_copy_of_the_rows_for_each_matrix():
    """Temporaries of the product and its gradient, compiled for an H100 that is not attached."""
    gpu = parse_topology("h100:1").devices()[0]
    device = jax.sharding.SingleDeviceSharding(gpu)
    m, g, k, n = 65_536, 32, 2_048, 768

    def shape(dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=device)

    def compiled(product):
        def loss(x, kernels, sizes):
            return jnp.sum(jnp.sin(product(x, kernels, sizes).astype(jnp.float32)))

        with traced_for(gpu):
            lowered = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(
                shape((m, k)), shape((g, k, n)), shape((g,), jnp.int32)
            )
        return lowered.compile(compiler_options={"xla_gpu_autotune_level": 0})  # needs the GPU

    of_rows = 2 * m * k
    found = {f.__name__: compiled(f) for f in (grouped_product, jax.lax.ragged_dot)}
    costs = {name: program_cost(x.as_text()) for name, x in found.items()}
    for name, cost in costs.items():
        size = found[name].memory_analysis().temp_size_in_bytes
        print(f"{name}: {size / 2**20:.0f} MiB, {cost.flops / 1e12:.2f} TFLOP, "
              f"{cost.num_bytes / 1e9:.2f} GB")  # fmt: skip
        assert (size < 3 * of_rows) == (name == "grouped_product")
    cost = costs["grouped_product"]
    least = 3 * 2 * (m * k + m * n + g * k * n)  # of three products in bfloat16
    assert cost.flops == 3 * 2 * m * k * n and cost.uncounted == ()
    assert cost.num_bytes < 2 * least < 10 * least < costs["ragged_dot"].num_bytes


def test_products_of_rows_for_other_devices_reach_neither_result_nor_gradient(monkeypatch):
    """Such rows, which are in no group, are made nan in products and in their gradients."""

    @jax.custom_vjp
    def with_nan(x, kernels, sizes):
        return outside_nan(jax.lax.ragged_dot(x, kernels, sizes), sizes)

    def outside_nan(x, sizes):
        return jnp.where((jnp.arange(len(x)) < jnp.sum(sizes))[:, None], x, jnp.nan)

    def forward(x, kernels, sizes):
        return with_nan(x, kernels, sizes), (x, kernels, sizes)

    def backward(saved, cotangent):
        x, kernels, sizes = saved
        _, pull = jax.vjp(lambda *xs: jax.lax.ragged_dot(*xs, sizes), x, kernels)
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
            out, _ = experts.feed_forward(rows, leaves, config=config, mesh=mesh)
            return jnp.sum(jnp.sin(out)), out

        return jax.jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(rows, leaves)

    wanted = found(None)
    monkeypatch.setattr(experts, "grouped_product", lambda *xs, has_kernel: with_nan(*xs))
    for got, expected in zip(jax.tree.leaves(found(mesh)), jax.tree.leaves(wanted), strict=True):
        # Float32 sums in another order.
        np.testing.assert_allclose(got, expected, rtol=1e-4, atol=1e-5)


def test_the_gradient_of_recomputed_experts_does_not_repeat_their_last_product():
    config = tiny_config(family="qwen3_moe")
    layer = jax.tree.map(lambda x: x[0], random_params(config)["layers"])
    leaves = {name: layer[name] for name in experts.LEAVES if name in layer}
    rows = jnp.ones((8, config.hidden_size))

    @jax.checkpoint
    def layer_of(rows, leaves):
        return rows + experts.feed_forward(rows, leaves, config=config)[0]

    def num_products(program):
        return str(jax.make_jaxpr(program)(rows, leaves)).count("ragged_dot_general[")

    def loss(rows, leaves):
        return jnp.sum(layer_of(rows, leaves))

    assert num_products(loss) == 3
    # Three products, two of them again, and two gradients of each.
    assert num_products(jax.grad(loss, argnums=(0, 1))) == 3 + 2 + 2 * 3
