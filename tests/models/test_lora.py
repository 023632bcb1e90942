# SPDX-License-Identifier: Apache-2.0
"""Adapters: nothing at first, trained alone, sent alone, merged into the base, and their files.

Contract: base and adapters compute what merged parameters do, and have their gradient by the chain
rule, on one device and on a mesh; adapters alone are trained and travel; peft's files are read.
"""

import json
from dataclasses import replace

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
from fake_models import adapted, assert_equal, logits, random_params, tiny_config, trained_adapters
from jax.sharding import Mesh
from safetensors.numpy import load_file

from tba_jax.decoding.shardings import weight_shardings
from tba_jax.models import lora, transformer
from tba_jax.models import model as models
from tba_jax.models.config import MATRICES
from tba_jax.models.hf import adapter_files, hf_weights
from tba_jax.models.quantized import quantize
from tba_jax.models.shardings import param_shardings
from tba_jax.models.transformer import unstack_layers
from tba_jax.run.model_parts import START_MODEL
from tba_jax.train.state import init_state, make_init_state, step_shardings
from tba_jax.train.step import make_train_step

ALL = ("q", "k", "v", "o", "gate", "up", "down")
POLICY = lora.with_adapters(CONFIG, 3, 6.0, ALL)


FEWEST = [("qwen2", 2), slow("gemma3_text", 3), slow("gpt_oss", 2), slow("qwen3_5_text", 2)]


@pytest.mark.parametrize(("family", "num_layers"), FEWEST)
def test_adapters_change_nothing_and_then_compute_what_merged_matrices_do(family, num_layers):
    config = tiny_config(family=family, num_layers=num_layers)
    there = transformer.abstract_params(config)["layers"]
    policy = lora.with_adapters(config, 4, 16.0, [x for x in MATRICES if x in there and x != "k"])
    base, fresh = random_params(config), lora.init_adapters(policy, 0)
    plain = logits(base, config)
    np.testing.assert_array_equal(adapted(base, fresh, policy), plain)
    chex.assert_trees_all_equal(lora.merge(base, fresh, config=policy), base)
    adapters = trained_adapters(policy)
    merged = lora.merge(base, adapters, config=policy)
    found = adapted(base, adapters, policy)
    assert np.abs(found - plain).max() > 0.1
    # Float32 products of a few terms of order 1, summed in another order; delta layers amplify.
    bound = 1e-4 if "delta" in config.pattern else 1e-5
    np.testing.assert_allclose(logits(merged, config), found, rtol=0, atol=bound)
    assert merged["layers"]["k"] is base["layers"]["k"] and merged["embed"] is base["embed"]
    # The decoder has layers apart and heads merged.
    apart = lora.merge(unstack_layers(base, config), adapters, config=policy)
    chex.assert_trees_all_close(apart, unstack_layers(merged, config), rtol=0, atol=1e-6)


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
    specs = {"up": ("ldf,lrf->ldr", "ldr,ldf->lrf"), "o": ("lhed,lrd->lher", "lher,lhed->lrd")}
    for name, (spec_a, spec_b) in specs.items():
        names = f"{name}_lora_a", f"{name}_lora_b"
        change = np.asarray(after.params["layers"][name]) - before["layers"][name]
        a, b = (start["layers"][leaf] for leaf in names)
        products = np.einsum(spec_a, change, b), np.einsum(spec_b, a, change)
        for leaf, product in zip(names, products, strict=True):
            got = np.asarray(state.params["layers"][leaf]) - start["layers"][leaf]
            # Differences of weights of order 1 in float32; changes are of order 0.01.
            np.testing.assert_allclose(got, 2.0 * product, rtol=1e-3, atol=3e-6, err_msg=leaf)


@pytest.mark.slow
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
    # Float32 sums in another order.
    chex.assert_trees_all_close(*map(jax.device_get, (state, wanted)), rtol=1e-4, atol=5e-6)
    chex.assert_trees_all_close(outputs, wanted_outputs, rtol=1e-4, atol=1e-4)


MODULES = ("q", "k", "o", "gate", "down")


@pytest.fixture(scope="module")
def start():
    """The start model, and adapters of it that change it."""
    config, params, _ = models.load(str(START_MODEL), param_dtype=jnp.float32)
    config = lora.with_adapters(config, 4, 8.0, MODULES)
    return config, params, trained_adapters(config)


def test_a_file_adds_what_peft_adds_to_each_tensor_of_a_checkpoint(start, tmp_path):
    """W + alpha / r B A for each Linear, with the names of the checkpoint, is the merged model."""
    config, params, adapters = start
    plain = replace(config, adapters=None)
    adapter_files.write(tmp_path / "a", config, adapters, "base")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
    merged = lora.merge(params, adapters, config=config)
    for name, tree in (("base", params), ("merged", merged)):
        hf_weights.save(tmp_path / name, plain, tree, {})
    base = load_file(tmp_path / "base" / "model.safetensors")
    added = load_file(tmp_path / "a" / "adapter_model.safetensors")
    num_changed = 0
    for name, wanted in load_file(tmp_path / "merged" / "model.safetensors").items():
        start_of = f"base_model.model.{name.removesuffix('.weight')}.lora_"
        found = base[name]
        if f"{start_of}A.weight" in added:
            num_changed += 1
            found = found + 2.0 * added[f"{start_of}B.weight"] @ added[f"{start_of}A.weight"]
        np.testing.assert_allclose(found, wanted, atol=1e-5)
    assert num_changed == len(MODULES) * config.num_layers and len(added) == 2 * num_changed


def test_a_folder_of_adapters_is_a_model_with_merged_weights(start, tmp_path):
    config, params, adapters = start
    adapter_files.write(tmp_path / "a", config, adapters, str(START_MODEL))
    merged = lora.merge(params, adapters, config=config)
    found = models.load(tmp_path / "a")
    assert_equal(found.params, merged)
    assert found.config == replace(config, adapters=None)
    path = tmp_path / "a" / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"lora_alpha": 4.0, "use_rslora": True}))
    again = models.load(tmp_path / "a").params  # 4 / sqrt(4) = 8 / 4
    assert_equal(again, merged)
    for name, value in (("use_dora", True), ("peft_type", "IA3"), ("bias", "all")):
        path.write_text(json.dumps(settings | {name: value}))
        with pytest.raises(ValueError, match=f"adapter_config.json has {name} = {value!r}; wanted"):
            models.load(tmp_path / "a")


def test_matrices_that_a_model_lacks_or_that_share_a_tensor_are_refused(start):
    message = r"lora.modules has gate, .*\(gpt2\) have only the matrices q, k, v, o, up"
    with pytest.raises(ValueError, match=message):
        lora.with_adapters(tiny_config(family="gpt2"), 4, 16.0, ("q", "gate"))
    config = replace(start[0], family="gpt_neox", norm="layer")
    with pytest.raises(ValueError, match="lora.modules has q, k, .* hold in one tensor"):
        adapter_files.check(config)
