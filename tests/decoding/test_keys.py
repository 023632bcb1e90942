# SPDX-License-Identifier: Apache-2.0
"""Keys folded on the host are those of JAX, to the last bit."""

import jax
import numpy as np
import pytest

from tba_jax.decoding.keys import fold_in


@pytest.mark.parametrize("seed", [0, 1, 7, 2**31 + 5, 2**32 - 1])
def test_folded_keys_equal_those_of_jax(seed):
    key = jax.random.key(seed)
    numbers = np.array([0, 1, 2, 15, 255, 2**20 + 3, 2**31, 2**32 - 1], np.uint32)
    expected = np.stack([jax.random.key_data(jax.random.fold_in(key, n)) for n in numbers])
    for given in (key, np.asarray(jax.random.key_data(key))):
        got = fold_in(given, numbers)
        assert got.dtype == np.uint32
        np.testing.assert_array_equal(got, expected)
