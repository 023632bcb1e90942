# SPDX-License-Identifier: Apache-2.0
"""Adapter folders for inference servers: the same model after writing and reading."""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from safetensors.numpy import load_file

from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.hf import adapter_files, hf_weights
from tba_jax.run.model_parts import START_MODEL

MODULES = ("q", "k", "o", "gate", "down")


@pytest.fixture(scope="module")
def start():
    """The start model, and adapters of it that change it."""
    config, params, _ = models.load(str(START_MODEL), param_dtype=jnp.float32)
    config = lora.with_adapters(config, 4, 8.0, MODULES)
    fresh = lora.init_adapters(config, 0)
    keys = iter(jax.random.split(jax.random.key(1), 99))
    adapters = jax.tree.map(lambda x: x + 0.1 * jax.random.normal(next(keys), x.shape), fresh)
    return config, params, adapters


def test_adapters_are_the_same_bits_after_writing_and_reading(start, tmp_path):
    config, _, adapters = start
    adapter_files.write(tmp_path / "a", config, adapters, "base")
    found, read = adapter_files.read(tmp_path / "a", dataclasses.replace(config, adapters=None))
    assert set(found.adapters.modules) == set(MODULES) and found.adapters.scale == 2.0
    jax.tree.map(np.testing.assert_array_equal, read, adapters)


def test_a_file_adds_what_peft_adds_to_each_tensor_of_a_checkpoint(start, tmp_path):
    """W + alpha / r B A for each Linear, with the names of the checkpoint, is the merged model."""
    config, params, adapters = start
    plain = dataclasses.replace(config, adapters=None)
    adapter_files.write(tmp_path / "a", config, adapters, "base")
    settings = json.loads((tmp_path / "a" / "adapter_config.json").read_text())
    assert settings["target_modules"] == ["q_proj", "k_proj", "o_proj", "gate_proj", "down_proj"]
    for name, tree in {
        "base": params,
        "merged": lora.merge(params, adapters, config=config),
    }.items():
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
    jax.tree.map(np.testing.assert_array_equal, found.params, merged)
    assert found.config == dataclasses.replace(config, adapters=None)
    path = tmp_path / "a" / "adapter_config.json"
    settings = json.loads(path.read_text())
    path.write_text(json.dumps(settings | {"lora_alpha": 4.0, "use_rslora": True}))
    again = models.load(tmp_path / "a").params  # 4 / sqrt(4) = 8 / 4
    jax.tree.map(np.testing.assert_array_equal, again, merged)
    for name, value in (("use_dora", True), ("peft_type", "IA3"), ("bias", "all")):
        path.write_text(json.dumps(settings | {name: value}))
        with pytest.raises(ValueError, match=f"adapter_config.json has {name} = {value!r}; wanted"):
            models.load(tmp_path / "a")


def test_matrices_that_share_a_tensor_are_refused(start):
    config = dataclasses.replace(start[0], family="gpt_neox", norm="layer")
    with pytest.raises(ValueError, match="lora.modules has q, k, .* hold in one tensor"):
        adapter_files.check(config)
