# SPDX-License-Identifier: Apache-2.0
"""Weights in eight bits: how far they are from exact ones, and that sampler and scorer agree."""

import functools

import fake_models
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import slow
from fake_models import (
    KINDS,
    assert_equal,
    logits,
    logprobs_of,
    random_params,
    tiny_config,
    tiny_decoder,
)
from jax.sharding import Mesh, PartitionSpec

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.decoding.shardings import weight_shardings
from tba_jax.devices.site import Site, any_device
from tba_jax.models.quantized import MATRICES, quantize, scale_name
from tba_jax.models.transformer import unstack_layers
from tba_jax.weights.memory import Weights
from tba_jax.weights.publication import make_publish_program

CONFIG = tiny_config(num_heads=4, num_kv_heads=2, qkv_bias=True, mlp_size=24, vocab_size=64)
PROMPTS = [np.array([3, 4, 5, 9], np.int32), np.array([7, 8], np.int32)]


def apart(config=CONFIG):
    return jax.jit(unstack_layers, static_argnums=1)(random_params(config), config)


in_eight_bits = jax.jit(functools.partial(quantize, quantization="int8"))


@pytest.mark.parametrize("family", KINDS)
def test_every_weight_is_within_half_a_step_of_its_channel(family):
    config = tiny_config(family=family, num_layers=KINDS[family])
    exact = apart(config)
    layer = dict(exact["layers"][0])
    output = "delta_o" if "delta_o" in layer else "o"
    layer[output] = layer[output].at[..., 1].set(0)  # a channel without weights
    exact = {**exact, "layers": (layer, *exact["layers"][1:])}
    rounded = in_eight_bits(exact)
    found, names = rounded["layers"][0], [name for name in MATRICES if name in layer]
    assert found.keys() - layer.keys() == {scale_name(n) for n in names}
    for name in names:
        x, values = np.asarray(layer[name]), np.asarray(found[name], np.float32)
        scale = np.asarray(found[scale_name(name)])[..., None, :]
        assert found[name].dtype == jnp.int8 and scale.dtype == np.float32
        assert (np.abs(values * scale - x) <= 0.5 * scale * (1 + 1e-5)).all(), name
    assert quantize(exact, "none") is exact
    norms = {"layers": ({"attn_norm": layer["attn_norm"]},)}
    assert quantize(norms, "int8")["layers"][0]["attn_norm"] is layer["attn_norm"]
    # All layers use their scales. Delta layers amplify rounding (see `bfloat16_kl`).
    wanted, bound = logits(exact, config), 0.2 if "delta" in config.pattern else 0.1
    assert 0 < np.abs(wanted - logits(rounded, config)).max() < bound * np.abs(wanted).max()


@functools.cache
def decoded(num_devices, quantization):
    weights = apart() if quantization == "none" else in_eight_bits(apart())
    site = any_device()
    if num_devices > 1:
        mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
        site = Site(mesh)
        weights = jax.device_put(weights, weight_shardings(CONFIG, mesh, quantization))
        assert len(weights["layers"][0]["q"].addressable_shards) == num_devices
    decoder = tiny_decoder(CONFIG, eos_ids=(0,), max_length=16, site=site)
    settings, key = SamplingSettings(max_new_tokens=8), jax.random.key(3)
    options = {"num_samples": 2, "key": key, "settings": settings}
    return fake_models.decode(decoder, weights, PROMPTS, **options)


def test_behaviour_log_probs_are_those_of_the_quantised_policy():
    found, weights = decoded(1, "int8"), in_eight_bits(apart())
    for i, j in np.ndindex(found.lengths.shape):
        n = found.lengths[i, j]
        wanted = logprobs_of(CONFIG, weights, PROMPTS[i], found.tokens[i, j, :n])
        np.testing.assert_allclose(found.token_logprobs[i, j, :n], wanted, rtol=0, atol=2e-5)


@pytest.mark.parametrize(
    ("num_devices", "quantization"), [(2, "int8"), slow(2, "none"), slow(4, "none")]
)
def test_a_tensor_parallel_decoder_equals_one_device(num_devices, quantization):
    """On four devices two share a key/value head."""
    one, two = decoded(1, quantization), decoded(num_devices, quantization)
    assert one.lengths.max() > 4  # more than one chunk
    np.testing.assert_array_equal(one.tokens, two.tokens)
    np.testing.assert_allclose(one.token_logprobs, two.token_logprobs, rtol=0, atol=2e-5)


def test_a_publication_is_quantised_on_the_trainers_devices_and_delivered_so():
    trainer = Mesh(np.array(jax.devices()[:4]).reshape(1, 2, 2), ("data", "fsdp", "model"))
    searcher = Mesh(np.array(jax.devices()[4:6]), ("model",))
    layout = functools.partial(unstack_layers, config=CONFIG)
    published = weight_shardings(CONFIG, trainer, "int8")
    program = make_publish_program(jnp.dtype(jnp.bfloat16), layout, published, "int8")
    wanted = weight_shardings(CONFIG, searcher, "int8")
    assert wanted["layers"][0]["up_scale"].spec == PartitionSpec("model")
    assert wanted["layers"][0]["o_scale"].spec == PartitionSpec(None)
    weights = Weights(program, [wanted])
    params = random_params(CONFIG)
    weights.publish(3, params)
    weights.poll()
    latest = weights.latest(0)
    assert latest is not None and latest.version == 3
    narrow = jax.tree.map(lambda x: x.astype(jnp.bfloat16), apart())
    assert_equal(*map(jax.device_get, (latest.params, in_eight_bits(narrow))))
    assert jax.tree.map(lambda x: x.sharding, latest.params) == wanted
