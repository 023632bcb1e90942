# SPDX-License-Identifier: Apache-2.0
"""Every family equals transformers' own model, and its config.json is read and written.

The golden files come from tests/golden/make_golden.py (transformers 5.23.0, torch 2.13.0), which
also says how ties between greedy tokens are kept out. Where torch is installed, test_parity.py
makes more such comparisons, in both directions.
"""

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from fake_models import (
    FAMILIES,
    GOLDEN,
    STORIES,
    assert_close,
    bfloat16_kl,
    load_folder,
    logits_of,
    tiny_config,
)
from hf_settings import hf_config

from tba_jax.models import classifier, rope
from tba_jax.models.hf import families
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig

MODELS = {
    path.parent.name: json.loads(path.read_text())["model_type"]
    for path in sorted(GOLDEN.glob("*/config.json"))
}
MODELS = {name: family for name, family in MODELS.items() if family in families.FAMILIES}
CLASSIFIERS = [name for name in MODELS if name.endswith(("_classifier", "_reward"))]
LANGUAGE_MODELS = [name for name in MODELS if name not in CLASSIFIERS]


def test_there_is_a_golden_model_of_every_family():
    assert set(MODELS.values()) == set(families.FAMILIES) == set(FAMILIES)


@pytest.mark.parametrize("name", LANGUAGE_MODELS)
def test_logits_and_greedy_tokens_equal_those_of_transformers(name):
    """Alone, padded left and padded right, in one batch; then in bfloat16."""
    config, params, _ = load_folder(GOLDEN / name)
    golden = np.load(GOLDEN / f"{name}.npz")
    n, m = golden["tokens"].shape[1], golden["greedy"].shape[1]
    width = golden["left_mask"].shape[1]
    # One pass over prompt + golden response: each greedy token is the argmax before it.
    plain = np.concatenate([golden["tokens"], golden["greedy"]], axis=1)
    tail = ((0, 0), (0, n + m - width))
    tokens = [plain, *(np.pad(golden[f"{side}_tokens"], tail) for side in ("left", "right"))]
    masks = [plain >= 0, *(np.pad(golden[f"{side}_mask"], tail) for side in ("left", "right"))]
    tokens, mask = np.concatenate(tokens), np.concatenate(masks)
    logits = logits_of(config, params, tokens, mask)
    alone, left, right = np.split(logits, 3)
    assert np.abs(golden["logits"]).max() > 1  # the golden model says something
    assert_close(alone[:, :n], golden["logits"])
    np.testing.assert_array_equal(alone.argmax(-1)[:, n - 1 : -1], golden["greedy"])
    assert len(np.unique(golden["greedy"])) >= 10 and m == 64
    for side, got in (("left", left), ("right", right)):
        valid = golden[f"{side}_mask"]
        assert_close(got[:, :width][valid], golden[f"{side}_logits"][valid])
    assert np.isfinite(logits).all()
    low = logits_of(config, params, tokens, mask, jnp.bfloat16)
    want, got = jax.nn.log_softmax(logits[mask]), jax.nn.log_softmax(low[mask])
    kl = np.mean(np.sum(np.exp(want) * (want - got), axis=-1))
    assert 1e-6 < kl < bfloat16_kl(config)


@pytest.mark.parametrize("name", CLASSIFIERS)
def test_scores_equal_those_of_transformers(name):
    config, params, _ = load_folder(GOLDEN / name)
    golden = np.load(GOLDEN / f"{name}.npz")
    assert golden["logits"].shape[1] == config.num_labels and "unembed" not in params
    width = golden["left_mask"].shape[1]
    plain = np.pad(golden["tokens"], ((0, 0), (0, width - golden["tokens"].shape[1])))
    tokens = np.concatenate([plain, golden["left_tokens"], golden["right_tokens"]])
    score = jax.jit(classifier.classify, static_argnames=("config", "compute_dtype"))
    kwargs = {"config": config, "compute_dtype": jnp.float32}
    # The rows hold no pad tokens (0), so that this is also the mask that transformers guesses.
    scores = score(params, jnp.array(tokens), jnp.array(tokens != 0), **kwargs)
    for got, kind in zip(
        np.split(scores, 3), ("logits", "left_logits", "right_logits"), strict=True
    ):
        assert_close(got, golden[kind])


@pytest.mark.skipif(not STORIES.is_dir(), reason="../shared/models/stories260k is absent")
def test_the_greedy_story_is_that_of_transformers():
    golden = json.loads((GOLDEN / "stories260k.json").read_text())
    config, params, _ = load_folder(STORIES)
    tokens = np.array([golden["prompt_ids"] + golden["greedy_ids"]])
    found = logits_of(config, params, tokens, tokens >= 0).argmax(-1)
    greedy = found[0, len(golden["prompt_ids"]) - 1 : -1].tolist()
    assert greedy == golden["greedy_ids"] and len(greedy) == 64
    assert Tokenizer.load(STORIES).decode(greedy) == golden["text"]


LLAMA3 = rope.Llama3Scaling(8.0, 1.0, 4.0, 8192)
YARN = rope.YarnScaling(4.0, 32768, 1.2, beta_fast=16.0, truncate=False)


@pytest.mark.parametrize(
    "changes",
    [
        *({"family": family} for family in FAMILIES),
        # transformers has no classifier of Qwen3.5 with experts.
        *({"family": x, "num_labels": 1} for x in FAMILIES if x != "qwen3_5_moe_text"),
        {"num_labels": 2},
        {"tie_embeddings": False, "o_bias": True, "qkv_bias": True, "mlp_bias": True},
        {"rope_scaling": LLAMA3, "activation": "gelu"},
        {"family": "qwen2", "rope_scaling": YARN, "rope_theta": 1e6, "max_positions": 4 * 32768},
        {"family": "qwen3", "qkv_bias": True, "o_bias": True, "head_dim": 8},
        {"family": "gpt_neox", "rotary_fraction": 1.0, "rope_scaling": rope.LinearScaling(2.0)},
        {"family": "gpt_neox", "parallel_residual": False, "activation": "gelu_tanh"},
        {"family": "gpt_neox", "qkv_bias": False, "o_bias": False, "tie_embeddings": True},
        {"family": "gpt2", "activation": "gelu", "tie_embeddings": False},
    ],
)
def test_every_architecture_is_read_back_as_written(changes):
    config = tiny_config(**changes)
    written = hf_config(config, eos_token_id=2)
    assert families.transformer_config(json.loads(json.dumps(written))) == config
    assert written["eos_token_id"] == 2 and written["model_type"] == config.family


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        # What the model does not implement.
        ("llama", {"model_type": "gemma4"}, r"model_type = 'gemma4'.*llama, qwen2, qwen3"),
        ("llama", {"architectures": ["LlamaForTokenClassification"]}, "TokenClassification'.*or"),
        ("llama", {"hidden_act": "relu"}, r"hidden_act = 'relu'.*covers: silu"),
        ("qwen2", {"mlp_bias": True}, r"mlp_bias = True.*false for qwen2"),
        ("qwen2", {"use_sliding_window": True}, r"use_sliding_window = True"),
        ("qwen3", {"layer_types": ["sliding_attention"]}, r"layer_types = 'sliding_attention'"),
        ("qwen3_5_text", {"layer_types": ["mamba"] * 4}, "layer_types = 'mamba'.*linear_attention"),
        ("gemma2", {"layer_types": ["full_attention"]}, "layer_types of 1 layers"),
        ("llama", {"rope_scaling": {"type": "dynamic", "factor": 2}}, "rope_type = 'dynamic'"),
        ("llama", {"rope_parameters": {"rope_type": "longrope"}}, "rope_type = 'longrope'"),
        ("llama", {"rope_scaling": {"type": "linear"}}, r"lacks rope_scaling.factor"),
        ("llama", {"rope_parameters": {"full_attention": {}}}, "one entry per full_attention"),
        ("llama", {"partial_rotary_factor": 0.5}, r"partial_rotary_factor = 0.5.*1.0 for llama"),
        ("llama", {"quantization_config": {"quant_method": "awq"}}, r"quant_method = 'awq'"),
        ("gpt2", {"add_cross_attention": True}, r"add_cross_attention = True.*covers: false"),
        ("gpt2", {"scale_attn_weights": False}, r"scale_attn_weights = False.*covers: true"),
        ("gpt2", {"pruned_heads": {"0": [1]}}, "pruned_heads"),
        ("qwen3_moe", {"mlp_only_layers": [0]}, r"mlp_only_layers = \[0\].*\[\] for qwen3_moe"),
        ("gpt_oss", {"swiglu_limit": 3.0}, "swiglu_limit = 3.0.*7.0 for gpt_oss"),
        # Sizes that do not fit each other, or are absent.
        ("llama", {"num_hidden_layers": None}, r"llama model lacks num_hidden_layers"),
        ("mistral", {"sliding_window": 65}, "window = 65, .*: window layers need"),
        (
            "qwen3_moe",
            {"num_experts_per_tok": 5},
            "experts_per_token = 5, num_experts = 4: must be",
        ),
        (
            "qwen3_5_text",
            {"linear_num_key_heads": 3},
            "delta_value_heads = 4, delta_key_heads = 3: ",
        ),
        # Values of another type or range.
        ("llama", {"hidden_size": "64"}, r"hidden_size = '64'; wanted a whole number above 0"),
        ("qwen2", {"tie_word_embeddings": "false"}, "tie_word_embeddings = 'false'; wanted true"),
        ("qwen3", {"rms_norm_eps": float("nan")}, "rms_norm_eps = nan; wanted"),
        (
            "llama",
            {"rope_parameters": {"rope_theta": -1.0}},
            r"rope_parameters.rope_theta = -1.0; wanted",
        ),
    ],
)
def test_settings_that_are_wrong_or_not_implemented_are_refused_by_name(family, changes, message):
    written = hf_config(tiny_config(family=family))
    with pytest.raises(ValueError, match=message) as info:
        families.transformer_config(json.loads(json.dumps(written)) | changes)
    assert "\n" not in str(info.value) and len(str(info.value)) < 600


def test_settings_without_effect_at_inference_are_accepted():
    config = tiny_config(family="gpt2")
    harmless = {"attn_pdrop": 0.1, "reorder_and_upcast_attn": True, "initializer_range": 0.02}
    assert families.transformer_config(hf_config(config) | harmless) == config


_OLD = {
    **{"vocab_size": 10, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 4},
    **{"intermediate_size": 40, "rms_norm_eps": 1e-5, "max_position_embeddings": 2048},
    "hidden_act": "silu",
}
_OURS = TransformerConfig(10, 32, 3, 4, 4, 8, 40, tie_embeddings=False)
_NEOX = dataclasses.replace(
    tiny_config(family="gpt_neox"),
    **{"vocab_size": 10, "hidden_size": 32, "num_layers": 3, "head_dim": 8, "mlp_size": 40},
    max_positions=2048,
)


@pytest.mark.parametrize(
    ("theirs", "want"),
    [
        (  # Qwen2 of transformers 4
            {
                "model_type": "qwen2",
                "max_position_embeddings": 32768,
                "rope_theta": 1000000.0,
                "rope_scaling": None,
                "sliding_window": 4096,
                "use_sliding_window": False,
                "torch_dtype": "bfloat16",
            },
            dataclasses.replace(
                _OURS,
                family="qwen2",
                rope_theta=1000000.0,
                qkv_bias=True,
                max_positions=32768,
            ),
        ),
        (  # Llama 3.1
            {
                "model_type": "llama",
                "num_key_value_heads": 2,
                "max_position_embeddings": 131072,
                "rope_theta": 500000.0,
                "rope_scaling": {
                    "factor": 8.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                    "rope_type": "llama3",
                },
                "pretraining_tp": 1,
            },
            dataclasses.replace(
                _OURS,
                num_kv_heads=2,
                max_positions=131072,
                rope_theta=500000.0,
                rope_scaling=LLAMA3,
            ),
        ),
        (  # Pythia
            {
                "model_type": "gpt_neox",
                "rotary_pct": 0.5,
                "rotary_emb_base": 25000,
                "layer_norm_eps": 1e-5,
                "hidden_act": "gelu",
                "use_parallel_residual": True,
                "classifier_dropout": 0.1,
            },
            dataclasses.replace(_NEOX, rope_theta=25000.0),
        ),
        (  # GPT-2 of the hub
            {
                "model_type": "gpt2",
                "n_embd": 32,
                "n_layer": 3,
                "n_head": 4,
                "n_ctx": 1024,
                "n_inner": None,
                "n_positions": 1024,
                "layer_norm_epsilon": 1e-5,
                "activation_function": "gelu_new",
                "task_specific_params": {"text-generation": {"max_length": 50}},
            },
            dataclasses.replace(
                tiny_config(family="gpt2"),
                **{"vocab_size": 10, "hidden_size": 32, "num_layers": 3, "head_dim": 8},
                mlp_size=128,
                max_positions=1024,
            ),
        ),
        (  # two labels are transformers' default and not written
            {"model_type": "llama", "architectures": ["LlamaForSequenceClassification"]},
            dataclasses.replace(_OURS, num_labels=2),
        ),
    ],
)
def test_config_files_of_older_versions_are_read(theirs, want):
    assert families.transformer_config(_OLD | theirs) == want


@pytest.mark.parametrize(
    ("given", "want"),
    [
        ({}, 1 + 0.1 * np.log(4)),
        ({"mscale": 1.5, "mscale_all_dim": 0.7}, (1 + 0.15 * np.log(4)) / (1 + 0.07 * np.log(4))),
        ({"mscale": 1.5}, 1 + 0.1 * np.log(4)),  # both or none
        ({"attention_factor": 1.25, "mscale": 1.5, "mscale_all_dim": 0.7}, 1.25),
        ({"factor": 0.5}, 1.0),
        ({"factor": None}, 1 + 0.1 * np.log(2)),  # max_positions 64 over the original 32
    ],
)
def test_the_attention_factor_of_yarn(given, want):
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    written = hf_config(tiny_config()) | {"rope_parameters": yarn | given}
    scaling = families.transformer_config(written).rope_scaling
    assert scaling.attention_factor == pytest.approx(want, rel=1e-12)


@pytest.mark.parametrize(("longest", "want"), [(32, 128), (64, 128), (200, 200)])
def test_yarn_gives_the_scaled_context(longest, want):
    """Qwen2.5 keeps the context before the extension as max_position_embeddings."""
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 32}
    written = hf_config(tiny_config()) | {"rope_scaling": yarn}
    read = families.transformer_config(written | {"max_position_embeddings": longest})
    assert read.max_positions == want
    assert families.transformer_config(hf_config(read)) == read
