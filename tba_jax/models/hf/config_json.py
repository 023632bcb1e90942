# SPDX-License-Identifier: Apache-2.0
"""Conversion between a Hugging Face `config.json` and TransformerConfig, for all `families`.

A setting that this model does not implement is refused by name; a setting that transformers does
not use at inference (dropout, initialiser range) is ignored. Invariant:
transformer_config(hf_config(config)) == config, or hf_config refuses.
"""

import dataclasses
import json
import math
from collections.abc import Mapping
from typing import Any

from tba_jax.models import rope
from tba_jax.models.architecture import Activation, LayerKind
from tba_jax.models.hf import config_values
from tba_jax.models.hf.families import FAMILIES, Family, Rotary
from tba_jax.models.transformer import TransformerConfig

# Boolean fields, which are False if config.json lacks the setting.
_FLAGS = {field.name for field in dataclasses.fields(TransformerConfig) if field.type is bool}
_SIZES = (
    *("vocab_size", "hidden_size", "num_layers", "num_heads", "num_kv_heads", "head_dim"),
    *("mlp_size", "max_positions", "window", "num_experts", "experts_per_token", "shared_size"),
    *("delta_key_heads", "delta_value_heads", "delta_key_dim", "delta_value_dim", "delta_taps"),
)
_NUMBERS = ("norm_eps", "score_divisor", "attention_cap", "logits_cap")
# Fields whose setting may be null or missing; only a missing setting gets the default.
_OPTIONAL = {"head_dim", "window", "score_divisor", "attention_cap", "logits_cap"}
_LAYER_TYPES: Mapping[str, LayerKind] = {
    "full_attention": "full",
    "sliding_attention": "window",
    "linear_attention": "delta",
}
# Multimodal models: model_type -> model_type of the language model inside.
_MULTIMODAL = {
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
_ACTIVATIONS: Mapping[Any, Activation] = {
    "silu": "silu",
    "swish": "silu",
    "gelu": "gelu",
    "gelu_python": "gelu",
    # Four names of one polynomial inside tanh.
    "gelu_new": "gelu_tanh",
    "gelu_fast": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_python_tanh": "gelu_tanh",
}
# Settings that transformers supports and this model does not, with the accepted values.
_COVERED = {
    "add_cross_attention": False,
    "is_encoder_decoder": False,
    "scale_attn_by_inverse_layer_idx": False,
    "scale_attn_weights": True,
    "use_sliding_window": False,
}


def language_model(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model in a multimodal model; else the argument."""
    inner = hf_config.get("text_config")
    name = _MULTIMODAL.get(str(hf_config.get("model_type")))
    if name is None or not isinstance(inner, Mapping):
        return dict(hf_config)
    outer = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
    shared = {key: hf_config[key] for key in outer if key in hf_config}
    return {**shared, **inner, "model_type": name, "architectures": [FAMILIES[name].classes[0]]}


def transformer_config(hf_config: Mapping[str, Any]) -> TransformerConfig:
    """Return the architecture for the contents of a Hugging Face config.json.

    Raises:
        ValueError: an unsupported setting; names its value and the supported values.
    """
    config_values.check_kinds(hf_config)
    name = hf_config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"config.json has model_type = {name!r}, which this model does not implement (it "
            f"covers: {', '.join(FAMILIES)}). Choose a checkpoint of one of these families, or "
            "add a record to tba_jax/models/hf/families.py as docs/extend.md shows"
        )
    family = FAMILIES[name]
    renamed = {new: hf_config[x] for x, new in family.other_settings.items() if x in hf_config}
    hf_config = {**renamed, **hf_config}
    values = {**family.defaults, **{k: v for k, v in hf_config.items() if v is not None}}
    for field in _OPTIONAL & family.keys.keys():
        setting = family.keys[field]
        if setting in hf_config and hf_config[setting] is None and field != "head_dim":
            values.pop(setting, None)
    config_values.check_sizes(values, {x: y for x, y in family.keys.items() if x in _SIZES})
    config_values.check_flags(values, (y for x, y in family.keys.items() if x in _FLAGS))
    config_values.check_numbers(values, [family.keys[x] for x in _NUMBERS if x in family.keys])
    is_classifier = _is_classifier(values, family)
    _refuse(values, family)
    ours = {our: values[their] for our, their in family.keys.items() if their in values}
    ours |= {flag: bool(ours.get(flag, False)) for flag in _FLAGS & family.keys.keys()}
    if "num_heads" in ours:
        ours.setdefault("num_kv_heads", ours["num_heads"])
    if family.mlp_ratio and "hidden_size" in ours:
        ours.setdefault("mlp_size", family.mlp_ratio * ours["hidden_size"])
    missing = [x for our, x in family.keys.items() if our not in ours and our not in _OPTIONAL]
    if missing:
        raise ValueError(
            f"config.json of a {name} model lacks {', '.join(missing)}. Add them, as in the "
            "published config.json of the model"
        )
    activation = ours.pop("activation")
    if activation not in _ACTIVATIONS:
        raise _unsupported(family.keys["activation"], activation, ", ".join(_ACTIVATIONS))
    if "head_dim" not in ours:
        ours["head_dim"] = _head_dim(ours, family)
    ours |= _pattern(values, family, ours)
    _check_limits(ours, family)
    fields = {"activation": _ACTIVATIONS[activation], **family.traits}
    return TransformerConfig(
        **{**ours, **fields, **_positions(values, family, ours["pattern"])},
        family=name,
        num_labels=_num_labels(values) if is_classifier else 0,
    )


def hf_config(
    config: TransformerConfig,
    *,
    bos_token_id: int | None = None,
    eos_token_id: int | list[int] | None = None,
    pad_token_id: int | None = None,
    dtype: str = "float32",
) -> dict[str, Any]:
    """Return a config.json that transformers loads as the same architecture.

    Raises:
        ValueError: the family of `config` cannot express it; names the fields.
    """
    family = FAMILIES[config.family]
    values = {
        "architectures": [family.classes[-1 if config.num_labels else 0]],
        "model_type": family.name,
        "bos_token_id": bos_token_id,
        "eos_token_id": eos_token_id,
        "pad_token_id": pad_token_id,
        "dtype": dtype,
    }
    values |= {their: getattr(config, our) for our, their in family.keys.items()}
    setting = family.keys["activation"]
    if "activation" in family.traits:
        values[setting] = family.defaults[setting]
    elif config.activation == "gelu_tanh":
        spelling = family.defaults.get(setting)
        is_own = _ACTIVATIONS.get(spelling) == config.activation
        values[setting] = spelling if is_own else "gelu_pytorch_tanh"
    if "window" in family.keys:
        values["sliding_window"] = config.window or None
    if len(family.pattern) > 1:
        if "window" in family.keys:
            values["sliding_window"] = config.window or family.defaults["sliding_window"]
        names = {kind: name for name, kind in _LAYER_TYPES.items()}
        values["layer_types"] = [names[kind] for kind in config.layer_kinds]
    if config.score_divisor is None and "score_divisor" in family.keys:
        values[family.keys["score_divisor"]] = config.head_dim
    if family.rotary is not None:
        values |= _rope_values(config, family.rotary)
    if config.num_labels:
        names = [f"LABEL_{i}" for i in range(config.num_labels)]
        values["id2label"] = {str(i): name for i, name in enumerate(names)}
        values["label2id"] = {name: i for i, name in enumerate(names)}
    read = transformer_config(values)
    lost = [
        f"{field.name} = {getattr(config, field.name)!r}"
        for field in dataclasses.fields(config)
        if getattr(read, field.name) != getattr(config, field.name) and field.name != "num_tokens"
    ]
    if lost:
        raise ValueError(
            f"no Hugging Face family {family.name!r} with {', '.join(lost)}. Export needs an "
            "architecture that the family has; choose another `family` or change these"
        )
    return values


def _is_classifier(values: Mapping[str, Any], family: Family) -> bool:
    architectures = values.get("architectures") or family.classes[:1]
    for name in architectures:
        if name not in family.classes:
            raise _unsupported("architectures", name, " or ".join(family.classes))
    return architectures[0] in family.classes[1:]


def _head_dim(ours: Mapping[str, Any], family: Family) -> int:
    """Return the width divided by the number of heads, the default of head_dim."""
    size, num_heads = ours["hidden_size"], ours["num_heads"]
    if size % num_heads:
        raise ValueError(
            f"config.json of a {family.name} model has {family.keys['hidden_size']} = {size}, not "
            f"a multiple of its {num_heads} attention heads, and no head_dim; correct one of them"
        )
    return size // num_heads


def _num_labels(values: Mapping[str, Any]) -> int:
    """Return the number of labels; transformers omits id2label if there are two."""
    labels = values.get("id2label")
    return int(values.get("num_labels", 2)) if labels is None else len(labels)


def _refuse(values: Mapping[str, Any], family: Family) -> None:
    """Refuse the first setting that would change the results and is not implemented."""
    for table, whose in ((_COVERED, ""), (family.covered, f" for {family.name}")):
        for setting, covered in table.items():
            if values.get(setting, covered) != covered:
                raise _unsupported(setting, values[setting], f"{json.dumps(covered)}{whose}")
    if values.get("pruned_heads"):
        raise _unsupported("pruned_heads", values["pruned_heads"], "{}")
    if values.get("quantization_config"):
        method = values["quantization_config"].get("quant_method")
        if family.quantization is None or method != family.quantization:
            wanted = "unquantised weights" + (
                f", {family.quantization}" * bool(family.quantization)
            )
            raise _unsupported("quantization_config.quant_method", method, wanted)


def _pattern(values: Mapping[str, Any], family: Family, ours: Mapping[str, Any]) -> dict[str, Any]:
    """Return the fields of TransformerConfig for the pattern of layers."""
    num, window = ours["num_layers"], ours.get("window", 0)
    types = values.get("layer_types")
    others = {*family.pattern, *(("window",) if "window" in family.keys else ())} - {"full"}
    if types is None and (window or "delta" in others):
        pattern = family.pattern
        # Older files of Gemma 3, and files of Qwen3.5.
        for setting in ("sliding_window_pattern", "full_attention_interval"):
            if period := values.get(setting):
                pattern = (*family.pattern[:1] * (int(period) - 1), "full")
        kinds = [pattern[i % len(pattern)] for i in range(num)]
    else:
        known = [x for x, kind in _LAYER_TYPES.items() if kind == "full" or kind in others]
        for name in types or ():
            if name not in known:
                raise _unsupported("layer_types", name, f"{', '.join(known)} for {family.name}")
        kinds = [_LAYER_TYPES[name] for name in types or ["full_attention"] * num]
    if len(kinds) != num:
        raise ValueError(
            f"config.json has layer_types of {len(kinds)} layers and {family.keys['num_layers']} = "
            f"{num}; correct one of them"
        )
    # The shortest pattern that repeats.
    period = next(p for p in range(1, num + 1) if all(kinds[i] == kinds[i % p] for i in range(num)))
    if "window" in kinds and not window:
        raise ValueError(
            "config.json has layer_types with sliding_attention but no sliding_window; add it"
        )
    return {"pattern": tuple(kinds[:period]), "window": window if "window" in kinds else 0}


def _check_limits(ours: Mapping[str, Any], family: Family) -> None:
    """Refuse a window above max_positions, and more experts per token than the model has."""
    for small, large in (("window", "max_positions"), ("experts_per_token", "num_experts")):
        if ours.get(small, 0) > ours.get(large, 0):
            raise ValueError(
                f"config.json has {family.keys[small]} = {ours[small]}, above {family.keys[large]} "
                f"= {ours[large]}; lower it, or download the file again"
            )


def _positions(
    values: Mapping[str, Any], family: Family, pattern: tuple[LayerKind, ...]
) -> dict[str, Any]:
    """Return the fields of TransformerConfig for positions; rotary settings in either format.

    `rope_parameters` is the format of transformers 5. Earlier versions have separate settings for
    base, scaling and rotated share, with names that depend on the family. If a file has both
    scalings, transformers uses the earlier format.
    """
    rotary = family.rotary
    if rotary is None:
        return {"positions": "learned"}
    name = "rope_scaling" if values.get("rope_scaling") else "rope_parameters"
    given = {k: v for k, v in (values.get(name) or {}).items() if v is not None}
    nested = {k: v for k, v in given.items() if isinstance(v, Mapping)}
    if nested and rotary.window_theta is None:
        raise _unsupported(name, f"one entry per {', '.join(nested)}", "one for all layers")
    given, of_windows = nested.get("full_attention", {} if nested else given), {}
    if rotary.window_theta is not None:
        of_windows = nested.get("sliding_attention", {})
    if (kind := of_windows.get("rope_type", "default")) != "default":
        raise _unsupported(f"{name}.sliding_attention.rope_type", kind, "default")
    theta = values.get(rotary.theta, values.get("rope_theta", 10000.0))
    theta = config_values.number(f"{rotary.theta} (or rope_theta)", given.get("rope_theta", theta))
    fraction = values.get("partial_rotary_factor", rotary.default_fraction)
    fraction = given.get("partial_rotary_factor", values.get(rotary.fraction, fraction))
    fraction = config_values.number(rotary.fraction, fraction, least=-1.0)
    if not rotary.may_be_partial and not math.isclose(fraction, 1.0):
        raise _unsupported("partial_rotary_factor", fraction, f"1.0 for {family.name}")
    found = {
        "rope_theta": theta,
        "rotary_fraction": fraction,
        "rope_scaling": _scaling(given, name, values),
    }
    if isinstance(yarn := found["rope_scaling"], rope.YarnScaling):
        # Files of Qwen2.5 keep the context before the extension as max_position_embeddings.
        longest = int(yarn.factor * yarn.original_max_positions)
        found["max_positions"] = max(values["max_position_embeddings"], longest)
    if rotary.window_theta is not None and "window" in pattern:
        base = of_windows.get("rope_theta", values.get(rotary.window_theta, theta))
        base = config_values.number(rotary.window_theta, base)
        if found["rope_scaling"] is not None or base != theta:
            found["window_rope_theta"] = base
    return found


def _scaling(given: Mapping[str, Any], name: str, values: Mapping[str, Any]) -> rope.Scaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    longest = values["max_position_embeddings"]
    setting = "original_max_position_embeddings"
    original = config_values.number(setting, values.get(setting, given.get(setting, longest)))

    def number(key: str) -> float:
        if key not in given:
            raise ValueError(
                f"config.json has {name}.rope_type = {kind!r} but no {name}.{key}. Add "
                f"{name}.{key}, as in the published config.json of the model"
            )
        return config_values.number(f"{name}.{key}", given[key])

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
            factor = number("factor") if "factor" in given else longest / original
            return rope.YarnScaling(
                factor=factor,
                original_max_positions=int(original),
                attention_factor=_yarn_attention_factor(given, factor, name),
                beta_fast=number("beta_fast") if given.get("beta_fast") else 32.0,
                beta_slow=number("beta_slow") if given.get("beta_slow") else 1.0,
                truncate=bool(given.get("truncate", True)),
            )
    raise _unsupported(f"{name}.rope_type", kind, "default, linear, llama3, yarn")


def _yarn_attention_factor(given: Mapping[str, Any], factor: float, name: str) -> float:
    """Return 1 + 0.1 ln(factor), as in the paper, unless the file has another value."""

    def scale(weight: float) -> float:
        return 1.0 if factor <= 1 else 1.0 + 0.1 * weight * math.log(factor)

    if "attention_factor" in given:
        return config_values.number(f"{name}.attention_factor", given["attention_factor"])
    if not (given.get("mscale") and given.get("mscale_all_dim")):
        return scale(1.0)
    above, below = (
        scale(config_values.number(f"{name}.{key}", given[key]))
        for key in ("mscale", "mscale_all_dim")
    )
    return above / below


def _rope_values(config: TransformerConfig, rotary: Rotary) -> dict[str, Any]:
    """Return both formats: transformers reads the old fields up to 4.x, rope_parameters from 5."""
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
    if rotary.window_theta is not None:
        base = config.window_rope_theta or config.rope_theta
        values |= {rotary.window_theta: base, "rope_theta": config.rope_theta}
        values["rope_parameters"] = {
            "full_attention": values["rope_parameters"],
            "sliding_attention": {"rope_type": "default", "rope_theta": base},
        }
    if config.rope_scaling is not None:
        values["rope_scaling"] = dict(scaling)
    if rotary.may_be_partial:
        values["rope_parameters"]["partial_rotary_factor"] = config.rotary_fraction
        values |= {rotary.theta: config.rope_theta, rotary.fraction: config.rotary_fraction}
    return values


def _unsupported(setting: str, got: Any, wanted: str) -> ValueError:
    return ValueError(
        f"config.json has {setting} = {got!r}, which this model does not implement (it covers: "
        f"{wanted}). Choose a checkpoint of the {', '.join(FAMILIES)} family whose setting is "
        "covered"
    )
