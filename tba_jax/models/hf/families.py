# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face models: one record each, all in `FAMILIES`.

A record has the names of a family's settings in config.json and of its tensors, and the properties
that all its models share. To add a family, write its record here; no other code depends on the
family. Invariant: every element of every leaf of `transformer.init_params` belongs to exactly one
tensor.
"""

import dataclasses
import functools
import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from tba_jax.models.architecture import LayerKind
from tba_jax.models.hf.tensors import (
    HFTensor,
    conv1d,
    each_expert,
    linear,
    plain,
    split_vector,
)
from tba_jax.models.transformer import TransformerConfig

Table = Callable[[TransformerConfig, int | None], dict[str, HFTensor]]
"""Name -> tensor of one layer, or (layer None) of the parts outside the layers."""


class Rotary(NamedTuple):
    """Names of a family's rotary settings in config.json, besides `rope_parameters`.

    Attributes:
        theta: setting of the base of the frequencies.
        fraction: setting of the rotated share of a head.
        default_fraction: that share if the setting is missing.
        may_be_partial: whether it may be less than 1.
        window_theta: setting of the base in window layers; None: they rotate as full layers do.
            Such families have an entry per kind of layer in `rope_parameters`.
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
        classes: architectures of a language model, and of a classifier or reward model.
        keys: field of TransformerConfig -> its setting in config.json. Two fields may share a
            setting; then the family has both or neither.
        other_settings: other name of a setting in config.json -> the usual one.
        traits: fields of TransformerConfig with a fixed value in the family.
        tensors: names and layouts of its tensors, below `prefix`, as they are written.
        more_tensors: other layouts that are read.
        pattern: kinds of layers, if config.json does not list them and has a window.
        quantization: method of quantised files that can be read; None: none.
        defaults: defaults of transformers for missing settings.
        covered: settings with their only supported value; None: must be missing or null.
        rotary: names of the rotary settings; None: positions are a learned table.
        mlp_ratio: default width of the MLP relative to the model's.
        prefix: prefix of the trunk's tensors.
        more_prefixes: other prefixes that are read.
        spare: start of names of tensors that are not part of the language model.
        layers: name before the number of a layer.
        heads: names of the output matrix; the first is written, all are read.
    """

    name: str
    classes: tuple[str, str]
    keys: Mapping[str, str]
    traits: Mapping[str, Any]
    tensors: Table
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
    layers: str = "layers"
    heads: tuple[str, ...] = ("lm_head.weight",)


# Constants in old checkpoints: rotary frequencies and causal masks.
_BUFFER = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attention|attn)\.(bias|masked_bias))$")
_QKV = ("q", "k", "v")
_QKV_BIAS = ("q_bias", "k_bias", "v_bias")


def tensors(config: TransformerConfig, found: Collection[str] = ()) -> dict[str, HFTensor]:
    """Return every tensor of a checkpoint of this architecture, by its usual name.

    Args:
        config: the architecture.
        found: names of tensors in files, which select one of the layouts of the family; empty: the
            layout that is written.
    """
    family = FAMILIES[config.family]
    bare = {name.rpartition(f"{family.layers}.0.")[2] for name in found}

    def num_found(table: Table) -> int:
        of_layer = table(config, 0).items()
        return sum(part in bare for name, tensor in of_layer for part in tensor.parts(name))

    table = max((family.tensors, *family.more_tensors), key=num_found)
    out = {family.prefix + name: tensor for name, tensor in family.tensors(config, None).items()}
    d, v = config.hidden_size, config.vocab_size
    if config.num_labels:
        out["score.weight"] = plain("score", -1, (config.num_labels, d))
    elif not config.tie_embeddings:
        out[family.heads[0]] = plain("unembed", -1, (v, d))
    for i in range(config.num_layers):
        for name, tensor in table(config, i).items():
            out[f"{family.prefix}{family.layers}.{i}.{name}"] = tensor
    return out


def aliases(name: str, config: TransformerConfig) -> tuple[str, ...]:
    """Return other names of a tensor in checkpoints.

    Files saved from the bare trunk lack its prefix; so does GPT-2 itself on the hub.
    """
    family = FAMILIES[config.family]
    if name.startswith(family.prefix):
        bare = name.removeprefix(family.prefix)
        return (bare, *(prefix + bare for prefix in family.more_prefixes))
    return tuple(x for x in family.heads if x != name) if name in family.heads else ()


def is_spare(name: str, config: TransformerConfig) -> bool:
    """Return whether a tensor that `tensors` does not list may be present, as it is no parameter.

    Such tensors are buffers of old checkpoints, the copy of a tied embedding, and the other parts
    of a multimodal model.
    """
    has_copy = config.tie_embeddings and not config.num_labels
    is_copy = has_copy and name in FAMILIES[config.family].heads
    spare = FAMILIES[config.family].spare
    return is_copy or name.startswith(spare) or _BUFFER.search(name) is not None


# Norms of the residual stream: `norms` of the architecture -> names in the files and ours.
_NORMS = {
    "pre": {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"},
    "post": {
        "post_attention_layernorm": "attn_out_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
    "both": {
        "input_layernorm": "attn_norm",
        "post_attention_layernorm": "attn_out_norm",
        "pre_feedforward_layernorm": "mlp_norm",
        "post_feedforward_layernorm": "mlp_out_norm",
    },
}
FeedForward = Callable[[TransformerConfig, int], dict[str, HFTensor]]


def _dense(config: TransformerConfig, i: int) -> dict[str, HFTensor]:
    d, f = config.hidden_size, config.mlp_size
    out = {
        "mlp.gate_proj.weight": linear("gate", i, (d,), (f,)),
        "mlp.up_proj.weight": linear("up", i, (d,), (f,)),
        "mlp.down_proj.weight": linear("down", i, (f,), (d,)),
    }
    if config.mlp_bias:
        out["mlp.gate_proj.bias"] = plain("gate_bias", i, (f,))
        out["mlp.up_proj.bias"] = plain("up_bias", i, (f,))
        out["mlp.down_proj.bias"] = plain("down_bias", i, (d,))
    return out


def _separate_experts(config: TransformerConfig, i: int) -> dict[str, HFTensor]:
    d, f, num = config.hidden_size, config.mlp_size, config.num_experts
    return {
        "mlp.gate.weight": linear("router", i, (d,), (num,)),
        "mlp.experts.*.gate_proj.weight": each_expert(num, linear("expert_gate", i, (d,), (f,))),
        "mlp.experts.*.up_proj.weight": each_expert(num, linear("expert_up", i, (d,), (f,))),
        "mlp.experts.*.down_proj.weight": each_expert(num, linear("expert_down", i, (f,), (d,))),
    }


def _fused_experts(config: TransformerConfig, i: int) -> dict[str, HFTensor]:
    """Return the layout that transformers 5 has in memory: all experts in one tensor."""
    d, f, num = config.hidden_size, config.mlp_size, config.num_experts
    return {
        "mlp.gate.weight": linear("router", i, (d,), (num,)),
        "mlp.experts.gate_up_proj": HFTensor(
            (num, 2 * f, d), i, ("expert_gate", "expert_up"), (num, 2, f, d), (1, 0, 3, 2)
        ),
        "mlp.experts.down_proj": HFTensor(
            (num, d, f), i, ("expert_down",), (1, num, d, f), (0, 1, 3, 2)
        ),
    }


def _gpt_oss_experts(
    config: TransformerConfig, i: int, *, is_mxfp4: bool = False
) -> dict[str, HFTensor]:
    """Return the tensors of experts with interleaved gate and up.

    Four-bit files store outputs before inputs.
    """
    d, f, num = config.hidden_size, config.mlp_size, config.num_experts
    gate_up, down = ("expert_gate", "expert_up"), ("expert_down",)
    if is_mxfp4:
        matrices = (
            HFTensor((num, 2 * f, d), i, gate_up, (num, f, 2, d), (2, 0, 3, 1), is_mxfp4=True),
            HFTensor((num, d, f), i, down, (1, num, d, f), (0, 1, 3, 2), is_mxfp4=True),
        )
    else:
        matrices = (
            HFTensor((num, d, 2 * f), i, gate_up, (num, d, f, 2), (3, 0, 1, 2)),
            plain("expert_down", i, (num, f, d)),
        )
    biases = ("expert_gate_bias", "expert_up_bias")
    return {
        "mlp.router.weight": linear("router", i, (d,), (num,)),
        "mlp.router.bias": plain("router_bias", i, (num,)),
        "mlp.experts.gate_up_proj": matrices[0],
        "mlp.experts.gate_up_proj_bias": HFTensor((num, 2 * f), i, biases, (num, f, 2), (2, 0, 1)),
        "mlp.experts.down_proj": matrices[1],
        "mlp.experts.down_proj_bias": plain("expert_down_bias", i, (num, d)),
    }


def _llama(
    config: TransformerConfig, layer: int | None, feed_forward: FeedForward = _dense
) -> dict[str, HFTensor]:
    d = config.hidden_size
    if layer is None:
        return {
            "embed_tokens.weight": plain("embed", -1, (config.vocab_size, d)),
            "norm.weight": plain("final_norm", -1, (d,)),
        }
    e, i = config.head_dim, layer
    q, kv = (config.num_heads, e), (config.num_kv_heads, e)
    norms = _NORMS[config.norms].items()
    out = {f"{theirs}.weight": plain(ours, i, (d,)) for theirs, ours in norms}
    out |= {
        "self_attn.q_proj.weight": linear("q", i, (d,), q),
        "self_attn.k_proj.weight": linear("k", i, (d,), kv),
        "self_attn.v_proj.weight": linear("v", i, (d,), kv),
        "self_attn.o_proj.weight": linear("o", i, q, (d,)),
    }
    out |= feed_forward(config, i)
    if config.qkv_bias:
        out["self_attn.q_proj.bias"] = split_vector("q_bias", i, q)
        out["self_attn.k_proj.bias"] = split_vector("k_bias", i, kv)
        out["self_attn.v_proj.bias"] = split_vector("v_bias", i, kv)
    if config.o_bias:
        out["self_attn.o_proj.bias"] = plain("o_bias", i, (d,))
    if config.qk_norm:
        q, kv = (q, kv) if config.qk_norm_is_whole else ((e,), (e,))
        out["self_attn.q_norm.weight"] = split_vector("q_norm", i, q)
        out["self_attn.k_norm.weight"] = split_vector("k_norm", i, kv)
    if config.sinks:
        out["self_attn.sinks"] = plain("sinks", i, (config.num_heads,))
    return out


def _gpt_neox(config: TransformerConfig, layer: int | None) -> dict[str, HFTensor]:
    d, f = config.hidden_size, config.mlp_size
    if layer is None:
        return {
            "embed_in.weight": plain("embed", -1, (config.vocab_size, d)),
            "final_layer_norm.weight": plain("final_norm", -1, (d,)),
            "final_layer_norm.bias": plain("final_norm_bias", -1, (d,)),
        }
    h, e, i = config.num_heads, config.head_dim, layer
    out = {
        "input_layernorm.weight": plain("attn_norm", i, (d,)),
        "input_layernorm.bias": plain("attn_norm_bias", i, (d,)),
        # Query, key and value are adjacent within each head.
        "attention.query_key_value.weight": HFTensor(
            (3 * h * e, d), i, _QKV, (h, 3, e, d), (1, 3, 0, 2)
        ),
        "attention.dense.weight": linear("o", i, (h, e), (d,)),
        "post_attention_layernorm.weight": plain("mlp_norm", i, (d,)),
        "post_attention_layernorm.bias": plain("mlp_norm_bias", i, (d,)),
        "mlp.dense_h_to_4h.weight": linear("up", i, (d,), (f,)),
        "mlp.dense_h_to_4h.bias": plain("up_bias", i, (f,)),
        "mlp.dense_4h_to_h.weight": linear("down", i, (f,), (d,)),
        "mlp.dense_4h_to_h.bias": plain("down_bias", i, (d,)),
    }
    if config.qkv_bias:
        out["attention.query_key_value.bias"] = HFTensor(
            (3 * h * e,), i, _QKV_BIAS, (h, 3, e), (1, 0, 2)
        )
        out["attention.dense.bias"] = plain("o_bias", i, (d,))
    return out


def _gpt2(config: TransformerConfig, layer: int | None) -> dict[str, HFTensor]:
    d, f = config.hidden_size, config.mlp_size
    if layer is None:
        return {
            "wte.weight": plain("embed", -1, (config.vocab_size, d)),
            "wpe.weight": plain("position_embed", -1, (config.max_positions, d)),
            "ln_f.weight": plain("final_norm", -1, (d,)),
            "ln_f.bias": plain("final_norm_bias", -1, (d,)),
        }
    h, e, i = config.num_heads, config.head_dim, layer
    return {
        "ln_1.weight": plain("attn_norm", i, (d,)),
        "ln_1.bias": plain("attn_norm_bias", i, (d,)),
        # All queries, then all keys, then all values.
        "attn.c_attn.weight": HFTensor((d, 3 * h * e), i, _QKV, (d, 3, h, e), (1, 0, 2, 3)),
        "attn.c_attn.bias": HFTensor((3 * h * e,), i, _QKV_BIAS, (3, h, e), (0, 1, 2)),
        "attn.c_proj.weight": conv1d("o", i, (h, e), (d,)),
        "attn.c_proj.bias": plain("o_bias", i, (d,)),
        "ln_2.weight": plain("mlp_norm", i, (d,)),
        "ln_2.bias": plain("mlp_norm_bias", i, (d,)),
        "mlp.c_fc.weight": conv1d("up", i, (d,), (f,)),
        "mlp.c_fc.bias": plain("up_bias", i, (f,)),
        "mlp.c_proj.weight": conv1d("down", i, (f,), (d,)),
        "mlp.c_proj.bias": plain("down_bias", i, (d,)),
    }


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
_QWEN_DEFAULTS = {"rms_norm_eps": 1e-6, "max_position_embeddings": 32768, "hidden_act": "silu"}
_ATTENTION_BIAS = {"o_bias": "attention_bias", "qkv_bias": "attention_bias"}

LLAMA = Family(
    name="llama",
    classes=("LlamaForCausalLM", "LlamaForSequenceClassification"),
    keys=_LLAMA_KEYS | _ATTENTION_BIAS | {"mlp_bias": "mlp_bias"},
    defaults={"rms_norm_eps": 1e-6, "max_position_embeddings": 2048, "hidden_act": "silu"},
    traits={"norm": "rms", "gated_mlp": True},
    tensors=_llama,
)
QWEN2 = Family(
    name="qwen2",
    classes=("Qwen2ForCausalLM", "Qwen2ForSequenceClassification"),
    keys=_LLAMA_KEYS,
    defaults=_QWEN_DEFAULTS,
    traits={"norm": "rms", "gated_mlp": True, "qkv_bias": True},
    covered={"mlp_bias": False},
    tensors=_llama,
)
QWEN3 = Family(
    name="qwen3",
    classes=("Qwen3ForCausalLM", "Qwen3ForSequenceClassification"),
    keys=_LLAMA_KEYS | _ATTENTION_BIAS,
    defaults=_QWEN_DEFAULTS | {"head_dim": 128},
    traits={"norm": "rms", "gated_mlp": True, "qk_norm": True},
    covered={"mlp_bias": False},
    tensors=_llama,
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
    traits={"norm": "layer", "gated_mlp": False, "mlp_bias": True},
    rotary=Rotary("rotary_emb_base", "rotary_pct", default_fraction=0.25, may_be_partial=True),
    tensors=_gpt_neox,
    prefix="gpt_neox.",
    # transformers renamed it in version 5 and reads both names.
    heads=("embed_out.weight", "lm_head.weight"),
)
GPT2 = Family(
    name="gpt2",
    classes=("GPT2LMHeadModel", "GPT2ForSequenceClassification"),
    keys={
        "vocab_size": "vocab_size",
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "mlp_size": "n_inner",
        "max_positions": "n_positions",
        "activation": "activation_function",
        "norm_eps": "layer_norm_epsilon",
        "tie_embeddings": "tie_word_embeddings",
    },
    mlp_ratio=4,
    defaults={
        "layer_norm_epsilon": 1e-5,
        "n_positions": 1024,
        "activation_function": "gelu_new",
        "tie_word_embeddings": True,
    },
    traits={
        "norm": "layer",
        "gated_mlp": False,
        "qkv_bias": True,
        "o_bias": True,
        "mlp_bias": True,
    },
    rotary=None,
    tensors=_gpt2,
    prefix="transformer.",
    layers="h",
)

_EXPERT_KEYS = {"experts_per_token": "num_experts_per_tok"}
QWEN3_MOE = Family(
    name="qwen3_moe",
    classes=("Qwen3MoeForCausalLM", "Qwen3MoeForSequenceClassification"),
    keys=_LLAMA_KEYS
    | _ATTENTION_BIAS
    | _EXPERT_KEYS
    | {
        "mlp_size": "moe_intermediate_size",
        "num_experts": "num_experts",
        "normalised_experts": "norm_topk_prob",
    },
    other_settings={"num_local_experts": "num_experts"},  # transformers 5 writes it so
    defaults=_QWEN_DEFAULTS,
    traits={"norm": "rms", "gated_mlp": True, "qk_norm": True},
    # Every layer has experts.
    covered={"mlp_bias": False, "decoder_sparse_step": 1, "mlp_only_layers": []},
    tensors=functools.partial(_llama, feed_forward=_separate_experts),
    more_tensors=(functools.partial(_llama, feed_forward=_fused_experts),),
)
_WINDOW = {"window": "sliding_window"}
_GEMMA_TRAITS = {
    "norm": "rms",
    "gated_mlp": True,
    "norms": "both",
    "norm_offset": True,
    "scaled_embeddings": True,
}
_GEMMA_KEYS = (
    _LLAMA_KEYS
    | _ATTENTION_BIAS
    | _WINDOW
    | {
        "activation": "hidden_activation",
        "score_divisor": "query_pre_attn_scalar",
        "attention_cap": "attn_logit_softcapping",
        "logits_cap": "final_logit_softcapping",
    }
)
# What published files of Gemma leave out.
_GEMMA_DEFAULTS = {
    "hidden_size": 2304,
    "intermediate_size": 9216,
    "num_hidden_layers": 26,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "rms_norm_eps": 1e-6,
    "hidden_activation": "gelu_pytorch_tanh",
    "query_pre_attn_scalar": 256,
    "sliding_window": 4096,
    "tie_word_embeddings": True,
}
GEMMA2 = Family(
    name="gemma2",
    classes=("Gemma2ForCausalLM", "Gemma2ForSequenceClassification"),
    keys=_GEMMA_KEYS,
    defaults=_GEMMA_DEFAULTS
    | {
        "vocab_size": 256000,
        "max_position_embeddings": 8192,
        "attn_logit_softcapping": 50.0,
        "final_logit_softcapping": 30.0,
    },
    traits=_GEMMA_TRAITS,
    covered={"use_bidirectional_attention": False},
    tensors=_llama,
    pattern=("window", "full"),
)
GEMMA3 = Family(
    name="gemma3_text",
    classes=("Gemma3ForCausalLM", "Gemma3TextForSequenceClassification"),
    keys=_GEMMA_KEYS,
    defaults=_GEMMA_DEFAULTS
    | {
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "rope_theta": 1000000.0,
        "rope_local_base_freq": 10000.0,
    },
    traits=_GEMMA_TRAITS | {"qk_norm": True},
    covered={"use_bidirectional_attention": False},
    rotary=Rotary(window_theta="rope_local_base_freq"),
    tensors=_llama,
    pattern=("window", "window", "window", "window", "window", "full"),
    # The language model inside a multimodal model of two generations of transformers.
    more_prefixes=("language_model.model.", "model.language_model."),
    spare=("vision_tower.", "multi_modal_projector.", "model.vision_tower.", "model.multi_modal_"),
)
MISTRAL = Family(
    name="mistral",
    classes=("MistralForCausalLM", "MistralForSequenceClassification"),
    keys=_LLAMA_KEYS | _WINDOW,
    defaults={
        "rms_norm_eps": 1e-6,
        "max_position_embeddings": 131072,
        "hidden_act": "silu",
        "sliding_window": 4096,
    },
    traits={"norm": "rms", "gated_mlp": True},
    tensors=_llama,
    pattern=("window",),
)
OLMO3 = Family(
    name="olmo3",
    classes=("Olmo3ForCausalLM", "Olmo3ForSequenceClassification"),
    keys=_LLAMA_KEYS | _ATTENTION_BIAS | _WINDOW,
    defaults={
        "rms_norm_eps": 1e-5,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "sliding_window": 4096,
        "rope_theta": 500000.0,
    },
    traits={
        "norm": "rms",
        "gated_mlp": True,
        "norms": "post",
        "qk_norm": True,
        "qk_norm_is_whole": True,
    },
    rotary=Rotary(window_theta="rope_theta"),
    tensors=_llama,
    pattern=("window", "window", "window", "full"),
)
GPT_OSS = Family(
    name="gpt_oss",
    classes=("GptOssForCausalLM", "GptOssForSequenceClassification"),
    keys=_LLAMA_KEYS
    | _ATTENTION_BIAS
    | _WINDOW
    | _EXPERT_KEYS
    | {"num_experts": "num_local_experts"},
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
        "norm": "rms",
        "gated_mlp": True,
        "activation": "clamped_swiglu",
        "mlp_bias": True,
        "sinks": True,
        "router_bias": True,
        "normalised_experts": True,
    },
    covered={"hidden_act": "silu", "swiglu_alpha": 1.702, "swiglu_limit": 7.0},
    tensors=functools.partial(_llama, feed_forward=_gpt_oss_experts),
    more_tensors=(
        functools.partial(_llama, feed_forward=functools.partial(_gpt_oss_experts, is_mxfp4=True)),
    ),
    pattern=("window", "full"),
    quantization="mxfp4",
)

_DECODERS = (LLAMA, QWEN2, QWEN3, QWEN3_MOE, GEMMA2, GEMMA3, MISTRAL, OLMO3, GPT_OSS)
FAMILIES: dict[str, Family] = {x.name: x for x in (*_DECODERS, GPT_NEOX, GPT2)}
