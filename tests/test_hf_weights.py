# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders in and out, and parity with transformers' own models.

The golden files come from tests/golden/make_golden.py (transformers 5.23.0, torch 2.13.0).
"""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fakes import random_params, tiny_config
from safetensors.numpy import load_file, save_file

from tba_jax.models import families, hf_weights, transformer

GOLDEN = Path(__file__).parent / "golden"
STORIES = Path(__file__).parents[1] / ".." / "shared" / "models" / "stories260k"


def make_folder(path, **changes):
    config = tiny_config(**changes)
    params = random_params(config)
    hf_weights.save(path, config, params, families.hf_config(config, eos_token_id=2))
    return config, params


def assert_equal(a, b):
    jax.tree.map(np.testing.assert_array_equal, a, b)


@pytest.mark.parametrize("family", ["llama", "qwen2"])
def test_logits_and_greedy_tokens_equal_those_of_transformers(family):
    config, params, _ = hf_weights.load(GOLDEN / family)
    golden = np.load(GOLDEN / f"{family}.npz")
    kwargs = {"config": config, "compute_dtype": jnp.float32}

    @jax.jit
    def logits_of(tokens):
        positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
        hidden, _ = transformer.apply(params, tokens, positions, tokens >= 0, **kwargs)
        return transformer.unembed(params, hidden, **kwargs)

    logits = logits_of(golden["tokens"])
    assert np.abs(golden["logits"]).max() > 1  # the golden model says something
    np.testing.assert_allclose(logits, golden["logits"], rtol=1e-5, atol=2e-5)
    # One pass over prompt + golden response: each greedy token is the argmax before it.
    tokens = np.concatenate([golden["tokens"], golden["greedy"]], axis=1)
    n = golden["tokens"].shape[1]
    greedy = np.argmax(logits_of(tokens), axis=-1)[:, n - 1 : -1]
    np.testing.assert_array_equal(greedy, golden["greedy"])


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"tie_embeddings": False},
        {"qkv_bias": True},
        {"qkv_bias": True, "o_bias": True},
    ],
)
def test_save_then_load_is_bit_equal(tmp_path, changes):
    config, params = make_folder(tmp_path, **changes)
    loaded_config, loaded, hf_config = hf_weights.load(tmp_path)
    assert loaded_config == config
    assert hf_config["eos_token_id"] == 2
    assert_equal(loaded, params)


def test_load_then_save_reproduces_the_files_of_transformers(tmp_path):
    for family in ("llama", "qwen2"):
        config, params, hf_config = hf_weights.load(GOLDEN / family)
        hf_weights.save(tmp_path / family, config, params, hf_config)
        ours = load_file(tmp_path / family / "model.safetensors")
        theirs = load_file(GOLDEN / family / "model.safetensors")
        assert ours.keys() == theirs.keys()
        for name in theirs:
            np.testing.assert_array_equal(ours[name], theirs[name])
        written = json.loads((tmp_path / family / "config.json").read_text())
        assert written == json.loads((GOLDEN / family / "config.json").read_text())


def test_sharded_index_is_read(tmp_path):
    config, params = make_folder(tmp_path)
    whole = load_file(tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors").unlink()
    names = sorted(whole)
    weight_map = {}
    for i, part in enumerate((names[::2], names[1::2])):
        file = f"model-{i}.safetensors"
        save_file({n: whole[n] for n in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    assert_equal(hf_weights.load(tmp_path)[1], params)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"model-1\.safetensors, absent"):
        hf_weights.load(tmp_path)


def test_all_disagreements_are_named_in_one_error(tmp_path):
    make_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(6, np.float32)
    tensors["model.embed_tokens.weight"] = np.ones((24, 16), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        hf_weights.load(tmp_path)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "misshaped: model.embed_tokens.weight (got [24, 16], wanted [23, 16])" in message


def test_harmless_extra_tensors_are_accepted(tmp_path):
    _, params = make_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(3, np.float32)
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    save_file(tensors, tmp_path / "model.safetensors")
    assert_equal(hf_weights.load(tmp_path)[1], params)


def test_dtype_is_converted_when_loading_and_kept_when_saving(tmp_path):
    make_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    low = {name: x.astype(ml_dtypes.bfloat16) for name, x in tensors.items()}
    save_file(low, tmp_path / "model.safetensors")
    config, params, hf_config = hf_weights.load(tmp_path, param_dtype=jnp.float32)
    assert params["embed"].dtype == jnp.float32
    want = low["model.embed_tokens.weight"].astype(np.float32)
    np.testing.assert_array_equal(params["embed"], want)
    assert np.abs(want - tensors["model.embed_tokens.weight"]).max() > 1e-5
    _, params, _ = hf_weights.load(tmp_path, param_dtype=jnp.bfloat16)
    hf_weights.save(tmp_path / "again", config, params, hf_config)
    again = load_file(tmp_path / "again" / "model.safetensors")
    assert again["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    np.testing.assert_array_equal(
        again["model.layers.1.mlp.down_proj.weight"], low["model.layers.1.mlp.down_proj.weight"]
    )
    assert json.loads((tmp_path / "again" / "config.json").read_text())["dtype"] == "bfloat16"


def test_parameters_are_placed_by_the_given_shardings(tmp_path):
    config, params = make_folder(tmp_path)
    where = jax.sharding.SingleDeviceSharding(jax.devices()[-1])
    shardings = jax.tree.map(lambda _: where, transformer.abstract_params(config))
    loaded = hf_weights.load(tmp_path, shardings=shardings)[1]
    assert_equal(loaded, params)
    assert all(x.sharding == where for x in jax.tree.leaves(loaded))


def test_pickled_weights_are_refused(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(ValueError, match=r"pickled weights \(pytorch_model.bin\).*refused"):
        hf_weights.load(tmp_path)


def test_truncated_weights_are_named(tmp_path):
    make_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-10])
    with pytest.raises(ValueError, match=r"model.safetensors: not a complete safetensors file"):
        hf_weights.load(tmp_path)


def test_paths_that_hold_no_model_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere' is not a folder"):
        hf_weights.load(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json there"):
        hf_weights.load(tmp_path)
    make_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors and no model\.safetensors\.index"):
        hf_weights.load(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        hf_weights.load(tmp_path)


def test_a_hub_id_that_cannot_be_fetched_is_one_clear_error(monkeypatch):
    import huggingface_hub

    def offline(name, **_):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"'some/model' is neither .* \(no connection\)"):
        hf_weights.resolve("some/model")


def test_tokenizer_files_are_copied(tmp_path):
    config, params = make_folder(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text('{"x": 1}')
    (tmp_path / "a" / "notes.txt").write_text("not copied")
    hf_config = families.hf_config(config)
    hf_weights.save(tmp_path / "b", config, params, hf_config, tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "b" / "tokenizer.json").read_text() == '{"x": 1}'
    assert (tmp_path / "b" / "model.safetensors").stat().st_mode & 0o044  # others may read it


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"model_type": "gemma2"}, r"model_type = 'gemma2'.*llama or qwen2"),
        ({"hidden_act": "gelu"}, r"hidden_act = 'gelu'.*covers: silu"),
        ({"mlp_bias": True}, r"mlp_bias = True"),
        ({"use_sliding_window": True}, r"use_sliding_window = True"),
        ({"layer_types": ["sliding_attention"]}, r"layer_types = 'sliding_attention'"),
        ({"rope_parameters": {"rope_type": "llama3"}}, r"rope_parameters.rope_type = 'llama3'"),
        ({"rope_scaling": {"type": "linear"}}, r"rope_scaling.rope_type = 'linear'"),
        ({"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5"),
        ({"quantization_config": {"quant_method": "awq"}}, r"quant_method = 'awq'"),
        ({"num_hidden_layers": None}, r"lacks num_hidden_layers"),
    ],
)
def test_settings_the_model_does_not_implement_are_refused_by_name(changes, message):
    with pytest.raises(ValueError, match=message):
        families.transformer_config(families.hf_config(tiny_config()) | changes)


def test_old_style_config_fields_are_read():
    old = {
        "model_type": "qwen2",
        "vocab_size": 10,
        "hidden_size": 32,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "intermediate_size": 40,
        "rope_theta": 1000000.0,
        "rope_scaling": None,
        "sliding_window": 4096,
        "use_sliding_window": False,
        "torch_dtype": "bfloat16",
    }
    config = families.transformer_config(old)
    assert config == transformer.TransformerConfig(
        vocab_size=10,
        hidden_size=32,
        num_layers=3,
        num_heads=4,
        num_kv_heads=4,
        head_dim=8,
        mlp_size=40,
        rope_theta=1000000.0,
        norm_eps=1e-6,
        qkv_bias=True,
        o_bias=False,
        tie_embeddings=False,
        max_positions=32768,
    )


def test_an_output_bias_alone_cannot_be_exported():
    with pytest.raises(ValueError, match="no Hugging Face family"):
        families.hf_config(tiny_config(o_bias=True))


@pytest.mark.skipif(not STORIES.is_dir(), reason="../shared/models/stories260k is absent")
def test_saved_stories_weights_equal_the_original_files(tmp_path):
    config, params, hf_config = hf_weights.load(STORIES)
    hf_weights.save(tmp_path, config, params, hf_config, STORIES)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, STORIES))
    assert ours.keys() == theirs.keys()
    for name in theirs:
        np.testing.assert_array_equal(ours[name], theirs[name])
    assert (tmp_path / "tokenizer.json").read_bytes() == (STORIES / "tokenizer.json").read_bytes()
