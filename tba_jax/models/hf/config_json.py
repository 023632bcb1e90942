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
from tba_jax.models.hf.families import FAMILIES, Family
from tba_jax.models.transformer import TransformerConfig

# Boolean fields, which are False if config.json lacks the setting.
_FLAGS = {field.name for field in dataclasses.fields(TransformerConfig) if field.type is bool}
_TYPES = {field.name: field.type for field in dataclasses.fields(TransformerConfig)}
# Fields that may be absent. If they are null, the default of the family is not used.
_NULLABLE = {"window", "score_divisor", "attention_cap", "logits_cap"}
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
_SCALINGS = {
    "linear": rope.LinearScaling,
    "llama3": rope.Llama3Scaling,
    "yarn": rope.YarnScaling,
}
_ORIGINAL = "original_max_position_embeddings"


def check(name: str, value: Any, kind: Any) -> Any:
    """Return the value of a setting of config.json.

    Args:
        kind: bool; int: at least 1; float: above 0; anything else is not checked.

    Raises:
        ValueError: the value is not of this kind; names setting and value.
    """
    is_number = isinstance(value, int if kind is int else int | float) and value is not True
    is_fine, words = {
        bool: (isinstance(value, bool), "true or false"),
        int: (is_number and value >= 1, "a whole number above 0"),
        float: (is_number and 0 < value < math.inf, "a number above 0"),
    }.get(kind, (True, ""))
    if is_fine:
        return value
    raise ValueError(
        f"config.json has {name} = {value!r:.60}; wanted {words}. Correct it, or download the file "
        "again"
    )


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
    name = hf_config.get("model_type")
    if name not in FAMILIES:
        raise ValueError(
            f"config.json has model_type = {name!r}, which this model does not implement (it "
            f"covers: {', '.join(FAMILIES)}). Choose a checkpoint of one of these families, or "
            "add a record to tba_jax/models/hf/families.py as docs/extend.md shows"
        )
    family = FAMILIES[name]
    keys = family.keys
    renamed = {new: hf_config[x] for x, new in family.other_settings.items() if x in hf_config}
    hf_config = {**renamed, **hf_config}
    nulls = {x for x, value in hf_config.items() if value is None}
    unset = nulls & {keys[x] for x in _NULLABLE & keys.keys()}
    values = {
        **{x: y for x, y in family.defaults.items() if x not in unset and y is not None},
        **{x: value for x, value in hf_config.items() if x not in nulls},
    }
    for our, their in keys.items():
        if their in values:
            # Fields with another type may be null, and are positive numbers otherwise.
            check(their, values[their], float if our in _NULLABLE - {"window"} else _TYPES[our])
    is_classifier = _is_classifier(values, family)
    _refuse(values, family)
    ours: dict[str, Any] = dict.fromkeys(_FLAGS & keys.keys(), False)
    ours |= {our: values[their] for our, their in keys.items() if their in values}
    if "num_heads" in ours:
        ours.setdefault("num_kv_heads", ours["num_heads"])
    if family.mlp_ratio and "hidden_size" in ours:
        ours.setdefault("mlp_size", family.mlp_ratio * ours["hidden_size"])
    missing = [keys[x] for x in keys if x not in {*ours, *_NULLABLE, "head_dim"}]
    if missing:
        raise ValueError(
            f"config.json of a {name} model lacks {', '.join(missing)}. Add them, as in the "
            "published config.json of the model"
        )
    activation = ours.pop("activation")
    if activation not in _ACTIVATIONS:
        raise _unsupported(keys["activation"], activation, ", ".join(_ACTIVATIONS))
    ours.setdefault("head_dim", ours["hidden_size"] // ours["num_heads"])
    ours |= _pattern(values, family, ours)
    # transformers omits id2label if there are two labels.
    num_labels = len(values.get("id2label") or range(int(values.get("num_labels", 2))))
    fields = {"activation": _ACTIVATIONS[activation], **family.traits}
    return TransformerConfig(
        **{**ours, **fields, **_positions(values, family, ours["pattern"])},
        family=name,
        num_labels=num_labels if is_classifier else 0,
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
    usual = family.defaults.get(setting)
    if "activation" in family.traits or _ACTIVATIONS.get(usual) == config.activation:
        values[setting] = usual
    elif config.activation == "gelu_tanh":
        values[setting] = "gelu_pytorch_tanh"
    if "window" in family.keys:
        default = family.defaults["sliding_window"] if len(family.pattern) > 1 else None
        values["sliding_window"] = config.window or default
    if len(family.pattern) > 1:
        names = {kind: name for name, kind in _LAYER_TYPES.items()}
        values["layer_types"] = [names[kind] for kind in config.layer_kinds]
    if config.score_divisor is None and "score_divisor" in family.keys:
        values[family.keys["score_divisor"]] = config.head_dim
    values |= _rope_values(config, family)
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
            wanted = ", ".join(filter(None, ("unquantised weights", family.quantization)))
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
    of_windows: Mapping[str, Any] = {}
    if nested and rotary.window_theta is None:
        raise _unsupported(name, f"one entry per {', '.join(nested)}", "one for all layers")
    if nested:
        given = nested.get("full_attention", {})
        of_windows = nested.get("sliding_attention", {})
    if (kind := of_windows.get("rope_type", "default")) != "default":
        raise _unsupported(f"{name}.sliding_attention.rope_type", kind, "default")
    theta = values.get(rotary.theta, values.get("rope_theta", 10000.0))
    theta = check(f"{rotary.theta} (or rope_theta)", given.get("rope_theta", theta), float)
    fraction = values.get("partial_rotary_factor", rotary.default_fraction)
    fraction = given.get("partial_rotary_factor", values.get(rotary.fraction, fraction))
    if not rotary.may_be_partial and not math.isclose(fraction, 1.0):
        raise _unsupported("partial_rotary_factor", fraction, f"1.0 for {family.name}")
    scaling = _scaling(given, name, values)
    found = {
        "rope_theta": float(theta),
        "rotary_fraction": float(fraction),
        "rope_scaling": scaling,
    }
    if isinstance(scaling, rope.YarnScaling):
        # Files of Qwen2.5 keep the context before the extension as max_position_embeddings.
        longest = int(scaling.factor * scaling.original_max_positions)
        found["max_positions"] = max(values["max_position_embeddings"], longest)
    if rotary.window_theta is not None and "window" in pattern:
        base = of_windows.get("rope_theta", values.get(rotary.window_theta, theta))
        check(rotary.window_theta, base, float)
        if scaling is not None or base != theta:
            found["window_rope_theta"] = float(base)
    return found


def _scaling(given: Mapping[str, Any], name: str, values: Mapping[str, Any]) -> rope.Scaling | None:
    kind = given.get("rope_type", given.get("type", "default"))
    if kind == "default":
        return None
    if kind not in _SCALINGS:
        raise _unsupported(f"{name}.rope_type", kind, ", ".join(("default", *_SCALINGS)))
    longest = values["max_position_embeddings"]
    original = int(check(_ORIGINAL, values.get(_ORIGINAL, given.get(_ORIGINAL, longest)), float))
    found: dict[str, Any] = {"original_max_positions": original}
    if kind == "yarn":
        found |= {
            "factor": longest / original,
            "beta_fast": 32.0,
            "beta_slow": 1.0,
            "truncate": bool(given.get("truncate", True)),
        }
    wanted = [field.name for field in dataclasses.fields(_SCALINGS[kind])]
    for key in wanted:
        # Some files of YaRN have 0 in place of a default.
        if key in given and key != "truncate" and (given[key] or key not in found):
            found[key] = float(check(f"{name}.{key}", given[key], float))
    if kind == "yarn" and "attention_factor" not in found:
        found["attention_factor"] = _yarn_attention_factor(given, found["factor"], name)
    for key in wanted:
        if key not in found:
            raise ValueError(
                f"config.json has {name}.rope_type = {kind!r} but no {name}.{key}. Add "
                f"{name}.{key}, as in the published config.json of the model"
            )
    return _SCALINGS[kind](**{key: found[key] for key in wanted})


def _yarn_attention_factor(given: Mapping[str, Any], factor: float, name: str) -> float:
    """Return 1 + 0.1 ln(factor), as in the paper, unless the file has both of its two weights."""
    stretch = 0.1 * math.log(max(factor, 1.0))
    if not (given.get("mscale") and given.get("mscale_all_dim")):
        return 1.0 + stretch
    above, below = (
        check(f"{name}.{key}", given[key], float) for key in ("mscale", "mscale_all_dim")
    )
    return (1.0 + above * stretch) / (1.0 + below * stretch)


def _rope_values(config: TransformerConfig, family: Family) -> dict[str, Any]:
    """Return the rotary settings in the format of transformers 5."""
    if family.rotary is None:
        return {}
    of_full: dict[str, Any] = {"rope_type": "default", "rope_theta": config.rope_theta}
    if config.rope_scaling is not None:
        fields = dataclasses.asdict(config.rope_scaling)
        if "original_max_positions" in fields:
            fields[_ORIGINAL] = fields.pop("original_max_positions")
        (kind,) = (x for x, made in _SCALINGS.items() if isinstance(config.rope_scaling, made))
        of_full |= {"rope_type": kind, **fields}
    if family.rotary.may_be_partial:
        of_full["partial_rotary_factor"] = config.rotary_fraction
    if family.rotary.window_theta is None:
        return {"rope_parameters": of_full}
    theta = config.window_rope_theta or config.rope_theta
    of_windows = {"rope_type": "default", "rope_theta": theta}
    return {"rope_parameters": {"full_attention": of_full, "sliding_attention": of_windows}}


def _unsupported(setting: str, got: Any, wanted: str) -> ValueError:
    return ValueError(
        f"config.json has {setting} = {got!r}, which this model does not implement (it covers: "
        f"{wanted}). Choose a checkpoint of the {', '.join(FAMILIES)} family whose setting is "
        "covered"
    )
