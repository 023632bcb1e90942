# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `config.json` <-> TransformerConfig, for the Llama and Qwen2 families.

A setting this model does not implement is refused by name; nothing is ignored silently. It does
not read files and does not know weight names (`hf_weights` does).
"""

import math
from collections.abc import Mapping
from typing import Any

from tba_jax.models.transformer import TransformerConfig

ARCHITECTURES = {"llama": "LlamaForCausalLM", "qwen2": "Qwen2ForCausalLM"}
# transformers' own defaults, for fields that old config.json files leave out.
_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu"},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu"},
}


def transformer_config(hf_config: Mapping[str, Any]) -> TransformerConfig:
    """Our architecture for the contents of a Hugging Face config.json.

    Raises:
        ValueError: naming the setting, the value it has and the values that are covered.
    """
    family = hf_config.get("model_type")
    if family not in ARCHITECTURES:
        raise _unsupported("model_type", family, " or ".join(ARCHITECTURES))
    values = {**_DEFAULTS[family], **{k: v for k, v in hf_config.items() if v is not None}}
    required = (
        "vocab_size",
        "hidden_size",
        "num_hidden_layers",
        "num_attention_heads",
        "intermediate_size",
    )
    missing = [name for name in required if name not in values]
    if missing:
        raise ValueError(f"config.json of a {family} model lacks {', '.join(missing)}")
    if values["hidden_act"] != "silu":
        raise _unsupported("hidden_act", values["hidden_act"], "silu")
    if values.get("mlp_bias"):
        raise _unsupported("mlp_bias", True, "false")
    if values.get("use_sliding_window"):
        raise _unsupported("use_sliding_window", True, "false")
    layer_types = sorted(set(values.get("layer_types", ())) - {"full_attention"})
    if layer_types:
        raise _unsupported("layer_types", ", ".join(layer_types), "full_attention")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method")
        raise _unsupported("quantization_config.quant_method", method, "unquantised weights")
    attention_bias = bool(values.get("attention_bias", False))
    num_heads = values["num_attention_heads"]
    return TransformerConfig(
        vocab_size=values["vocab_size"],
        hidden_size=values["hidden_size"],
        num_layers=values["num_hidden_layers"],
        num_heads=num_heads,
        num_kv_heads=values.get("num_key_value_heads", num_heads),
        head_dim=values.get("head_dim", values["hidden_size"] // num_heads),
        mlp_size=values["intermediate_size"],
        rope_theta=_rope_theta(values),
        norm_eps=values["rms_norm_eps"],
        qkv_bias=family == "qwen2" or attention_bias,
        o_bias=family == "llama" and attention_bias,
        tie_embeddings=bool(values.get("tie_word_embeddings", False)),
        max_positions=values["max_position_embeddings"],
    )


def hf_config(
    config: TransformerConfig,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """A config.json that transformers loads as the same architecture."""
    family = "qwen2" if config.qkv_bias and not config.o_bias else "llama"
    values = {
        "architectures": [ARCHITECTURES[family]],
        "model_type": family,
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "intermediate_size": config.mlp_size,
        "hidden_act": "silu",
        "rms_norm_eps": config.norm_eps,
        # Both spellings: transformers reads rope_theta up to 4.x and rope_parameters from 5.
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, "rope_type": "default"},
        "max_position_embeddings": config.max_positions,
        "tie_word_embeddings": config.tie_embeddings,
        "attention_dropout": 0.0,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": dtype,
    }
    if family == "llama":
        values |= {"attention_bias": config.o_bias, "mlp_bias": False}
        if config.qkv_bias != config.o_bias:
            raise ValueError(
                f"qkv_bias = {config.qkv_bias} with o_bias = {config.o_bias}: no Hugging Face "
                "family has an output bias alone; export needs both, none, or qkv_bias only"
            )
    return values


def _rope_theta(values: Mapping[str, Any]) -> float:
    parameters = values.get("rope_parameters") or {}
    scaling = values.get("rope_scaling")
    for name, rope in (("rope_scaling", scaling), ("rope_parameters", parameters)):
        kind = (rope or {}).get("rope_type", (rope or {}).get("type", "default"))
        if kind != "default":
            raise _unsupported(f"{name}.rope_type", kind, "default")
    partial = values.get("partial_rotary_factor", parameters.get("partial_rotary_factor", 1.0))
    if not math.isclose(partial, 1.0):
        raise _unsupported("partial_rotary_factor", partial, "1.0")
    return float(parameters.get("rope_theta", values.get("rope_theta", 10000.0)))


def _unsupported(setting: str, got: Any, wanted: str) -> ValueError:
    return ValueError(
        f"config.json has {setting} = {got!r}, which this model does not implement (it covers: "
        f"{wanted}). Choose a checkpoint of the Llama or Qwen2 family without that setting"
    )
