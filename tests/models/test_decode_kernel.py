# SPDX-License-Identifier: Apache-2.0
"""The GPU's kernel of a decode step, interpreted, gives the numbers of the einsum."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from tba_jax.models import attention, kv_cache
from tba_jax.models.kv_cache import KVCache, Rounded

SLOTS, COLUMNS = 3, 72  # one block of columns and a part of a second


def inputs(heads, group, width, steps, dtype):
    def draw(seed, *shape):
        return jax.random.normal(jax.random.key(seed), (SLOTS, heads, *shape)).astype(dtype)

    history = KVCache(draw(0, COLUMNS, width), draw(1, COLUMNS, width))
    recent = KVCache(draw(2, steps, width), draw(3, steps, width))
    return draw(4, group, width), draw(5, width), draw(6, width), history, recent


@pytest.mark.parametrize(
    ("group", "width", "steps", "index", "dtype"),
    [
        (1, 64, 8, 0, jnp.float32),
        (3, 80, 8, 7, jnp.float32),
        (6, 96, 20, 19, jnp.float32),
        (6, 128, 8, 3, jnp.bfloat16),
    ],
)
def test_a_step_in_one_kernel_equals_two_parts_merged(group, width, steps, index, dtype):
    q, k, v, history, recent = inputs(2, group, width, steps, dtype)
    lengths = jnp.array([0, COLUMNS, 65], jnp.int32)
    wanted, kept = attention.attend_cached(q, k, v, history, lengths, recent, jnp.int32(index))
    # What a slot has not filled may hold anything.
    is_filled = (jnp.arange(COLUMNS)[None] < lengths[:, None])[:, None, :, None]
    history = KVCache(*(jnp.where(is_filled, x, jnp.nan) for x in history))
    got, written = attention.attend_cached(
        q, k, v, history, lengths, recent, jnp.int32(index), implementation="cudnn"
    )
    # A unit in the last place of the largest outputs, about 2; and sums in another order.
    atol = 2e-6 if dtype == jnp.float32 else 2**-7
    np.testing.assert_allclose(
        got.astype(jnp.float32), wanted.astype(jnp.float32), rtol=0, atol=atol
    )
    for x, y in zip(written, kept, strict=True):
        np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
    ("implementation", "dtype"),
    [
        ("xla", jnp.bfloat16),
        ("cudnn", jnp.float32),
        pytest.param("xla", jnp.float32, marks=pytest.mark.slow),
        pytest.param("cudnn", jnp.bfloat16, marks=pytest.mark.slow),
    ],
)
def test_a_step_over_a_cache_in_eight_bits_is_that_of_the_rounded_numbers(implementation, dtype):
    q, k, v, history, recent = inputs(2, 6, 64, 8, dtype)
    lengths = jnp.array([0, COLUMNS, 65], jnp.int32)
    kept = kv_cache.keep(*history, jnp.int8)
    widened = []
    for part, exact in zip(kept, history, strict=True):
        assert isinstance(part, Rounded) and part.values.dtype == jnp.int8
        wide = part.values * part.scale[..., None]
        # Half a step of the column's largest.
        error = jnp.abs(wide - exact.astype(jnp.float32))
        assert (error <= 0.5001 * part.scale[..., None]).all() and error.max() > 0
        widened.append(wide)
    wanted, _ = attention.attend_cached(
        *(x.astype(jnp.float32) for x in (q, k, v)),
        KVCache(*widened),
        lengths,
        KVCache(*(x.astype(jnp.float32) for x in recent)),
        jnp.int32(5),
    )
    # What a slot has not filled may hold anything; for the einsum, anything that was cached.
    is_filled = (jnp.arange(COLUMNS)[None] < lengths[:, None])[:, None]
    other = 3.0 if implementation == "xla" else jnp.nan
    dirty = KVCache(*(Rounded(x.values, jnp.where(is_filled, x.scale, other)) for x in kept))
    got, written = attention.attend_cached(
        q, k, v, dirty, lengths, recent, jnp.int32(5), implementation=implementation
    )
    atol = 2e-6 if dtype == jnp.float32 else 2**-6  # two roundings of bfloat16
    np.testing.assert_allclose(got.astype(jnp.float32), wanted, rtol=0, atol=atol)
    assert written.keys.dtype == dtype and (written.keys[:, :, 5] == k).all()
