# SPDX-License-Identifier: Apache-2.0
"""Adapters: nothing at first, trained alone, sent alone, and merged into what was trained."""

import functools
from dataclasses import replace
from typing import Any

import chex
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from fake_batches import (
    CONFIG,
    DIVISIBLE,
    OPTIMIZER,
    REMAT,
    SCHEDULE,
    SETTINGS,
    make_batch,
    make_mesh,
    placed,
    slow,
)
from fake_models import adapted, logits, random_params, tiny_config, trained_adapters
from jax.sharding import Mesh

from tba_jax.decoding.shardings import weight_shardings
from tba_jax.models import lora
from tba_jax.models.quantized import quantize
from tba_jax.models.shardings import param_shardings
from tba_jax.models.transformer import unstack_layers
from tba_jax.train.config import OptimizerSettings
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import init_state, make_init_state, step_shardings
from tba_jax.train.step import make_train_step
from tba_jax.weights import memory
from tba_jax.weights.memory import Weights
from tba_jax.weights.publication import make_publish_program

ALL = ("q", "k", "v", "o", "gate", "up", "down")
POLICY = lora.with_adapters(CONFIG, 3, 6.0, ALL)


@pytest.mark.parametrize("family", ["llama", slow("gpt2")])
def test_a_base_with_fresh_adapters_computes_what_the_base_does(family):
    config = tiny_config(family=family)
    modules = ALL if family == "llama" else ("q", "k", "v", "o", "up", "down")
    policy = lora.with_adapters(config, 4, 16.0, modules)
    base, adapters = random_params(config), lora.init_adapters(policy, 0)
    np.testing.assert_array_equal(adapted(base, adapters, policy), logits(base, config))
    jax.tree.map(np.testing.assert_array_equal, lora.merge(base, adapters, config=policy), base)
    after = adapted(base, trained_adapters(policy), policy)
    assert np.abs(after - logits(base, config)).max() > 0.1


@pytest.mark.parametrize("family", ["llama", slow("gpt2")])
def test_merged_parameters_compute_what_base_and_adapters_do(family):
    config = tiny_config(family=family)
    policy = lora.with_adapters(config, 4, 16.0, ("q", "o", "down"))
    base, adapters = random_params(config), trained_adapters(policy)
    merged = lora.merge(base, adapters, config=policy)
    # Float32 products of a few terms of order 1, summed in another order.
    np.testing.assert_allclose(
        logits(merged, config), adapted(base, adapters, policy), rtol=0, atol=1e-5
    )
    assert merged["layers"]["k"] is base["layers"]["k"] and merged["embed"] is base["embed"]
    # The decoder has layers apart and heads merged.
    apart = lora.merge(unstack_layers(base, config), adapters, config=policy)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=0, atol=1e-6),
        apart,
        unstack_layers(merged, config),
    )


def test_a_base_in_bfloat16_is_rounded_once():
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(CONFIG))
    adapters = trained_adapters(POLICY)
    up, layers = base["layers"]["up"].astype(jnp.float32), adapters["layers"]
    a, b = layers["up_lora_a"], layers["up_lora_b"]
    exact = up + 2.0 * jnp.einsum("ldr,lrf->ldf", a, b)
    merged = lora.merge(base, adapters, config=POLICY)["layers"]["up"]
    assert merged.dtype == jnp.bfloat16
    # Half a unit in the last of bfloat16's eight places, and the rounding of float32 sums.
    np.testing.assert_allclose(merged.astype(np.float32), exact, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize("num_devices", [1, 2])
def test_what_is_merged_is_rounded_to_eight_bits_and_the_rest_once(num_devices):
    policy = lora.with_adapters(DIVISIBLE, 2, 4.0, ("q", "down"))
    base, adapters = random_params(DIVISIBLE), trained_adapters(policy)
    apart = unstack_layers(base, DIVISIBLE)
    held = quantize(apart, "int8")
    exact, rest = lora.parts(apart, held, policy)
    assert not rest["layers"][0].keys() & {"q", "q_scale", "down", "down_scale"}
    if num_devices > 1:
        mesh = Mesh(np.array(jax.devices()[:num_devices]), ("model",))
        where = weight_shardings(DIVISIBLE, mesh, "int8")
        of_parts = lora.parts(weight_shardings(DIVISIBLE, mesh), where, policy)
        exact, rest = jax.device_put((exact, rest), of_parts)
    found = lora.make_merge(exact, rest, policy, "int8")(adapters)
    assert jax.tree.structure(found) == jax.tree.structure(held)
    if num_devices > 1:
        for x, wanted in zip(*map(jax.tree.leaves, (found, where)), strict=True):
            assert x.sharding.is_equivalent_to(wanted, x.ndim)
    merged = unstack_layers(lora.merge(base, adapters, config=policy), DIVISIBLE)
    for i, (layer, wanted, before) in enumerate(
        zip(found["layers"], merged["layers"], held["layers"], strict=True)
    ):
        for name in ("k", "up", "attn_norm", "up_scale"):
            assert layer[name] is rest["layers"][i][name]
            np.testing.assert_array_equal(layer[name], before[name])
        for name in ("q", "down"):
            assert layer[name].dtype == jnp.int8
            scale = np.asarray(layer[f"{name}_scale"])
            away = np.abs(np.asarray(layer[name], np.float32) * scale - wanted[name])
            assert (away <= 0.5 * scale * (1 + 1e-4)).all(), name
            # The adapters are in it: the base alone, rounded, is another matrix.
            assert not np.array_equal(layer[name], before[name])


def test_matrices_that_a_model_lacks_are_refused():
    with pytest.raises(
        ValueError, match=r"lora.modules has gate, .*\(gpt2\) have only the matrices q, k, v, o, up"
    ):
        lora.with_adapters(tiny_config(family="gpt2"), 4, 16.0, ("q", "gate"))


def test_adapters_begin_alike_on_any_devices():
    policy = lora.with_adapters(DIVISIBLE, 4, 16.0, ("q", "up"))
    _, shardings = lora.split(param_shardings(policy, make_mesh((1, 4, 2))))
    divided = lora.init_adapters(policy, 5, shardings)
    assert jax.tree.map(lambda x: x.sharding, divided) == shardings
    jax.tree.map(np.testing.assert_array_equal, divided, lora.init_adapters(policy, 5))
    a = lora.init_adapters(policy, 6)["layers"]["q_lora_a"]
    assert not np.array_equal(a, divided["layers"]["q_lora_a"])
    # Uniform within 1 / sqrt(16 inputs): its variance is a third of the square.
    assert np.abs(a).max() <= 0.25
    np.testing.assert_allclose(np.std(a), 0.25 / np.sqrt(3), rtol=0.15)


def test_the_gradient_is_that_of_the_merged_matrices_by_the_chain_rule():
    base, adapters = random_params(CONFIG), trained_adapters(POLICY)
    optimizer = optax.identity()
    settings = replace(SETTINGS, micro_batch_rows=8)
    whole = make_train_step(CONFIG, optimizer, SCHEDULE, SETTINGS)
    merged = lora.merge(base, adapters, config=POLICY)
    before = jax.device_get(merged)
    after, wanted = whole(init_state(merged, optimizer, keep_reference=False), make_batch())
    step = make_train_step(POLICY, optimizer, SCHEDULE, settings)
    start = jax.device_get(adapters)
    state = init_state(adapters, optimizer, keep_reference=False)
    state, outputs = step(state, make_batch(micro_batch_rows=8), base)
    # Sums of 96 float32 log-probs.
    np.testing.assert_allclose(outputs["numbers"]["loss"], wanted["numbers"]["loss"], rtol=1e-4)
    for name, spec_a, spec_b in (("up", "ldf,lrf->ldr", "ldr,ldf->lrf"), ("o", *O_SPECS)):
        names = f"{name}_lora_a", f"{name}_lora_b"
        change = np.asarray(after.params["layers"][name]) - before["layers"][name]
        a, b = (start["layers"][leaf] for leaf in names)
        for leaf, product in zip(
            names, (np.einsum(spec_a, change, b), np.einsum(spec_b, a, change)), strict=True
        ):
            got = np.asarray(state.params["layers"][leaf]) - start["layers"][leaf]
            # Differences of weights of order 1 in float32; changes are of order 0.01.
            np.testing.assert_allclose(got, 2.0 * product, rtol=1e-3, atol=3e-6, err_msg=leaf)


O_SPECS = ("lhed,lrd->lher", "lher,lhed->lrd")


def test_only_adapters_are_trained_and_have_optimiser_state():
    optimizer = make_optimizer(OptimizerSettings("adamw", b2=0.99, weight_decay=0.01))
    base, adapters = random_params(CONFIG), lora.init_adapters(POLICY, 0)
    before = jax.device_get(base)
    num_bytes = sum(x.nbytes for x in jax.tree.leaves(adapters))
    step = make_train_step(POLICY, optimizer, optax.constant_schedule(0.1), SETTINGS)
    state = init_state(adapters, optimizer, keep_reference=True)
    # The policy, its two moments and the reference's adapters; counters beside them.
    held = sum(x.nbytes for x in jax.tree.leaves(state))
    assert 4 * num_bytes < held < 4 * num_bytes + 100
    losses = []
    for _ in range(12):
        state, outputs = step(state, make_batch(), base)
        losses.append(float(outputs["numbers"]["loss"]))
    jax.tree.map(np.testing.assert_array_equal, base, before)  # also: it was not donated
    assert losses[-1] < 0.7 * losses[0], losses
    # The reference scores with its own adapters, which are still nothing.
    assert not np.any(state.reference_params["layers"]["q_lora_b"])


def test_the_step_on_a_mesh_equals_that_of_one_device():
    policy = lora.with_adapters(DIVISIBLE, 3, 6.0, ALL)
    base, start = random_params(DIVISIBLE), trained_adapters(policy)
    one = make_train_step(policy, OPTIMIZER, SCHEDULE, REMAT)
    # A copy, because the state is donated.
    copy = jax.tree.map(jnp.copy, start)
    wanted = init_state(copy, OPTIMIZER, keep_reference=True)
    shardings = step_shardings(policy, OPTIMIZER, make_mesh((2, 2, 2)), keep_reference=True)
    divided = jax.device_put(base, shardings.base)
    state = make_init_state(OPTIMIZER, shardings)(jax.device_put(start, shardings.state.params))
    step = make_train_step(policy, OPTIMIZER, SCHEDULE, REMAT, shardings)
    for seed in (0, 1):
        batch = make_batch(p=8, seed=seed)
        wanted, wanted_outputs = one(wanted, batch, base)
        state, outputs = step(state, placed(batch, shardings), divided)
    assert jax.tree.map(lambda x: x.sharding, state) == shardings.state
    jax.tree.map(
        # Float32 sums in another order.
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=5e-6),
        jax.device_get(state),
        jax.device_get(wanted),
    )
    chex.assert_trees_all_close(outputs, wanted_outputs, rtol=1e-4, atol=1e-4)


def test_only_adapters_travel_and_searchers_get_whole_weights(monkeypatch):
    policy = lora.with_adapters(DIVISIBLE, 2, 4.0, ("q", "v"))
    base = jax.tree.map(lambda x: x.astype(jnp.bfloat16), random_params(DIVISIBLE))
    travelled = []
    hand_over = memory.hand_over
    monkeypatch.setattr(
        memory, "hand_over", lambda x, where: travelled.append(x) or hand_over(x, where)
    )
    # Two searchers on one device, one on two that divide its weights.
    device = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    pair = Mesh(np.array(jax.devices()[2:4]), ("model",))
    apart = unstack_layers(base, DIVISIBLE)
    on_device = jax.device_put(apart, device)
    on_pair = jax.device_put(apart, weight_shardings(DIVISIBLE, pair))
    shapes = lora.abstract_adapters(policy)
    wanted = [jax.tree.map(lambda _: device, shapes)] * 2
    wanted.append(lora.split(param_shardings(policy, pair))[1])
    first, second = (
        functools.partial(lora.merge, weights, config=policy) for weights in (on_device, on_pair)
    )
    program = make_publish_program(jnp.dtype(jnp.bfloat16))
    published_weights = Weights(program, wanted, [first, first, second])
    assert published_weights.latest(0) is None
    source = trained_adapters(policy)
    for version in (4, 6):
        published_weights.publish(version, source)
        published_weights.poll()
    num_bytes = 2 * sum(x.size for x in jax.tree.leaves(shapes))  # bfloat16
    sent = [sum(x.nbytes for x in jax.tree.leaves(tree)) for tree in travelled]
    # To two sets of devices, twice.
    assert sent == [num_bytes] * 4
    got: list[Any] = [published_weights.latest(i) for i in range(3)]
    assert [x.version for x in got] == [6, 6, 6]
    assert got[0] is got[1] is published_weights.latest(0)
    assert got[0].params["layers"][0]["up"] is on_device["layers"][0]["up"]
    assert got[2].params["layers"][1]["q"].sharding == on_pair["layers"][1]["q"].sharding
    rounded = jax.tree.map(lambda x: x.astype(jnp.bfloat16), source)
    expected = unstack_layers(lora.merge(base, rounded, config=policy), DIVISIBLE)
    for published in (got[0], got[2]):
        jax.tree.map(np.testing.assert_array_equal, published.params, expected)
