# SPDX-License-Identifier: Apache-2.0
"""Random keys of responses, on the host: `jax.random.fold_in` of threefry keys without a device.

A searcher needs a few keys per prompt while its device is busy; launching a program would take
longer. Invariant: the keys have the same bits as those of `jax.random`.
"""

import jax
import numpy as np
from jaxtyping import Array, Integer, UInt32

_ROTATIONS = ((13, 15, 26, 6), (17, 29, 16, 24))
_PARITY = np.uint32(0x1BD11BDA)


def fold_in(
    key: Array | UInt32[np.ndarray, "2"], numbers: int | Integer[np.ndarray, " n"]
) -> UInt32[np.ndarray, "*n 2"]:
    """Return key data of `jax.random.fold_in(key, number)`, for one number or several.

    Args:
        key: JAX PRNG key, or its key data.
        numbers: integers from 0 to 2**32 - 1.

    References:
        Threefry-2x32 with 20 rounds, Salmon et al., 2011.
    """
    first, second = key if isinstance(key, np.ndarray) else np.asarray(jax.random.key_data(key))
    low = np.asarray(numbers).astype(np.uint32)
    keys = (first, second, first ^ second ^ _PARITY)
    with np.errstate(over="ignore"):  # sums are modulo 2**32
        x, y = np.zeros_like(low) + keys[0], low + keys[1]
        for i in range(5):
            for turns in _ROTATIONS[i % 2]:
                x = x + y
                y = (y << np.uint32(turns)) | (y >> np.uint32(32 - turns))
                y = x ^ y
            x = x + keys[(i + 1) % 3]
            y = y + keys[(i + 2) % 3] + np.uint32(i + 1)
    return np.stack([x, y], axis=-1)


def row_keys(key: Array | np.ndarray, num_rows: int) -> UInt32[np.ndarray, "n 2"]:
    """Return the key data of fold_in(key, row) for each row from 0 to `num_rows` - 1."""
    return fold_in(key, np.arange(num_rows))
