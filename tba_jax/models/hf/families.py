# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face models: one record each, all in `FAMILIES`.

A record has the names of a family's settings in config.json and of its tensors, and the properties
that all its models share. To add a family, write its record here; no other code depends on the
family. `layouts` has the names and shapes of tensors.
"""

import dataclasses
import re
from collections.abc import Collection, Mapping
from typing import Any, NamedTuple

from tba_jax.models.architecture import LayerKind
from tba_jax.models.hf import layouts
from tba_jax.models.hf.tensors import HFTensor, Rule, Table, bind
from tba_jax.models.transformer import TransformerConfig, abstract_params


class Rotary(NamedTuple):
    """Names of a family's rotary settings in config.json, besides `rope_parameters`.

    Attributes:
        theta: setting of the base of the frequencies.
        fraction: setting of the rotated share of a head.
        default_fraction: share of rotated dimensions if the setting is missing.
        may_be_partial: whether the rotated share may be less than 1.
        window_theta: setting of the base in window layers. Families with this setting have an entry
            per kind of layer in `rope_parameters`. None: window layers rotate as full layers do.
    """

    theta: str = "rope_theta"
    fraction: str = "partial_rotary_factor"
    default_fraction: float = 1.0
    may_be_partial: bool = False
    window_theta: str | None = None


@dataclasses.dataclass(frozen=True)
class Family:
    """A family of models in transformers.

    Attributes:
        name: `model_type` in config.json.
        classes: architectures of a language model, and of a classifier or reward model if any.
        keys: field of TransformerConfig -> setting in config.json. Two fields may have the same
            setting; the family then has both features or neither.
        other_settings: alternative name of a setting in config.json -> usual name.
        tensors: names and layouts of its tensors, below `prefix`, as they are written.
        traits: fields of TransformerConfig with a fixed value in the family.
        more_tensors: further layouts that can be read.
        pattern: kinds of layers, if config.json does not list them and has a window.
        quantization: method of quantised files that can be read; None: none.
        defaults: defaults of transformers for missing settings.
        covered: setting -> the only supported value; None: the setting must be missing or null.
        rotary: names of the rotary settings; None: positions are a learned table.
        mlp_ratio: default width of the MLP relative to the model's.
        prefix: prefix of the trunk's tensors.
        more_prefixes: further prefixes that can be read.
        spare: prefixes of tensors that are not part of the language model.
        heads: names of the output matrix; the first name is written, and all can be read.
    """

    name: str
    classes: tuple[str, ...]
    keys: Mapping[str, str]
    tensors: Table
    traits: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    more_tensors: tuple[Table, ...] = ()
    pattern: tuple[LayerKind, ...] = ("full",)
    quantization: str | None = None
    other_settings: Mapping[str, str] = dataclasses.field(default_factory=dict)
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    covered: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    rotary: Rotary | None = Rotary()
    mlp_ratio: int | None = None
    prefix: str = "model."
    more_prefixes: tuple[str, ...] = ()
    spare: tuple[str, ...] = ()
    heads: tuple[str, ...] = ("lm_head.weight",)


# Constants in old checkpoints: rotary frequencies and causal masks.
_BUFFER = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attention|attn)\.(bias|masked_bias))$")


def tensors(config: TransformerConfig, found: Collection[str] = ()) -> dict[str, HFTensor]:
    """Return every tensor of a checkpoint of this architecture, by its usual name.

    Args:
        found: names of tensors in files, which select one of the layouts of the family; empty: the
            layout that is written.
    """
    family, abstract = FAMILIES[config.family], abstract_params(config)
    bare = {name.rpartition("layers.")[2] for name in found}

    def num_found(layout: dict[str, HFTensor]) -> int:
        parts = (part for name, tensor in layout.items() for part in tensor.parts(name))
        return sum(part.rpartition("layers.")[2] in bare for part in parts)

    heads = {"score.weight": Rule("score"), family.heads[0]: Rule("unembed")}
    candidates = []
    for table in (family.tensors, *family.more_tensors):
        rules = {family.prefix + name: rule for name, rule in table.items()} | heads
        candidates.append(bind(rules, abstract, config.layer_kinds))
    return max(candidates, key=num_found)


def aliases(name: str, config: TransformerConfig) -> tuple[str, ...]:
    """Return other names of a tensor in checkpoints.

    Files that were saved from the trunk alone lack the trunk's prefix, such as GPT-2 on the hub.
    """
    family = FAMILIES[config.family]
    if name.startswith(family.prefix):
        bare = name.removeprefix(family.prefix)
        return (bare, *(prefix + bare for prefix in family.more_prefixes))
    return tuple(x for x in family.heads if x != name) if name in family.heads else ()


def is_spare(name: str, config: TransformerConfig) -> bool:
    """Return whether a checkpoint may contain this tensor although the model does not use it.

    Examples are buffers of old checkpoints, the copy of a tied embedding, and other parts of a
    multimodal model.
    """
    has_copy = config.tie_embeddings and not config.num_labels
    is_copy = has_copy and name in FAMILIES[config.family].heads
    spare = FAMILIES[config.family].spare
    return is_copy or name.startswith(spare) or _BUFFER.search(name) is not None


def tied_names(config: TransformerConfig) -> tuple[tuple[str, ...], tuple[str, ...]]:
    """Return possible names of the output matrix and of the embedding to which it is tied."""
    (name,) = (x for x, tensor in tensors(config).items() if tensor.leaves == ("embed",))
    return FAMILIES[config.family].heads, (name, *aliases(name, config))


_KEYS = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "activation": "hidden_act",
    "tie_embeddings": "tie_word_embeddings",
}
_LLAMA_KEYS = _KEYS | {
    "norm_eps": "rms_norm_eps",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
}
_ATTENTION_BIAS = {"o_bias": "attention_bias", "qkv_bias": "attention_bias"}
_WINDOW = {"window": "sliding_window"}
_EXPERTS = {"experts_per_token": "num_experts_per_tok"}
_SEPARATE_EXPERTS = _EXPERTS | {"mlp_size": "moe_intermediate_size", "num_experts": "num_experts"}
_LLAMA_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu"}
_QWEN_DEFAULTS = _LLAMA_DEFAULTS | {"max_position_embeddings": 32768}
_OLD_TRAITS = {"norm": "layer", "gated_mlp": False, "mlp_bias": True}

LLAMA = Family(
    name="llama",
    classes=("LlamaForCausalLM", "LlamaForSequenceClassification"),
    keys=_LLAMA_KEYS | _ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
    defaults=_LLAMA_DEFAULTS,
    tensors=layouts.LLAMA,
)
QWEN2 = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    keys=_LLAMA_KEYS,
    defaults=_QWEN_DEFAULTS,
    traits={"qkv_bias": True},
    covered={"mlp_bias": False},
    tensors=layouts.LLAMA,
)
QWEN3 = Family(
    name="qwen3",
    classes=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    keys=_LLAMA_KEYS | _ATTENTION_BIAS,
    defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    traits={"qk_norm": True},
    covered={"mlp_bias": False},
    tensors=layouts.LLAMA,
)
GPT_NEOX = Family(
    name="gpt_neox",
    classes=("GPTNeoXForCausalLM", "GPTNeoXForSequenceClassification"),
    keys=_KEYS
    | _ATTENTION_BIAS
    | {"norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
    defaults={
        "layer_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "hidden_act": "gelu",
        "attention_bias": True,
        "use_parallel_residual": True,
    },
    traits=_OLD_TRAITS,
    rotary=Rotary("rotary_emb_base", "rotary_pct", default_fraction=0.25, may_be_partial=True),
    tensors=layouts.GPT_NEOX,
    prefix="gpt_neox.",
    # transformers renamed this setting in version 5 and reads both names.
    heads=("embed_out.weight", "lm_head.weight"),
)
GPT2 = Family(
    name="gpt2",
    classes=("GPT2LMHeadModel", "GPT2ForSequenceClassification"),
    keys=_KEYS
    | {
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "mlp_size": "n_inner",
        "max_positions": "n_positions",
        "activation": "activation_function",
        "norm_eps": "layer_norm_epsilon",
    },
    mlp_ratio=4,
    defaults={
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    traits=_OLD_TRAITS | {"qkv_bias": True, "o_bias": True},
    rotary=None,
    tensors=layouts.GPT2,
    prefix="transformer.",
)
QWEN3_MOE = Family(
    name="qwen3_moe",
    classes=("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification"),
    keys=_LLAMA_KEYS
    | _ATTENTION_BIAS
    | _SEPARATE_EXPERTS
    | {"normalised_experts": "norm_topk_prob"},
    other_settings={"num_local_experts": "num_experts"},  # transformers 5 writes it so
    defaults=_QWEN_DEFAULTS,
    traits={"qk_norm": True},
    # Every layer has experts.
    covered={"mlp_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    tensors=layouts.QWEN3_MOE,
    more_tensors=(layouts.QWEN3_MOE_FUSED,),
)
GEMMA2 = Family(
    name="gemma2",
    classes=("Gemma2ForCausalLM", "Gemma2ForSequenceClassification"),
    keys=_LLAMA_KEYS
    | _ATTENTION_BIAS
    | _WINDOW
    | {
        "activation": "hidden_activation",
        "score_divisor": "query_pre_attn_scalar",
        "attention_cap": "attn_logit_softcapping",
        "logits_cap": "final_logit_softcapping",
    },
    # Settings that published files of Gemma omit.
    defaults={
        "vocab_size": 256000,
        "hidden_size": 2304,
        "intermediate_size": 9216,
        "num_hidden_layers": 26,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 256,
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-6,
        "hidden_activation": "gelu_pytorch_tanh",
        "query_pre_attn_scalar": 256,
        "sliding_window": 4096,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
        "tie_word_embeddings": True,
    },
    traits={"norms": "both", "norm_offset": True, "scaled_embeddings": True},
    covered={"use_bidirectional_attention": False},
    tensors=layouts.GEMMA,
    pattern=("window", "full"),
)
GEMMA3 = dataclasses.replace(
    GEMMA2,
    name="gemma3_text",
    classes=("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
    defaults={
        **GEMMA2.defaults,
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "attn_logit_softcapping": None,
        "final_logit_softcapping": None,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    traits={**GEMMA2.traits, "qk_norm": True},
    rotary=Rotary(window_theta="rope_local_base_freq"),
    pattern=(*["window"] * 5, "full"),
    # The language model inside a multimodal model of two generations of transformers.
    more_prefixes=("language_model.model.", "model.language_model."),
    spare=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_"),
)
MISTRAL = Family(
    name="mistral",
    classes=("MistralForCausalLM", "MistralForSequenceClassification"),
    keys=_LLAMA_KEYS | _WINDOW,
    defaults=_LLAMA_DEFAULTS | {"max_position_embeddings": 131072, "sliding_window": 4096},
    tensors=layouts.LLAMA,
    pattern=("window",),
)
OLMO3 = Family(
    name="olmo3",
    classes=("Olmo3ForCausalLM", "Olmo3ForSequenceClassification"),
    keys=_LLAMA_KEYS | _ATTENTION_BIAS | _WINDOW,
    defaults=_LLAMA_DEFAULTS
    | {"rms_norm_eps": 1e-5, "sliding_window": 4096, "rope_theta": 500000.0},
    traits={"norms": "post", "qk_norm": True, "qk_norm_is_whole": True},
    rotary=Rotary(window_theta="rope_theta"),
    tensors=layouts.OLMO3,
    pattern=("window", "window", "window", "full"),
)
GPT_OSS = Family(
    name="gpt_oss",
    classes=("GptOssForCausalLM", "GptOssForSequenceClassification"),
    keys=_LLAMA_KEYS | _ATTENTION_BIAS | _WINDOW | _EXPERTS | {"num_experts": "num_local_experts"},
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "head_dim": 64,
        "sliding_window": 128,
        "attention_bias": True,
        "rope_theta": 150000.0,
    },
    traits={
        "activation": "clamped_swiglu",
        "mlp_bias": True,
        "sinks": True,
        "router_bias": True,
        "normalised_experts": True,
    },
    covered={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    tensors=layouts.GPT_OSS,
    more_tensors=(layouts.GPT_OSS_MXFP4,),
    pattern=("window", "full"),
    quantization="mxfp4",
)
QWEN3_5 = Family(
    name="qwen3_5_text",
    classes=("Qwen3_5ForCausalLM", "Qwen3_5TextForSequenceClassification"),
    keys=_LLAMA_KEYS
    | _ATTENTION_BIAS
    | {
        "delta_key_heads": "linear_num_key_heads",
        "delta_value_heads": "linear_num_value_heads",
        "delta_key_dim": "linear_key_head_dim",
        "delta_value_dim": "linear_value_head_dim",
        "delta_taps": "linear_conv_kernel_dim",
    },
    defaults=_QWEN_DEFAULTS
    | {
        "head_dim": 256,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 32,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
    },
    traits={"qk_norm": True, "norm_offset": True, "attention_gate": True},
    rotary=Rotary(default_fraction=0.25, may_be_partial=True),
    tensors=layouts.QWEN3_5,
    pattern=("delta", "delta", "delta", "full"),
    # The language model inside a multimodal model; mtp: heads that draft several tokens.
    more_prefixes=("model.language_model.",),
    spare=("model.visual.", "mtp."),
)
QWEN3_5_MOE = dataclasses.replace(
    QWEN3_5,
    name="qwen3_5_moe_text",
    classes=("Qwen3_5MoeForCausalLM",),
    keys={
        **QWEN3_5.keys,
        **_SEPARATE_EXPERTS,
        "shared_size": "shared_expert_intermediate_size",
    },
    other_settings={"num_local_experts": "num_experts"},
    defaults={
        **QWEN3_5.defaults,
        "moe_intermediate_size": 512,
        "shared_expert_intermediate_size": 512,
        "num_experts": 256,
        "num_experts_per_tok": 8,
    },
    traits={**QWEN3_5.traits, "normalised_experts": True},
    tensors=layouts.QWEN3_5_MOE,
    more_tensors=(layouts.QWEN3_5_MOE_FUSED,),
)

_DECODERS = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, MISTRAL, OLMO3, GPT_OSS)
_DECODERS += (QWEN3_5, QWEN3_5_MOE)
FAMILIES: dict[str, Family] = {x.name: x for x in (*_DECODERS, GPT_NEOX, GPT2)}
