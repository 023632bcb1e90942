# SPDX-License-Identifier: Apache-2.0
"""Hugging Face `config.json` <-> TransformerConfig: Llama, Qwen2, Qwen3, GPT-NeoX and GPT-2.

A setting this model does not implement is refused by name; a setting that transformers itself does
not use at inference (dropout, initialiser range) is passed over. It does not read files and does
not know tensor names (`hf_names` does). The invariant it owns:
transformer_config(hf_config(config)) == config, or hf_config refuses.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from tba_jax.models import rope
from tba_jax.models.transformer import TransformerConfig

# Family -> class of a language model, class of a sequence classifier or reward model.
ARCHITECTURES = {
    "llama": ("LlamaForCausalLM", "LlamaForSequenceClassification"),
    "qwen2": ("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    "qwen3": ("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    "gpt_neox": ("GPTNeoXForCausalLM", "GPTNeoXForSequenceClassification"),
    "gpt2": ("GPT2LMHeadModel", "GPT2ForSequenceClassification"),
}
# transformers' own defaults, for fields that config.json leaves out.
_DEFAULTS = {
    "llama": {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu"},
    "qwen2": {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu"},
    "qwen3": {
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 32768,
        "hidden_act": "silu",
        "head_dim": 128,
    },
    "gpt_neox": {
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    "gpt2": {
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
}
# Our word -> that of config.json.
_LLAMA_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
    "norm_eps": "rms_norm_eps",
}
_KEYS = {
    "llama": _LLAMA_KEYS,
    "qwen2": _LLAMA_KEYS,
    "qwen3": _LLAMA_KEYS,
    "gpt_neox": _LLAMA_KEYS | {"norm_eps": "layer_norm_eps"},
    "gpt2": {
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "mlp_size": "n_inner",
        "max_positions": "n_positions",
        "activation": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    },
}
_ACTIVATIONS = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    # Four spellings of one polynomial inside tanh.
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}
# Settings that transformers acts upon and this model does not: only these values are covered.
_COVERED = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_sliding_window": False,
}


def transformer_config(hf_config: Mapping[str, Any]) -> TransformerConfig:
    """Our architecture for the contents of a Hugging Face config.json.

    Raises:
        ValueError: naming the setting, the value it has and the values that are covered.
    """
    family = hf_config.get("model_type")
    if family not in ARCHITECTURES:
        raise _unsupported("model_type", family, ", ".join(ARCHITECTURES))
    values = {**_DEFAULTS[family], **{k: v for k, v in hf_config.items() if v is not None}}
    is_classifier = _is_classifier(values, family)
    _refuse(values, family)
    ours = {our: values[their] for our, their in _KEYS[family].items() if their in values}
    if family == "gpt2" and "hidden_size" in ours:
        ours.setdefault("mlp_size", 4 * ours["hidden_size"])
    missing = [their for our, their in _KEYS[family].items() if our not in ours]
    if missing:
        raise ValueError(f"config.json of a {family} model lacks {', '.join(missing)}")
    activation = ours.pop("activation")
    if activation not in _ACTIVATIONS:
        raise _unsupported(_KEYS[family]["activation"], activation, ", ".join(_ACTIVATIONS))
    num_heads, has_bias = ours["num_heads"], bool(values.get("attention_bias", False))
    old = family in ("gpt_neox", "gpt2")
    head_dim = None if old else values.get("head_dim")
    if head_dim is None and ours["hidden_size"] % num_heads:
        raise ValueError(
            f"config.json of a {family} model has {_KEYS[family]['hidden_size']} = "
            f"{ours['hidden_size']}, not a multiple of its {num_heads} attention heads, and no "
            "head_dim; correct one of them"
        )
    ours |= {
        "family": family,
        "activation": _ACTIVATIONS[activation],
        "num_kv_heads": num_heads if old else values.get("num_key_value_heads", num_heads),
        "head_dim": head_dim or ours["hidden_size"] // num_heads,
        "norm": "layer" if old else "rms",
        "gated_mlp": not old,
        "qk_norm": family == "qwen3",
        "qkv_bias": family in ("qwen2", "gpt2") or has_bias,
        "o_bias": family == "gpt2" or (family != "qwen2" and has_bias),
        "mlp_bias": old or (family == "llama" and bool(values.get("mlp_bias", False))),
        "parallel_residual": family == "gpt_neox" and bool(values["use_parallel_residual"]),
        "tie_embeddings": bool(values.get("tie_word_embeddings", False)),
        "num_labels": _num_labels(values) if is_classifier else 0,
    }
    ours |= {"positions": "learned"} if family == "gpt2" else _rotary(values, family)
    return TransformerConfig(**ours)


def hf_config(
    config: TransformerConfig,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """A config.json that transformers loads as the same architecture.

    Raises:
        ValueError: naming what the family of `config` cannot express.
    """
    family = config.family
    values = {
        "architectures": [ARCHITECTURES[family][bool(config.num_labels)]],
        "model_type": family,
        "tie_word_embeddings": config.tie_embeddings,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": dtype,
    }
    values |= {their: getattr(config, our) for our, their in _KEYS[family].items()}
    if config.activation == "gelu_tanh":
        name = "gelu_new" if family == "gpt2" else "gelu_pytorch_tanh"
        values[_KEYS[family]["activation"]] = name
    if family in ("llama", "qwen2", "qwen3"):
        values |= {
            "num_key_value_heads": config.num_kv_heads,
            "head_dim": config.head_dim,
            "attention_dropout": 0.0,
        }
    if family in ("llama", "qwen3", "gpt_neox"):
        values["attention_bias"] = config.qkv_bias
    if family == "llama":
        values["mlp_bias"] = config.mlp_bias
    if family == "gpt_neox":
        values["use_parallel_residual"] = config.parallel_residual
    if family != "gpt2":
        values |= _rope_values(config)
    if config.num_labels:
        names = [f"LABEL_{i}" for i in range(config.num_labels)]
        values["id2label"] = {str(i): name for i, name in enumerate(names)}
        values["label2id"] = {name: i for i, name in enumerate(names)}
    read = transformer_config(values)
    lost = [
        f"{field.name} = {getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(read, field.name) != getattr(config, field.name)
    ]
    if lost:
        raise ValueError(
            f"no Hugging Face family {family!r} with {', '.join(lost)}. Export needs an "
            "architecture that the family has; choose another `family` or change these"
        )
    return values


def _is_classifier(values: Mapping[str, Any], family: str) -> bool:
    architectures = values.get("architectures") or ARCHITECTURES[family][:1]
    for name in architectures:
        if name not in ARCHITECTURES[family]:
            raise _unsupported("architectures", name, " or ".join(ARCHITECTURES[family]))
    return architectures[0] == ARCHITECTURES[family][1]


def _num_labels(values: Mapping[str, Any]) -> int:
    """transformers writes no id2label for its default of two labels."""
    labels = values.get("id2label")
    return int(values.get("num_labels", 2)) if labels is None else len(labels)


def _refuse(values: Mapping[str, Any], family: str) -> None:
    """Raise for the first setting that would change the numbers and is not implemented."""
    for setting, covered in _COVERED.items():
        if bool(values.get(setting, covered)) != covered:
            raise _unsupported(setting, values[setting], str(covered).lower())
    if family in ("qwen2", "qwen3") and values.get("mlp_bias"):
        raise _unsupported("mlp_bias", values["mlp_bias"], f"false for {family}")
    if values.get("pruned_heads"):
        raise _unsupported("pruned_heads", values["pruned_heads"], "{}")
    layer_types = sorted(set(values.get("layer_types", ())) - {"full_attention"})
    if layer_types:
        raise _unsupported("layer_types", ", ".join(layer_types), "full_attention")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method")
        raise _unsupported("quantization_config.quant_method", method, "unquantised weights")


def _rotary(values: Mapping[str, Any], family: str) -> dict[str, Any]:
    """Fields of TransformerConfig for the rotary settings, in either spelling.

    `rope_parameters` is that of transformers 5; before, `rope_theta`, `rope_scaling` and (GPT-NeoX)
    `rotary_emb_base` and `rotary_pct` stood apart. Where a file has both scalings, transformers
    takes the old one.
    """
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    given = {k: v for k, v in (values.get(name) or {}).items() if v is not None}
    nested = [k for k, v in given.items() if isinstance(v, Mapping)]
    if nested:
        raise _unsupported(name, f"one entry per {', '.join(nested)}", "one for all layers")
    theta = values.get("rope_theta", 10000.0)
    fraction = values.get("partial_rotary_factor", 1.0)
    if family == "gpt_neox":
        theta = values.get("rotary_emb_base", theta)
        fraction = values.get("rotary_pct", values.get("partial_rotary_factor", 0.25))
    fraction = given.get("partial_rotary_factor", fraction)
    if family != "gpt_neox" and not math.isclose(fraction, 1.0):
        raise _unsupported("partial_rotary_factor", fraction, f"1.0 for {family}")
    return {
        "rope_theta": float(given.get("rope_theta", theta)),
        "rotary_fraction": float(fraction),
        "rope_scaling": _scaling(given, name, values),
    }


def _scaling(given: Mapping[str, Any], name: str, values: Mapping[str, Any]) -> rope.Scaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    longest = values["max_position_embeddings"]
    original = values.get(
        "original_max_position_embeddings", given.get("original_max_position_embeddings", longest)
    )

    def number(key: str) -> float:
        if key not in given:
            raise ValueError(f"config.json has {name}.rope_type = {kind!r} but no {name}.{key}")
        return float(given[key])

    match kind:
        case "default":
            return None
        case "linear":
            return rope.LinearScaling(number("factor"))
        case "llama3":
            return rope.Llama3Scaling(
                factor=number("factor"),
                low_freq_factor=number("low_freq_factor"),
                high_freq_factor=number("high_freq_factor"),
                original_max_positions=int(original),
            )
        case "yarn":
            factor = float(given.get("factor", longest / original))
            return rope.YarnScaling(
                factor=factor,
                original_max_positions=int(original),
                attention_factor=_yarn_attention_factor(given, factor),
                beta_fast=float(given.get("beta_fast") or 32),
                beta_slow=float(given.get("beta_slow") or 1),
                truncate=bool(given.get("truncate", True)),
            )
    raise _unsupported(f"{name}.rope_type", kind, "default, linear, llama3, yarn")


def _yarn_attention_factor(given: Mapping[str, Any], factor: float) -> float:
    """1 + 0.1 ln(factor), the paper's, unless the file says otherwise."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 1.0 + 0.1 * weight * math.log(factor)

    if "attention_factor" in given:
        return float(given["attention_factor"])
    above, below = given.get("mscale"), given.get("mscale_all_dim")
    return scale(above) / scale(below) if above and below else scale(1.0)


def _rope_values(config: TransformerConfig) -> dict[str, Any]:
    """Both spellings: transformers reads the old fields up to 4.x, rope_parameters from 5."""
    scaling: dict[str, Any] = {"rope_type": "default"}
    match config.rope_scaling:
        case rope.LinearScaling(factor):
            scaling = {"rope_type": "linear", "factor": factor}
        case rope.Llama3Scaling() as s:
            scaling = {
                "rope_type": "llama3",
                "factor": s.factor,
                "low_freq_factor": s.low_freq_factor,
                "high_freq_factor": s.high_freq_factor,
                "original_max_position_embeddings": s.original_max_positions,
            }
        case rope.YarnScaling() as s:
            scaling = {
                "rope_type": "yarn",
                "factor": s.factor,
                "original_max_position_embeddings": s.original_max_positions,
                "attention_factor": s.attention_factor,
                "beta_fast": s.beta_fast,
                "beta_slow": s.beta_slow,
                "truncate": s.truncate,
            }
    values: dict[str, Any] = {
        "rope_theta": config.rope_theta,
        "rope_parameters": {"rope_theta": config.rope_theta, **scaling},
    }
    if config.rope_scaling is not None:
        values["rope_scaling"] = dict(scaling)
    if config.family == "gpt_neox":
        values["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
        values |= {"rotary_emb_base": config.rope_theta, "rotary_pct": config.rotary_fraction}
    return values


def _unsupported(setting: str, got: Any, wanted: str) -> ValueError:
    return ValueError(
        f"config.json has {setting} = {got!r}, which this model does not implement (it covers: "
        f"{wanted}). Choose a checkpoint of the Llama, Qwen2, Qwen3, GPT-NeoX or GPT-2 family "
        "without that setting"
    )
