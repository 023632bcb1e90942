# SPDX-License-Identifier: Apache-2.0
"""Products of rows with the matrix of their group, in blocks."""

import importlib.util

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models.grouped_product import block_rows, grouped_product, in_blocks
from tba_jax.planning.chips import parse_topology


def values(sizes, m):
    rng = np.random.default_rng(0)
    x, kernels, weights = (
        jnp.asarray(rng.normal(size=shape), jnp.float32)
        for shape in ((m, 6), (len(sizes), 6, 5), (m, 5))
    )
    # Rows after all groups are undefined: they have no weight in the loss.
    weights = weights * (jnp.arange(m) < sum(sizes))[:, None]
    return x, kernels, jnp.asarray(sizes, jnp.int32), weights


@pytest.mark.parametrize("sizes", [(5, 0, 8, 3), (0, 0, 16, 0), (1, 2, 3, 1), (0, 0, 0, 0)])
@pytest.mark.parametrize("block", [1, 4, 32])
def test_blocks_give_the_product_and_the_gradients_of_ragged_dot(sizes, block):
    x, kernels, num, weights = values(sizes, 16)

    def found(product):
        def loss(x, kernels):
            out = jnp.where(weights != 0, product(x, kernels, num), 0)
            return jnp.sum(jnp.sin(out) * weights)

        return jax.value_and_grad(loss, argnums=(0, 1))(x, kernels)

    got = found(lambda *xs: in_blocks(block, *xs))
    # Float32 sums in another order.
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, atol=1e-5), got, found(jax.lax.ragged_dot)
    )


def test_few_rows_for_each_matrix_are_not_divided():
    assert block_rows(128 * 15, 128) is None
    assert block_rows(128 * 16, 128) == block_rows(128 * 255, 128) == 64
    assert block_rows(128 * 512, 128) == 256
    assert block_rows(10**7, 128) == 2048


def test_other_platforms_keep_ragged_dot():
    x, kernels, num, _ = values((600, 600), 1200)
    lowered = jax.jit(grouped_product).lower(x, kernels, num)
    assert "while" not in lowered.as_text()
    np.testing.assert_array_equal(
        grouped_product(x, kernels, num), jax.lax.ragged_dot(x, kernels, num)
    )


@pytest.mark.skipif(
    not any(importlib.util.find_spec(f"jax_cuda{n}_plugin") for n in (12, 13)),
    reason="the compiler for NVIDIA GPUs is not installed (pip install 'jax[cuda12]')",
)
def test_an_h100_needs_no_copy_of_the_rows_for_each_matrix():
    """Temporaries of the product and its gradient, compiled for an H100 that is not attached."""
    device = jax.sharding.SingleDeviceSharding(parse_topology("h100:1").devices()[0])
    m, g, k, n = 65_536, 32, 2_048, 768

    def shape(dims, dtype=jnp.bfloat16):
        return jax.ShapeDtypeStruct(dims, dtype, sharding=device)

    def temporaries(product):
        def loss(x, kernels, sizes):
            return jnp.sum(product(x, kernels, sizes).astype(jnp.float32))

        lowered = jax.jit(jax.grad(loss, argnums=(0, 1))).lower(
            shape((m, k)), shape((g, k, n)), shape((g,), jnp.int32)
        )
        options = {"xla_gpu_autotune_level": 0}  # autotuning needs the GPU
        return lowered.compile(compiler_options=options).memory_analysis().temp_size_in_bytes

    of_rows = 2 * m * k
    found = {f.__name__: temporaries(f) for f in (grouped_product, jax.lax.ragged_dot)}
    print({name: f"{size / 2**20:.0f} MiB" for name, size in found.items()})
    assert found["grouped_product"] < 3 * of_rows < g * of_rows < found["ragged_dot"]
