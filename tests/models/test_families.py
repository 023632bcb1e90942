# SPDX-License-Identifier: Apache-2.0
"""Every family equals transformers' own model, and its config.json is read and written.

The golden files come from tests/golden/make_golden.py (transformers 5.23.0, torch 2.13.0), which
also says how ties between greedy tokens are kept out. Contract, for each golden model: logits and
greedy tokens of scoring; tokens and log-probs of decoding with a cache; bit-equal tensors and
config.json after an export. test_parity makes transformers read our exports.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_batches import slow
from fake_models import (
    FAMILIES,
    GOLDEN,
    KINDS,
    assert_close,
    bfloat16_kl,
    decode,
    golden_settings,
    load_folder,
    logits_of,
    tiny_decoder,
)
from safetensors.numpy import load_file

from tba_jax.decoding.requests import SamplingSettings
from tba_jax.models import transformer
from tba_jax.models.hf import families, hf_weights

MODELS = {
    path.parent.name: json.loads(path.read_text())["model_type"]
    for path in sorted(GOLDEN.glob("*/config.json"))
}
MODELS = {name: family for name, family in MODELS.items() if family in families.FAMILIES}
CLASSIFIERS = [name for name in MODELS if name.endswith(("_classifier", "_reward"))]
LANGUAGE_MODELS = [name for name in MODELS if name not in CLASSIFIERS]


def test_there_is_a_golden_model_of_every_family():
    assert set(MODELS.values()) == set(families.FAMILIES)


def rows_of(golden):
    """(tokens, mask) [6 s]: two rows with their greedy tokens, then padded left, then right."""
    plain = np.concatenate([golden["tokens"], golden["greedy"]], axis=1)
    tail = ((0, 0), (0, plain.shape[1] - golden["left_mask"].shape[1]))
    tokens = [plain, *(np.pad(golden[f"{side}_tokens"], tail) for side in ("left", "right"))]
    masks = [plain >= 0, *(np.pad(golden[f"{side}_mask"], tail) for side in ("left", "right"))]
    return np.concatenate(tokens), np.concatenate(masks)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_scoring_equals_transformers(name):
    config, params, _ = load_folder(GOLDEN / name)
    golden = np.load(GOLDEN / f"{name}.npz")
    n = golden["tokens"].shape[1]
    tokens, mask = rows_of(golden)
    logits = logits_of(config, params, tokens, mask)
    alone, *padded = np.split(logits, 3)
    assert np.abs(golden["logits"]).max() > 1  # the golden model says something
    assert_close(alone[:, :n], golden["logits"])
    # Each greedy token is the argmax before it.
    np.testing.assert_array_equal(alone.argmax(-1)[:, n - 1 : -1], golden["greedy"])
    assert len(np.unique(golden["greedy"])) >= 10
    for side, got in zip(("left", "right"), padded, strict=True):
        valid = golden[f"{side}_mask"]
        assert_close(got[:, : valid.shape[1]][valid], golden[f"{side}_logits"][valid])
    assert np.isfinite(logits).all()
    if config.family in KINDS:
        low = logits_of(config, params, tokens, mask, jnp.bfloat16)
        want, got = jax.nn.log_softmax(logits[mask]), jax.nn.log_softmax(low[mask])
        kl = np.mean(np.sum(np.exp(want) * (want - got), axis=-1))
        assert 1e-6 < kl < bfloat16_kl(config)


@pytest.mark.parametrize(
    # By default each kind of layer; test_scoring has all families, on the same layers.
    "family",
    [x if x in KINDS else slow(x) for x in FAMILIES],
)
def test_decoding_equals_transformers(family):
    config, params, _ = load_folder(GOLDEN / FAMILIES[family])
    golden = np.load(GOLDEN / f"{FAMILIES[family]}.npz")
    n, m = golden["tokens"].shape[1], golden["greedy"].shape[1]
    # Chunks are shorter than a window. test_prefixes.py decodes with the same programs.
    decoder = tiny_decoder(config, eos_ids=(), prompt_tokens=n, max_length=n + m)
    options = {"num_samples": 2, "key": jax.random.key(0), "num_slots": 3}
    greedy, drawn = (
        decode(decoder, params, list(golden["tokens"]), settings=SamplingSettings(m, t), **options)
        for t in (0.0, 1.3)
    )
    np.testing.assert_array_equal(greedy.tokens[:, 0], golden["greedy"])
    tokens, mask = rows_of(golden)
    tokens[:2, n:] = drawn.tokens[:, 0]
    scored = logits_of(config, params, tokens, mask)[:2, n - 1 : -1] / 1.3
    logprobs = np.asarray(jax.nn.log_softmax(scored))
    want = np.take_along_axis(logprobs, drawn.tokens[:, 0, :, None], axis=-1)[..., 0]
    # Delta layers divide outputs by their size, near 0 at a few tokens; a wrong state would stay.
    away = np.abs(drawn.token_logprobs[:, 0] - want)
    usual = np.quantile(away, 0.95) if "delta" in config.pattern else away.max()
    assert usual < 2e-5 and away.max() < 1e-3


@pytest.mark.parametrize("name", MODELS)
def test_an_export_has_the_files_of_transformers(name, tmp_path):
    config, params, settings = load_folder(GOLDEN / name)
    hf_weights.save(tmp_path, config, params, settings)
    ours, theirs = (load_file(x / "model.safetensors") for x in (tmp_path, GOLDEN / name))
    assert ours.keys() == theirs.keys()
    for tensor in theirs:
        np.testing.assert_array_equal(ours[tensor], theirs[tensor])
    written = json.loads((tmp_path / "config.json").read_text())
    assert written == json.loads((GOLDEN / name / "config.json").read_text())


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_those_of_transformers(name):
    config, params, _ = load_folder(GOLDEN / name)
    golden = np.load(GOLDEN / f"{name}.npz")
    assert golden["logits"].shape[1] == config.num_labels and "unembed" not in params
    width = golden["left_mask"].shape[1]
    plain = np.pad(golden["tokens"], ((0, 0), (0, width - golden["tokens"].shape[1])))
    tokens = np.concatenate([plain, golden["left_tokens"], golden["right_tokens"]])
    score = jax.jit(transformer.classify, static_argnames=("config", "compute_dtype"))
    kwargs = {"config": config, "compute_dtype": jnp.float32}
    # The rows hold no pad tokens (0), so that this is also the mask that transformers guesses.
    scores = score(params, jnp.array(tokens), jnp.array(tokens != 0), **kwargs)
    for got, kind in zip(
        np.split(scores, 3), ("logits", "left_logits", "right_logits"), strict=True
    ):
        assert_close(got, golden[kind])


DELTA = {"pattern": ("delta", "delta", "delta", "full")}


@pytest.mark.parametrize(
    ("name", "changes", "fields"),
    [
        ("llama", {"hidden_act": "gelu"}, {"activation": "gelu"}),
        ("llama", {"architectures": ["LlamaForSequenceClassification"]}, {"num_labels": 2}),
        ("qwen3", {"attention_bias": True}, {"qkv_bias": True, "o_bias": True}),
        ("gpt2", {"tie_word_embeddings": False}, {"tie_embeddings": False}),
        ("gpt2", {"activation_function": "gelu"}, {"activation": "gelu"}),
        # Without effect at inference.
        ("gpt2", {"attn_pdrop": 0.3, "reorder_and_upcast_attn": True}, {}),
        ("qwen3_5", {"layer_types": None, "num_hidden_layers": 4}, DELTA | {"num_layers": 4}),
        ("qwen3_5", {"layer_types": None, "full_attention_interval": 2}, {}),
    ],
)
def test_settings_that_no_golden_model_has_are_read(name, changes, fields):
    plain = families.transformer_config(golden_settings(name))
    found = families.transformer_config(golden_settings(name, **changes))
    assert found == dataclasses.replace(plain, **fields)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        # What the model does not implement.
        ("llama", {"model_type": "gemma4"}, r"model_type = 'gemma4'.*llama, qwen2, qwen3"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "TokenClassification'.*or"),
        ("llama", {"hidden_act": "relu"}, r"hidden_act = 'relu'.*covers: silu"),
        ("qwen2", {"mlp_bias": True}, r"mlp_bias = True.*false for qwen2"),
        ("qwen3_5", {"layer_types": ["mamba"] * 3}, "layer_types = 'mamba'.*linear_attention"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types of 1 layers"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type = 'dynamic'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"lacks rope_scaling.factor"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "one entry per full_attention"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5.*1.0 for llama"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, r"quant_method = 'awq'"),
        ("gpt2", {"scale_attn_weights": False}, r"scale_attn_weights = False.*covers: true"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\].*\[\] for qwen3_moe"),
        ("gpt_oss", {"swiglu_limit": 3.0}, "swiglu_limit = 3.0.*7.0 for gpt_oss"),
        # Sizes that do not fit each other, or are absent.
        ("llama", {"num_hidden_layers": None}, r"llama model lacks num_hidden_layers"),
        ("mistral", {"sliding_window": 129}, "window = 129, .*: window layers need"),
        ("qwen3_moe", {"num_experts_per_tok": 9}, "experts_per_token = 9, num_experts = 8: must"),
        ("qwen3_5", {"linear_num_key_heads": 3}, "value_heads = 4, delta_key_heads = 3: "),
        # Values of another type or range.
        ("llama", {"hidden_size": "64"}, r"hidden_size = '64'; wanted a whole number above 0"),
        ("qwen2", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'; wanted true"),
        ("qwen3", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan; wanted"),
        ("llama", {"rope_parameters": {"rope_theta": -1.0}}, r"rope_parameters.rope_theta = -1.0"),
    ],
)
def test_settings_that_are_wrong_or_not_implemented_are_refused_by_name(name, changes, message):
    with pytest.raises(ValueError, match=message) as info:
        families.transformer_config(golden_settings(name, **changes))
    assert "\n" not in str(info.value) and len(str(info.value)) < 600


# Settings of golden models as files of transformers 4 and of the hub have them: under other names,
# or not at all where the default holds.
LLAMA_3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
LLAMA_3["original_max_position_embeddings"] = 32
# The rotary settings of old config files and their newer form; no value is a default.
OLD_FILES = {
    "qwen2": (
        {"rope_theta": 5e5, "rope_scaling": None, "sliding_window": 4096},
        {"rope_type": "default", "rope_theta": 5e5},
    ),
    "llama3": ({"rope_theta": 5e5, "rope_scaling": LLAMA_3}, LLAMA_3 | {"rope_theta": 5e5}),
    "gpt_neox": (
        {"rotary_pct": 0.5, "rotary_emb_base": 25000},
        {"rope_type": "default", "rope_theta": 25000, "partial_rotary_factor": 0.5},
    ),
    "gpt2": ({"n_inner": None, "n_ctx": 128}, None),
}
NEWER = {"architectures", "dtype", "layer_types", "rope_parameters", "transformers_version"}


@pytest.mark.parametrize("name", OLD_FILES)
def test_config_files_of_older_versions_are_read(name):
    given, rope = OLD_FILES[name]
    settings = golden_settings(name, rope_parameters=rope)
    absent = NEWER | ({"tie_word_embeddings"} if name.startswith("gpt") else set())
    old = {field: value for field, value in settings.items() if field not in absent}
    want = families.transformer_config(settings)
    if name == "gpt2":
        want = dataclasses.replace(want, mlp_size=4 * want.hidden_size)
    old |= {"torch_dtype": "bfloat16", **given}
    assert families.transformer_config(old) == want


YARN_FILE = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, 1 + 0.1 * np.log(4)),
        ({"mscale": 1.5, "mscale_all_dim": 0.7}, (1 + 0.15 * np.log(4)) / (1 + 0.07 * np.log(4))),
        ({"mscale": 1.5}, 1 + 0.1 * np.log(4)),  # both or none
        ({"attention_factor": 1.25, "mscale": 1.5, "mscale_all_dim": 0.7}, 1.25),
        ({"factor": 0.5}, 1.0),
        ({"factor": None}, 1 + 0.1 * np.log(2)),  # 64 positions over the original 32
    ],
)
def test_the_attention_factor_of_yarn(given, want):
    settings = {"rope_parameters": YARN_FILE | given, "max_position_embeddings": 64}
    scaling = families.transformer_config(golden_settings("llama", **settings)).rope_scaling
    assert scaling.attention_factor == pytest.approx(want, rel=1e-12)


def test_yarn_gives_the_scaled_context():
    """Qwen2.5 keeps the context before the extension as max_position_embeddings."""
    for longest, want in ((32, 128), (64, 128), (200, 200)):
        settings = {"rope_scaling": YARN_FILE, "max_position_embeddings": longest}
        read = families.transformer_config(golden_settings("llama", **settings))
        assert read.max_positions == want
