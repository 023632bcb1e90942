# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders in and out; that models equal transformers' own is in test_families.

Contract: weights are read whole or sharded, from one file or several, in every layout and dtype
that the hub has, bit for bit; a damaged, foreign or incomplete file is one error that names it.
"""

import json
import re

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fake_models import assert_equal, golden_settings, load_folder, make_folder, tiny_config
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from safetensors.numpy import load_file, save_file

from tba_jax.models import transformer
from tba_jax.models.hf import families, folders, hf_weights


def test_all_disagreements_are_named_in_one_error(tmp_path):
    make_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(6, np.float32)
    tensors["model.embed_tokens.weight"] = np.ones((49, 16), np.float32)
    for i, dtype in enumerate((ml_dtypes.float8_e4m3fn, np.int8, np.bool_)):  # quantised
        name = f"model.layers.0.mlp.{('gate', 'up', 'down')[i]}_proj.weight"
        tensors[name] = tensors[name].astype(dtype)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_folder(tmp_path)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert "other values: model.embed_tokens.weight (got F32 [49, 16], wanted floats [48" in message
    for name, code in (("gate", "F8_E4M3"), ("up", "I8"), ("down", "BOOL")):
        assert f"model.layers.0.mlp.{name}_proj.weight (got {code} [" in message


@pytest.mark.parametrize("target", [jnp.float32, jnp.bfloat16, jnp.float16])
def test_any_dtype_becomes_any_other(tmp_path, target):
    make_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    dtypes = [np.float64, np.float32, np.float16, ml_dtypes.bfloat16]
    tensors = {name: x.astype(dtypes[i % 4]) for i, (name, x) in enumerate(sorted(tensors.items()))}
    save_file(tensors, tmp_path / "model.safetensors")
    config, params, _ = load_folder(tmp_path, param_dtype=target)
    assert {x.dtype for x in jax.tree.leaves(params)} == {jnp.dtype(target)}
    used = set()
    for name, place in families.tensors(config).items():
        used.add(tensors[name].dtype)
        tree = params["layers"] if place.at else params
        for leaf, theirs in zip(place.leaves, place.split(tensors[name]), strict=True):
            ours = tree[leaf][place.at]
            np.testing.assert_array_equal(ours, theirs.astype(target))
    assert used == {np.dtype(x) for x in dtypes}


@pytest.mark.parametrize("name", ["llama", "qwen3_5"])
def test_a_saved_dtype_is_that_of_the_parameters_or_the_one_asked_for(tmp_path, name):
    config, params = make_folder(tmp_path / "a", name)
    settings = folders.load_config(tmp_path / "a")
    low = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    low["layers"] |= {name: params["layers"][name] for name in config.float32_leaves}
    hf_weights.save(tmp_path / "b", config, low, settings)
    hf_weights.save(tmp_path / "c", config, params, settings, dtype=jnp.bfloat16)
    b, c = (load_file(tmp_path / x / "model.safetensors") for x in "bc")
    assert_equal(b, c)
    assert b["model.embed_tokens.weight"].dtype == ml_dtypes.bfloat16
    assert {x.dtype for name, x in b.items() if name.endswith("A_log")} <= {np.dtype(np.float32)}
    assert folders.load_config(tmp_path / "b")["dtype"] == "bfloat16"
    assert folders.load_config(tmp_path / "c") == folders.load_config(tmp_path / "b")


_FILE, _INDEX = "model.safetensors", "model.safetensors.index.json"
DAMAGES = [
    (_FILE, lambda data: data[:-10], r"model\.safetensors: not a complete safetensors"),
    (_FILE, lambda data: data.replace(b"[48,16]", b"[48,17]", 1), "not a complete safetensors"),
    (_FILE, None, r"no model\.safetensors there.*pickled weights are not read"),
    (_INDEX, lambda _: b"\xff\xfe\x00", r"index\.json: .*not valid JSON"),
    (_INDEX, lambda _: b"[]", r"index\.json: .*no JSON object"),
    (_INDEX, lambda _: b'{"weight_map": 3}', r"index\.json: .*wanted a weight_map"),
    ("config.json", lambda _: b"{", r"config\.json: not valid JSON"),
    ("config.json", lambda _: b"[]", r"config\.json: holds no JSON object"),
    ("config.json", None, r"no config\.json there"),
]


def test_folders_that_hold_no_model_are_one_error_that_names_the_file(tmp_path):
    with pytest.raises(ValueError, match="nowhere' is not a folder"):
        load_folder(tmp_path / "nowhere")
    make_folder(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"pickled")
    for name, change, message in DAMAGES:
        file = tmp_path / name
        data = file.read_bytes() if file.exists() else b""
        file.unlink(missing_ok=True)
        if change:
            assert change(data) != data
            file.write_bytes(change(data))
        with pytest.raises(ValueError, match=message):
            load_folder(tmp_path)
        file.write_bytes(data) if data else file.unlink()


def test_a_hub_id_that_cannot_be_fetched_is_one_clear_error(monkeypatch):
    import huggingface_hub

    def offline(name, **_):
        raise huggingface_hub.errors.LocalEntryNotFoundError("no connection\nsecond line")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", offline)
    with pytest.raises(ValueError, match=r"'some/model' is not .* \(this: no connection\)"):
        folders.resolve("some/model")


def test_tokenizer_files_are_copied(tmp_path):
    config, params = make_folder(tmp_path / "a")
    (tmp_path / "a" / "tokenizer.json").write_text('{"x": 1}')
    (tmp_path / "a" / "notes.txt").write_text("not copied")
    hf_weights.save(tmp_path / "b", config, params, golden_settings("llama"), tmp_path / "a")
    names = sorted(p.name for p in (tmp_path / "b").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"]
    assert (tmp_path / "b" / "tokenizer.json").read_text() == '{"x": 1}'
    assert (tmp_path / "b" / "model.safetensors").stat().st_mode & 0o044  # others may read it


def test_large_models_are_several_files_that_are_read_by_their_index(tmp_path, monkeypatch):
    config, params = make_folder(tmp_path)
    single = load_file(tmp_path / "model.safetensors")
    monkeypatch.setattr(hf_weights, "_MAX_FILE_BYTES", 4000)
    (tmp_path / "model.safetensors").unlink()
    hf_weights.save(tmp_path, config, params, folders.load_config(tmp_path))
    index = json.loads((tmp_path / "model.safetensors.index.json").read_text())
    files = sorted(set(index["weight_map"].values()))
    assert len(files) >= 4 and files[1] == f"model-00002-of-{len(files):05}.safetensors"
    for file in files:
        tensors = load_file(tmp_path / file)
        assert sum(x.nbytes for x in tensors.values()) <= 4000
        assert {index["weight_map"][name] for name in tensors} == {file}
    assert index["metadata"]["total_size"] == sum(x.nbytes for x in single.values())
    assert_equal(load_folder(tmp_path)[1], params)
    # A tensor that the index forgets lies in its file all the same.
    del index["weight_map"]["model.norm.weight"]
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert_equal(load_folder(tmp_path)[1], params)
    (tmp_path / files[1]).unlink()
    with pytest.raises(ValueError, match=f"no {re.escape(files[1])} there"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("name", "rules"),
    [
        ("llama", {"layers": "data", "embed": "fsdp"}),
        ("gpt_neox", {"embed": "fsdp", "heads": "data", "mlp": "data", "kv_heads": "data"}),
    ],
)
def test_sharded_parameters_are_read_and_written_as_others(tmp_path, name, rules, monkeypatch):
    monkeypatch.setattr(hf_weights, "_BLOCK_BYTES", 200)  # several blocks per tensor
    config, params = make_folder(tmp_path / "a", name)
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    shardings = jax.tree.map(
        lambda axes: NamedSharding(mesh, PartitionSpec(*(rules.get(axis) for axis in axes))),
        transformer.param_axes(config),
        is_leaf=lambda x: isinstance(x, tuple),
    )
    _, loaded, settings = load_folder(tmp_path / "a", shardings=shardings)
    assert_equal(loaded, params)
    assert jax.tree.map(lambda x: x.sharding, loaded) == shardings
    hf_weights.save(tmp_path / "b", config, loaded, settings)
    a, b = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
    assert a == b


@pytest.mark.parametrize("name", ["qwen2", "gpt2"])
def test_a_tied_output_matrix_with_other_values_is_refused(tmp_path, name):
    """transformers keeps such a matrix; to drop it would change every logit."""
    make_folder(tmp_path, name)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (embedding,) = (x for x in tensors if x.endswith(("embed_tokens.weight", "wte.weight")))
    save_file({**tensors, "lm_head.weight": tensors[embedding]}, path)
    load_folder(tmp_path)  # an equal copy is no other matrix
    save_file({**tensors, "lm_head.weight": tensors[embedding] + 1}, path)
    with pytest.raises(ValueError, match="tie_word_embeddings = true, but the output"):
        load_folder(tmp_path)


def _fused(tensors):
    """The tensors of a folder as transformers 5 has them in memory."""
    out = {name: x for name, x in tensors.items() if ".experts." not in name}
    for i in range(2):
        start = f"model.layers.{i}.mlp.experts."

        def stack(kind, start=start):
            return np.stack([tensors[f"{start}{e}.{kind}_proj.weight"] for e in range(8)])

        gate_up = np.concatenate([stack("gate"), stack("up")], axis=1)
        out |= {f"{start}gate_up_proj": gate_up, f"{start}down_proj": stack("down")}
    return out


def test_fused_and_separate_expert_tensors_are_the_same_model(tmp_path):
    _, params = make_folder(tmp_path, "qwen3_moe")
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    assert tensors["model.layers.1.mlp.experts.3.gate_proj.weight"].shape == (8, 16)
    assert_equal(load_folder(tmp_path)[1], params)
    save_file(_fused(tensors), file, {"format": "pt"})
    assert_equal(load_folder(tmp_path)[1], params)


def test_four_bit_experts_are_read_exactly(tmp_path):
    """Two values per byte, the low half first; a scale 2^(byte - 127) for 32 values."""
    sizes = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
    _, params = make_folder(tmp_path, "gpt_oss", **sizes, layer_types=["sliding_attention"])
    file = tmp_path / "model.safetensors"
    tensors = load_file(file)
    values = np.array([0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6])
    rng, wanted = np.random.default_rng(0), {}
    for name, rows in (("gate_up_proj", 64), ("down_proj", 32)):
        full = f"model.layers.0.mlp.experts.{name}"
        del tensors[full]
        blocks = rng.integers(0, 256, (4, rows, 1, 16)).astype(np.uint8)
        scales = rng.integers(120, 130, (4, rows, 1)).astype(np.uint8)
        tensors |= {f"{full}_blocks": blocks, f"{full}_scales": scales}
        halves = np.stack([blocks % 16, blocks // 16], axis=-1).reshape(4, rows, 32)
        wanted[name] = values[halves] * 2.0 ** (scales.astype(int) - 127)
    save_file(tensors, file, {"format": "pt"})
    written = json.loads((tmp_path / "config.json").read_text())
    written["quantization_config"] = {"quant_method": "mxfp4"}
    (tmp_path / "config.json").write_text(json.dumps(written))
    found = load_folder(tmp_path)[1]["layers"]
    gate_up = wanted["gate_up_proj"].swapaxes(1, 2)
    np.testing.assert_array_equal(found["expert_gate"][0], gate_up[..., ::2])
    np.testing.assert_array_equal(found["expert_up"][0], gate_up[..., 1::2])
    np.testing.assert_array_equal(found["expert_down"][0], wanted["down_proj"].swapaxes(1, 2))
    np.testing.assert_array_equal(found["q"], params["layers"]["q"])


def test_the_language_model_of_a_multimodal_folder_is_read(tmp_path):
    _, params = make_folder(tmp_path, "gemma3")
    file = tmp_path / "model.safetensors"
    tensors = {f"language_model.{name}": x for name, x in load_file(file).items()}
    save_file(tensors | {"vision_tower.x": np.zeros(3, np.float32)}, file, {"format": "pt"})
    inner = json.loads((tmp_path / "config.json").read_text())
    outer = {"model_type": "gemma3", "architectures": ["Gemma3ForConditionalGeneration"]}
    (tmp_path / "config.json").write_text(json.dumps(outer | {"text_config": inner}))
    config, found, settings = load_folder(tmp_path)
    assert config == families.transformer_config(inner)
    assert settings["model_type"] == "gemma3_text"  # what an export is
    assert_equal(found, params)


def test_names_in_files_become_those_that_are_written():
    for family, name, written in (
        ("llama", "model.norm.weight", "model.norm.weight"),
        ("llama", "score.weight", "score.weight"),
        # Files of the trunk alone, of a head with two names, and of multimodal models.
        ("gpt2", "h.0.ln_1.bias", "transformer.h.0.ln_1.bias"),
        ("gpt_neox", "lm_head.weight", "embed_out.weight"),
        ("gemma3_text", "language_model.model.norm.weight", "model.norm.weight"),
        ("gemma3_text", "model.language_model.norm.weight", "model.norm.weight"),
        # Tensors without use.
        ("llama", "model.layers.0.self_attn.rotary_emb.inv_freq", None),
        ("gpt_neox", "gpt_neox.layers.5.attention.bias", None),
        ("gpt_neox", "gpt_neox.layers.5.attention.masked_bias", None),
        ("gpt2", "h.0.attn.bias", None),
        ("gemma3_text", "model.vision_tower.x", None),
        ("qwen3_5_text", "mtp.x", None),
        ("llama", "model.layers.0.attention.dense.bias", "model.layers.0.attention.dense.bias"),
    ):
        assert families.written_name(name, tiny_config(family=family)) == written, name
