# SPDX-License-Identifier: Apache-2.0
"""Families of Hugging Face models: how their config.json is read, and their tensors.

To add a family, write a function that returns fields of TransformerConfig, a table of tensors, and
a row of `FAMILIES`; no other code depends on the family. A table may name tensors that only some
models of the family have. Axes: d hidden size, h heads (query or key/value heads), e size of a
head, f width of the MLP, E experts, t taps. Invariant: every element of every parameter belongs to
exactly one tensor.
"""

import re
from collections.abc import Callable, Collection, Mapping
from typing import Any, NamedTuple

from tba_jax.models.architecture import LayerKind, TransformerConfig
from tba_jax.models.hf.config_json import (
    ACTIVATIONS,
    Fields,
    Settings,
    layers,
    rotary,
    unsupported,
)
from tba_jax.models.hf.tensors import HFTensor, Rule, Table, bind, linear, within
from tba_jax.models.transformer import abstract_params

Pattern = tuple[LayerKind, ...]


def sizes(s: Settings, pattern: Pattern = ("full",)) -> Fields:
    """Return the fields that every architecture has; `pattern` as in `layers`."""
    hidden, heads = s("hidden_size", int), s("num_attention_heads", int)
    return {
        "vocab_size": s("vocab_size", int),
        "hidden_size": hidden,
        "num_heads": heads,
        "num_kv_heads": s("num_key_value_heads", int, heads),
        "head_dim": s("head_dim", int, hidden // heads),
        "mlp_size": s("intermediate_size", int, 4 * hidden),
        "max_positions": s("max_position_embeddings", int),
        "norm_eps": s("rms_norm_eps", float),
        "activation": s.choice("hidden_act", ACTIVATIONS),
        "tie_embeddings": s("tie_word_embeddings", bool, False),
        **layers(s, pattern),
    }


def _biases(s: Settings) -> Fields:
    return dict.fromkeys(("qkv_bias", "o_bias"), s("attention_bias", bool, False))


# --- Llama, and what its descendants share -----------------------------------
def _llama(s: Settings) -> Fields:
    return sizes(s) | rotary(s) | _biases(s) | {"mlp_bias": s("mlp_bias", bool, False)}


_HEADS = ("(h e) d -> d h e", "(h e) -> h e")


def _trunk(*tables: Table, norms: Mapping[str, str], norm_axes: str = "") -> Table:
    """Return the tensors of the Llama architecture.

    Args:
        tables: tensors of a layer, besides those of attention.
        norms: tensor -> leaf of the norms of a layer.
        norm_axes: pattern of the norm of queries and keys.
    """
    attention = {
        **linear("q_proj", "q", *_HEADS),
        **linear("k_proj", "k", *_HEADS),
        **linear("v_proj", "v", *_HEADS),
        **linear("o_proj", "o", "d (h e) -> h e d"),
        "q_norm.weight": Rule("q_norm", norm_axes),
        "k_norm.weight": Rule("k_norm", norm_axes),
        "sinks": Rule("sinks"),
    }
    of_norms = {f"{name}.weight": Rule(leaf) for name, leaf in norms.items()}
    return {
        "embed_tokens.weight": Rule("embed"),
        "norm.weight": Rule("final_norm"),
        **within("layers.#.", within("self_attn.", attention), of_norms, *tables),
    }


def _mlp(name: str = "mlp") -> Table:
    return {
        **linear(f"{name}.gate_proj", "gate", "f d -> d f"),
        **linear(f"{name}.up_proj", "up", "f d -> d f"),
        **linear(f"{name}.down_proj", "down", "d f -> f d"),
    }


_PRE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
_LLAMA = _trunk(_mlp(), norms=_PRE)


# --- Mistral and OLMo 3 ------------------------------------------------------
def _mistral(s: Settings) -> Fields:
    return sizes(s, ("window",)) | rotary(s)


def _olmo3(s: Settings) -> Fields:
    norms = {"norms": "post", "qk_norm": True, "qk_norm_is_whole": True}
    fields = sizes(s, ("window", "window", "window", "full")) | _biases(s) | norms
    return fields | rotary(s, window_theta="rope_theta")


_POST = {
    "post_attention_layernorm": "attn_out_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}
_OLMO3 = _trunk(_mlp(), norms=_POST, norm_axes="(h e) -> h e")


# --- Qwen --------------------------------------------------------------------
def _qwen2(s: Settings) -> Fields:
    s.only(mlp_bias=False)
    return sizes(s) | rotary(s) | {"qkv_bias": True}


def _qwen3(s: Settings) -> Fields:
    s.only(mlp_bias=False)
    return sizes(s) | rotary(s) | _biases(s) | {"qk_norm": True}


def _experts(s: Settings, is_normalised: bool = True) -> Fields:
    return {
        "num_experts": s("num_experts", int),
        "experts_per_token": s("num_experts_per_tok", int),
        "normalised_experts": is_normalised,
    }


def _qwen3_moe(s: Settings) -> Fields:
    s.only(decoder_sparse_step=1, mlp_only_layers=[])  # every layer has experts
    return _qwen3(s) | _experts(s, s("norm_topk_prob", bool, False))


_ROUTER = {"mlp.gate.weight": Rule("router", "E d -> d E")}
_SEPARATE_EXPERTS = _ROUTER | {
    "mlp.experts.*.gate_proj.weight": Rule("expert_gate", "f d -> d f"),
    "mlp.experts.*.up_proj.weight": Rule("expert_up", "f d -> d f"),
    "mlp.experts.*.down_proj.weight": Rule("expert_down", "d f -> f d"),
}
# The layout of transformers 5 in memory, with all experts in one tensor.
_FUSED_EXPERTS = _ROUTER | {
    "mlp.experts.gate_up_proj": Rule("expert_gate expert_up", "E (n f) d -> n E d f"),
    "mlp.experts.down_proj": Rule("expert_down", "E d f -> E f d"),
}
_EXPERTS = (_SEPARATE_EXPERTS, _FUSED_EXPERTS)


def _qwen3_5(s: Settings) -> Fields:
    return {
        **sizes(s, ("delta", "delta", "delta", "full")),
        **rotary(s, default_fraction=0.25),
        **_biases(s),
        **dict.fromkeys(("qk_norm", "norm_offset", "attention_gate"), True),
        "delta_key_heads": s("linear_num_key_heads", int),
        "delta_value_heads": s("linear_num_value_heads", int),
        "delta_key_dim": s("linear_key_head_dim", int),
        "delta_value_dim": s("linear_value_head_dim", int),
        "delta_taps": s("linear_conv_kernel_dim", int),
    }


def _qwen3_5_moe(s: Settings) -> Fields:
    shared = {"shared_size": s("shared_expert_intermediate_size", int)}
    return _qwen3_5(s) | _experts(s) | shared


_TAPS = "delta_taps_q delta_taps_k delta_taps_v"
_DELTA = {
    "self_attn.q_proj.weight": Rule("q q_gate", "(h n e) d -> n d h e"),
    "linear_attn.in_proj_qkv.weight": Rule("delta_q delta_k delta_v", "(h e) d -> d h e"),
    "linear_attn.conv1d.weight": Rule(_TAPS, "(h e) 1 t -> h e t"),
    "linear_attn.in_proj_z.weight": Rule("delta_gate", "(h e) d -> d h e"),
    "linear_attn.in_proj_b.weight": Rule("delta_rate", "h d -> d h"),
    "linear_attn.in_proj_a.weight": Rule("delta_decay", "h d -> d h"),
    "linear_attn.dt_bias": Rule("delta_decay_bias"),
    "linear_attn.A_log": Rule("delta_log_decay"),
    "linear_attn.norm.weight": Rule("delta_norm"),
    "linear_attn.out_proj.weight": Rule("delta_o", "d (h e) -> h e d"),
}
# A dense MLP that every token passes in addition to its experts.
_SHARED = {
    **_mlp("mlp.shared_expert"),
    "mlp.shared_expert_gate.weight": Rule("shared_router", "1 d -> d"),
}


# --- Gemma -------------------------------------------------------------------
def _gemma(s: Settings, pattern: Pattern) -> Fields:
    s.only(use_bidirectional_attention=False)
    return {
        **sizes(s, pattern),
        **_biases(s),
        **{"norms": "both", "norm_offset": True, "scaled_embeddings": True},
        "score_divisor": s.optional("query_pre_attn_scalar"),
        "attention_cap": s.optional("attn_logit_softcapping"),
        "logits_cap": s.optional("final_logit_softcapping"),
    }


def _gemma2(s: Settings) -> Fields:
    return _gemma(s, ("window", "full")) | rotary(s)


def _gemma3(s: Settings) -> Fields:
    fields = _gemma(s, ("window", "window", "window", "window", "window", "full"))
    return fields | rotary(s, window_theta="rope_local_base_freq") | {"qk_norm": True}


_GEMMA_DEFAULTS = {"query_pre_attn_scalar": 256, "sliding_window": 4096}
_GEMMA_DEFAULTS |= {"tie_word_embeddings": True}
_GEMMA2_DEFAULTS = {"attn_logit_softcapping": 50.0, "final_logit_softcapping": 30.0}
_GEMMA2_DEFAULTS |= _GEMMA_DEFAULTS
# Files of multimodal models omit most of them.
_GEMMA3_DEFAULTS = _GEMMA_DEFAULTS | {
    "vocab_size": 262208,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "head_dim": 256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-6,
    "hidden_act": "gelu_pytorch_tanh",
    "rope_theta": 1000000.0,
    "rope_local_base_freq": 10000.0,
}
_BOTH = _POST | {"input_layernorm": "attn_norm", "pre_feedforward_layernorm": "mlp_norm"}
_GEMMA = _trunk(_mlp(), norms=_BOTH)


# --- gpt-oss -----------------------------------------------------------------
def _gpt_oss(s: Settings) -> Fields:
    s.only(hidden_act="silu", swiglu_alpha=1.702, swiglu_limit=7.0)
    fields = sizes(s, ("window", "full")) | rotary(s) | _biases(s) | _experts(s)
    return fields | {"activation": "clamped_swiglu", "mlp_bias": True, "sinks": True}


_GPT_OSS_SMALL = {
    "mlp.router.weight": Rule("router", "E d -> d E"),
    "mlp.router.bias": Rule("router_bias"),
    "mlp.experts.gate_up_proj_bias": Rule("expert_gate_bias expert_up_bias", "E (f n) -> n E f"),
    "mlp.experts.down_proj_bias": Rule("expert_down_bias"),
}
# Gate and up are interleaved.
_PLAIN = _GPT_OSS_SMALL | {
    "mlp.experts.gate_up_proj": Rule("expert_gate expert_up", "E d (f n) -> n E d f"),
    "mlp.experts.down_proj": Rule("expert_down"),
}
# Four-bit files, in which outputs precede inputs. `hf_weights.open_folder` adds their scales.
_MXFP4 = _GPT_OSS_SMALL | {
    "mlp.experts.gate_up_proj_blocks": Rule("expert_gate expert_up", "E (f n) d -> n E d f"),
    "mlp.experts.down_proj_blocks": Rule("expert_down", "E d f -> E f d"),
}
_GPT_OSS_DEFAULTS = {"head_dim": 64, "sliding_window": 128, "attention_bias": True}
_GPT_OSS_DEFAULTS |= {"rope_theta": 150000.0}


# --- GPT-2 and GPT-NeoX ------------------------------------------------------

_OLD_TRAITS = {"norm": "layer", "gated_mlp": False, "mlp_bias": True}


def _gpt2(s: Settings) -> Fields:
    s.only(add_cross_attention=False, scale_attn_by_inverse_layer_idx=False)
    s.only(scale_attn_weights=True)
    biases = {"qkv_bias": True, "o_bias": True}
    return sizes(s) | {"positions": "learned"} | biases | _OLD_TRAITS


_GPT2_LAYER = {
    **linear("ln_1", "attn_norm"),
    **linear("ln_2", "mlp_norm"),
    # All queries, then all keys, then all values. The matrices of GPT-2 are [in, out].
    "attn.c_attn.weight": Rule("q k v", "d (n h e) -> n d h e"),
    "attn.c_attn.bias": Rule("q_bias k_bias v_bias", "(n h e) -> n h e"),
    **linear("attn.c_proj", "o", "(h e) d -> h e d"),
    **linear("mlp.c_fc", "up"),
    **linear("mlp.c_proj", "down"),
}
_GPT2 = {
    "wte.weight": Rule("embed"),
    "wpe.weight": Rule("position_embed"),
    **linear("ln_f", "final_norm"),
    **within("h.#.", _GPT2_LAYER),
}


def _gpt_neox(s: Settings) -> Fields:
    is_parallel = {"parallel_residual": s("use_parallel_residual", bool)}
    fields = sizes(s) | rotary(s, default_fraction=0.25) | _biases(s)
    return fields | is_parallel | _OLD_TRAITS


_GPT_NEOX_LAYER = {
    **linear("input_layernorm", "attn_norm"),
    **linear("post_attention_layernorm", "mlp_norm"),
    # Query, key and value are adjacent within each head.
    "attention.query_key_value.weight": Rule("q k v", "(h n e) d -> n d h e"),
    "attention.query_key_value.bias": Rule("q_bias k_bias v_bias", "(h n e) -> n h e"),
    **linear("attention.dense", "o", "d (h e) -> h e d"),
    **linear("mlp.dense_h_to_4h", "up", "f d -> d f"),
    **linear("mlp.dense_4h_to_h", "down", "d f -> f d"),
}
_GPT_NEOX = {
    "embed_in.weight": Rule("embed"),
    **linear("final_layer_norm", "final_norm"),
    **within("layers.#.", _GPT_NEOX_LAYER),
}


# --- the table ---------------------------------------------------------------
class Family(NamedTuple):
    """A family of models in transformers.

    Attributes:
        read: function that returns the fields of TransformerConfig, except family and num_labels.
        tensors: names and layouts of its tensors, below the prefix: first the layout that is
            written, then others that can be read.
        defaults: values of transformers for settings that config.json may omit.
        prefix: prefix of the trunk's tensors.
        head: name of the output matrix.
        quantization: method of quantised files that can be read; None: none.
    """

    read: Callable[[Settings], Fields]
    tensors: tuple[Table, ...] = (_LLAMA,)
    defaults: Mapping[str, Any] = {}
    prefix: str = "model."
    head: str = "lm_head.weight"
    quantization: str | None = None


def _moe(experts: tuple[Table, ...], *more: Table) -> tuple[Table, ...]:
    return tuple(_trunk(x, *more, norms=_PRE) for x in experts)


_NEOX_DEFAULTS = {"attention_bias": True, "use_parallel_residual": True}
FAMILIES: Mapping[str, Family] = {
    "llama": Family(_llama),
    "qwen2": Family(_qwen2),
    "qwen3": Family(_qwen3, defaults={"head_dim": 128}),
    "qwen3_moe": Family(_qwen3_moe, _moe(_EXPERTS)),
    "gemma2": Family(_gemma2, (_GEMMA,), _GEMMA2_DEFAULTS),
    "gemma3_text": Family(_gemma3, (_GEMMA,), _GEMMA3_DEFAULTS),
    "mistral": Family(_mistral, defaults={"sliding_window": 4096}),
    "olmo3": Family(_olmo3, (_OLMO3,), {"rope_theta": 500000.0}),
    "gpt_oss": Family(_gpt_oss, _moe((_PLAIN, _MXFP4)), _GPT_OSS_DEFAULTS, quantization="mxfp4"),
    "qwen3_5_text": Family(_qwen3_5, (_trunk(_mlp(), _DELTA, norms=_PRE),), {"head_dim": 256}),
    "qwen3_5_moe_text": Family(_qwen3_5_moe, _moe(_EXPERTS, _SHARED, _DELTA), {"head_dim": 256}),
    "gpt_neox": Family(
        _gpt_neox, (_GPT_NEOX,), _NEOX_DEFAULTS, prefix="gpt_neox.", head="embed_out.weight"
    ),
    "gpt2": Family(_gpt2, (_GPT2,), {"tie_word_embeddings": True}, prefix="transformer."),
}
# Settings that some families have under another name -> usual name.
_NAMES = {
    "n_embd": "hidden_size",
    "n_layer": "num_hidden_layers",
    "n_head": "num_attention_heads",
    "n_inner": "intermediate_size",
    "moe_intermediate_size": "intermediate_size",
    "n_positions": "max_position_embeddings",
    "layer_norm_epsilon": "rms_norm_eps",
    "layer_norm_eps": "rms_norm_eps",
    "activation_function": "hidden_act",
    "hidden_activation": "hidden_act",
    "num_local_experts": "num_experts",
    "rotary_emb_base": "rope_theta",
    "rotary_pct": "partial_rotary_factor",
}
# Multimodal models: model_type -> model_type of the language model inside.
_MULTIMODAL = {
    "gemma3": "gemma3_text",
    "qwen3_5": "qwen3_5_text",
    "qwen3_5_moe": "qwen3_5_moe_text",
}
# Prefixes of the trunk in files: also of multimodal models of two generations of transformers.
_PREFIX = re.compile(r"(language_model\.model|model\.language_model|model|transformer|gpt_neox)\.")
# Tensors below a prefix without use: constants in old checkpoints (rotary frequencies and causal
# masks), images, and heads that draft several tokens.
_SPARE = re.compile(
    r"(.*\.)?(rotary_emb\.inv_freq|(attention|attn)\.(bias|masked_bias))$"
    r"|(visual|vision_tower|multi_modal_projector|mtp)\."
)
_MODEL, _CLASSIFIER = "ForCausalLM", "ForSequenceClassification"  # ends of architectures
_HEAD_NAMES = ("lm_head.weight", "embed_out.weight")  # files of GPT-NeoX have either


def language_model(hf_config: Mapping[str, Any]) -> dict[str, Any]:
    """Return the config.json of the language model in a multimodal model; else the argument."""
    inner = hf_config.get("text_config")
    name = _MULTIMODAL.get(str(hf_config.get("model_type")))
    if name is None or not isinstance(inner, Mapping):
        return dict(hf_config)
    outer = ("bos_token_id", "eos_token_id", "pad_token_id", "dtype", "torch_dtype")
    shared = {key: hf_config[key] for key in outer if key in hf_config}
    classes = [
        x.replace("ForConditionalGeneration", _MODEL) for x in hf_config.get("architectures", ())
    ]
    return {**shared, **inner, "model_type": name, "architectures": classes}


def settings(hf_config: Mapping[str, Any], defaults: Mapping[str, Any] | None = None) -> Settings:
    """Return the settings of a config.json under their usual names."""
    usual = {new: hf_config[old] for old, new in _NAMES.items() if old in hf_config}
    return Settings({**hf_config, **usual}, defaults)


def transformer_config(hf_config: Mapping[str, Any]) -> TransformerConfig:
    """Return the architecture for the contents of a Hugging Face config.json.

    Raises:
        ValueError: an unsupported setting; names its value and the supported values.
    """
    hf_config = language_model(hf_config)
    if (name := str(hf_config.get("model_type"))) not in FAMILIES:
        raise ValueError(
            f"config.json has model_type = {name!r}, which this model does not implement (it "
            f"covers: {', '.join(FAMILIES)}). Choose a checkpoint of one of these families, or "
            "add a record to tba_jax/models/hf/families.py as docs/extend.md shows"
        )
    family = FAMILIES[name]
    s = settings(hf_config, family.defaults)
    s.only(is_encoder_decoder=False, use_sliding_window=False, pruned_heads={})
    method = s.get("quantization_config", {}).get("quant_method")
    if method not in (None, family.quantization):
        wanted = ", ".join(filter(None, ("unquantised weights", family.quantization)))
        raise unsupported("quantization_config.quant_method", method, wanted)
    num_labels = 0
    for kind in s.get("architectures", ()):
        if kind.endswith(_CLASSIFIER):  # transformers omits id2label if there are two labels
            num_labels = len(s.get("id2label", range(s("num_labels", int, 2))))
        elif not kind.endswith((_MODEL, "LMHeadModel")):
            raise unsupported("architectures", kind, f"*{_MODEL} or *{_CLASSIFIER}")
    return TransformerConfig(**family.read(s), family=name, num_labels=num_labels)


def tensors(config: TransformerConfig, found: Collection[str] = ()) -> dict[str, HFTensor]:
    """Return every tensor of a checkpoint of this architecture, by name.

    Args:
        found: names of tensors in files, which select one of the layouts of the family; empty: the
            layout that is written.
    """
    family, abstract = FAMILIES[config.family], abstract_params(config)
    ends = {"score.weight": Rule("score"), family.head: Rule("unembed")}
    layouts = [
        bind({**within(family.prefix, table), **ends}, abstract, config) for table in family.tensors
    ]
    return max(layouts, key=lambda layout: len(layout.keys() & {*found}))


def written_name(name: str, config: TransformerConfig) -> str | None:
    """Return the name that `tensors` has for a tensor in a file; None for a tensor without use.

    Files that were saved from the trunk alone lack the trunk's prefix, such as GPT-2 on the hub.
    """
    family = FAMILIES[config.family]
    if name in _HEAD_NAMES:
        return family.head
    if name == "score.weight":
        return name
    bare = name[match.end() :] if (match := _PREFIX.match(name)) else name
    return None if _SPARE.match(bare) else family.prefix + bare
