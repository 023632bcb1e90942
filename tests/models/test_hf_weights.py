# SPDX-License-Identifier: Apache-2.0
"""Hugging Face folders in and out; that models equal transformers' own is in test_families."""

import json
from pathlib import Path

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest
from fake_models import assert_equal, load_folder, make_folder, shardings_of
from hf_settings import hf_config
from jax.sharding import Mesh
from safetensors.numpy import load_file, save_file

from tba_jax.models.hf import families, folders, hf_weights

GOLDEN = Path(__file__).parents[1] / "golden"
GOLDEN_MODELS = [
    path.parent.name
    for path in sorted(GOLDEN.glob("*/config.json"))
    if json.loads(path.read_text())["model_type"] in families.FAMILIES
]
STORIES = Path(__file__).parents[2] / ".." / "shared" / "models" / "stories260k"


@pytest.mark.parametrize("name", GOLDEN_MODELS)
def test_load_then_save_reproduces_the_files_of_transformers(tmp_path, name):
    config, params, hf_config = load_folder(GOLDEN / name)
    hf_weights.save(tmp_path, config, params, hf_config)
    ours, theirs = (load_file(f / "model.safetensors") for f in (tmp_path, GOLDEN / name))
    assert ours.keys() == theirs.keys()
    for tensor in theirs:
        np.testing.assert_array_equal(ours[tensor], theirs[tensor])
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == json.loads((GOLDEN / name / "config.json").read_text())


def split_folder(path):
    """Divide the one file of a folder in two; the index as a dict."""
    whole = load_file(path / "model.safetensors")
    (path / "model.safetensors").unlink()
    weight_map = {}
    for i, names in enumerate((sorted(whole)[::2], sorted(whole)[1::2])):
        save_file({n: whole[n] for n in names}, path / f"model-{i}.safetensors")
        weight_map |= dict.fromkeys(names, f"model-{i}.safetensors")
    write_index(path, weight_map)
    return weight_map


def write_index(path, weight_map):
    index = path / "model.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))


def test_several_files_are_read_by_their_index(tmp_path):
    _, params = make_folder(tmp_path)
    weight_map = split_folder(tmp_path)
    assert_equal(load_folder(tmp_path)[1], params)
    # A tensor that the index forgets lies in its file all the same.
    del weight_map["model.norm.weight"]
    write_index(tmp_path, weight_map)
    assert_equal(load_folder(tmp_path)[1], params)
    (tmp_path / "model-1.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model-1\.safetensors there"):
        load_folder(tmp_path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"\xff\xfe\x00", "not valid JSON"),
        (b"[]", "no JSON object"),
        (b'{"weight_map": 3}', "wanted a weight_map"),
    ],
)
def test_an_index_that_is_none_is_refused(tmp_path, text, message):
    make_folder(tmp_path)
    (tmp_path / "model.safetensors.index.json").write_bytes(text)
    with pytest.raises(ValueError, match=rf"model\.safetensors\.index\.json: .*{message}"):
        load_folder(tmp_path)


def test_all_disagreements_are_named_in_one_error(tmp_path):
    make_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["model.layers.1.mlp.up_proj.weight"], tensors["model.norm.weight"]
    tensors["model.layers.0.self_attn.q_norm.weight"] = np.ones(6, np.float32)
    tensors["model.embed_tokens.weight"] = np.ones((24, 16), np.float32)
    save_file(tensors, tmp_path / "model.safetensors")
    with pytest.raises(ValueError) as caught:
        load_folder(tmp_path)
    message = str(caught.value)
    assert "missing: model.layers.1.mlp.up_proj.weight, model.norm.weight" in message
    assert "unexpected: model.layers.0.self_attn.q_norm.weight" in message
    assert (
        "other values: model.embed_tokens.weight (got F32 [24, 16], wanted floats [23, 16])"
        in message
    )


def test_names_without_the_prefix_are_found(tmp_path):
    _, params = make_folder(tmp_path, family="gpt2")
    tensors = load_file(tmp_path / "model.safetensors")
    bare = {name.removeprefix("transformer."): x for name, x in tensors.items()}
    assert bare.keys().isdisjoint(tensors)
    bare["h.0.attn.bias"] = np.ones((1, 1, 4, 4), np.float32)  # a mask, in files of old
    save_file(bare, tmp_path / "model.safetensors")
    assert_equal(load_folder(tmp_path)[1], params)


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


@pytest.mark.parametrize("family", ["llama", "qwen3_5_text"])
def test_a_saved_dtype_is_that_of_the_parameters_or_the_one_asked_for(tmp_path, family):
    config, params = make_folder(tmp_path / "a", family=family)
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


def test_quantised_tensors_are_refused_by_name(tmp_path):
    make_folder(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    for dtype, code in ((ml_dtypes.float8_e4m3fn, "F8_E4M3"), (np.int8, "I8"), (np.bool_, "BOOL")):
        tensors["model.norm.weight"] = tensors["model.norm.weight"].astype(dtype)
        save_file(tensors, tmp_path / "model.safetensors")
        message = rf"model\.norm\.weight \(got {code} \[16\], wanted floats \[16\]\)"
        with pytest.raises(ValueError, match=message):
            load_folder(tmp_path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda data: data[:-10],
        lambda data: data.replace(b"[23,16]", b"[23,17]", 1),
    ],
    ids=["end", "shape"],
)
def test_damaged_weights_are_named(tmp_path, damage):
    make_folder(tmp_path)
    file = tmp_path / "model.safetensors"
    data = file.read_bytes()
    assert damage(data) != data
    file.write_bytes(damage(data))
    with pytest.raises(ValueError, match=r"model\.safetensors: not a complete safetensors file"):
        load_folder(tmp_path)


def test_pickled_weights_are_refused(tmp_path):
    make_folder(tmp_path)
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(
        ValueError, match=r"no model\.safetensors there.*pickled weights are not read"
    ):
        load_folder(tmp_path)


def test_paths_that_hold_no_model_are_named(tmp_path):
    with pytest.raises(ValueError, match="nowhere' is not a folder"):
        load_folder(tmp_path / "nowhere")
    with pytest.raises(ValueError, match=r"no config\.json there"):
        load_folder(tmp_path)
    make_folder(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    with pytest.raises(ValueError, match=r"no model\.safetensors there"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text("{")
    with pytest.raises(ValueError, match=r"config\.json: not valid JSON"):
        load_folder(tmp_path)
    (tmp_path / "config.json").write_text("[]")
    with pytest.raises(ValueError, match=r"config\.json: holds no JSON object"):
        load_folder(tmp_path)


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
    hf_weights.save(tmp_path / "b", config, params, hf_config(config), tmp_path / "a")
    assert sorted(p.name for p in (tmp_path / "b").iterdir()) == [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
    ]
    assert (tmp_path / "b" / "tokenizer.json").read_text() == '{"x": 1}'
    assert (tmp_path / "b" / "model.safetensors").stat().st_mode & 0o044  # others may read it


def test_large_models_are_saved_as_several_files(tmp_path, monkeypatch):
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


def test_sharded_parameters_are_written_as_others(tmp_path):
    config, params = make_folder(tmp_path / "a")
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))
    placed = jax.device_put(params, shardings_of(config, mesh, {"embed": "fsdp", "mlp": "data"}))
    hf_weights.save(tmp_path / "b", config, placed, folders.load_config(tmp_path / "a"))
    a, b = ((tmp_path / x / "model.safetensors").read_bytes() for x in "ab")
    assert a == b


@pytest.fixture
def mesh():
    return Mesh(np.array(jax.devices()).reshape(2, 4), ("data", "fsdp"))


@pytest.mark.parametrize(
    ("family", "rules"),
    [
        ("llama", {"embed": "fsdp"}),  # replicated over data
        ("llama", {"layers": "data", "embed": "fsdp"}),
        ("gpt_neox", {"embed": "fsdp", "heads": "data", "mlp": "data", "kv_heads": "data"}),
    ],
)
def test_a_sharded_load_equals_the_plain_one(tmp_path, mesh, family, rules, monkeypatch):
    monkeypatch.setattr(hf_weights, "_BLOCK_BYTES", 200)  # several blocks per tensor
    config, params = make_folder(tmp_path, family=family)
    shardings = shardings_of(config, mesh, rules)
    loaded = load_folder(tmp_path, shardings=shardings)[1]
    assert_equal(loaded, params)
    jax.tree.map(lambda x, sharding: x.sharding == sharding or pytest.fail(), loaded, shardings)


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_a_tied_output_matrix_with_other_values_is_refused(tmp_path, name):
    """transformers keeps such a matrix; to drop it would change every logit."""
    make_folder(tmp_path, family=name)
    path = tmp_path / "model.safetensors"
    tensors = load_file(path)
    (embedding,) = (x for x in tensors if x.endswith(("embed_tokens.weight", "wte.weight")))
    save_file({**tensors, "lm_head.weight": tensors[embedding]}, path)
    load_folder(tmp_path)  # an equal copy is no other matrix
    save_file({**tensors, "lm_head.weight": tensors[embedding] + 1}, path)
    with pytest.raises(ValueError, match="tie_word_embeddings = true, but the output"):
        load_folder(tmp_path)
