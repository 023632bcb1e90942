# SPDX-License-Identifier: Apache-2.0
"""Programs lowered from shapes are the programs a session runs, and they do not copy the cache."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import random_params, tiny_config
from jax.sharding import SingleDeviceSharding

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.shardings import abstract_weights
from tba_jax.planning.estimates import shard_bytes

CONFIG = tiny_config(qkv_bias=True, head_dim=16, max_positions=1024)
SIZES = {"num_slots": 4, "prompt_length": 8}


def make_decoder(max_length):
    return Decoder(
        CONFIG,
        compute_dtype=jnp.float32,
        eos_ids=(0,),
        pad_id=1,
        prompt_buckets=(8,),
        max_length=max_length,
    )


def weights(decoder):
    where = SingleDeviceSharding(jax.devices()[0])
    return abstract_weights(decoder.config, jnp.float32, where)


def test_a_session_runs_the_programs_that_were_lowered():
    """No program is traced that lower_all has not traced at the same sizes."""
    decoder = make_decoder(max_length=32)
    programs = decoder.lower_all(weights(decoder), **SIZES)
    for name in ("prefill", "copy", "chunk"):
        programs[name]()
    count = decoder.compile_count
    assert count == 3
    for temperature in (0.0, 1.0):
        decoder.decode(
            random_params(CONFIG),
            [np.array([3, 4, 5], np.int32)],
            num_samples=4,
            key=jax.random.key(0),
            settings=SamplingSettings(max_new_tokens=3, temperature=temperature),
        )
    assert decoder.compile_count == count


@pytest.mark.parametrize("name", ["copy", "chunk"])
def test_the_cache_is_donated_and_never_copied(name):
    decoder = make_decoder(max_length=504)
    program = decoder.lower_all(weights(decoder), **SIZES)[name]
    memory = program().compile().memory_analysis()
    size = shard_bytes(decoder.abstract_cache(SIZES["num_slots"]))
    assert size == 2 * 2 * 4 * 2 * 512 * 16 * 4  # keys and values, layers, slots, heads, ...
    assert memory.alias_size_in_bytes == size
    # The tokens and log-probs of a chunk, and the bookkeeping of the output tuple.
    assert memory.output_size_in_bytes - size < 1024
    # What else a step needs is far below one layer's keys, a quarter of the cache.
    assert memory.temp_size_in_bytes < size / 4
