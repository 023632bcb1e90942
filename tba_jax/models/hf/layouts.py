# SPDX-License-Identifier: Apache-2.0
"""Names and layouts of the tensors of Hugging Face checkpoints, below the prefix of the family.

A table may name tensors that only some models of a family have. Axes: d hidden size, h heads
(query or key/value heads), e size of a head, f width of the MLP, E experts, t taps.
Invariant: every element of every leaf of `transformer.init_params` belongs to exactly one tensor.
"""

from tba_jax.models.hf.tensors import Rule, Table


def _layer(rules: Table, prefix: str = "") -> Table:
    """Return the rules with the names of layers."""
    return {f"layers.#.{prefix}{name}": rule for name, rule in rules.items()}


def _linear(name: str, leaf: str, pattern: str, bias: str = "") -> Table:
    """Return the rules of a matrix and its bias; the axes of both are in `pattern` and `bias`."""
    return {f"{name}.weight": Rule(leaf, pattern), f"{name}.bias": Rule(f"{leaf}_bias", bias)}


def _llama(*mlps: Table, norms: dict[str, str], whole_norm: bool = False) -> Table:
    heads = ("(h e) d -> d h e", "(h e) -> h e")
    of_heads = heads[1] if whole_norm else ""
    attention = {
        **_linear("q_proj", "q", *heads),
        **_linear("k_proj", "k", *heads),
        **_linear("v_proj", "v", *heads),
        **_linear("o_proj", "o", "d (h e) -> h e d"),
        "q_norm.weight": Rule("q_norm", of_heads),
        "k_norm.weight": Rule("k_norm", of_heads),
        "sinks": Rule("sinks"),
    }
    rules = {
        "embed_tokens.weight": Rule("embed"),
        "norm.weight": Rule("final_norm"),
        **_layer({f"{name}.weight": Rule(leaf) for name, leaf in norms.items()}),
        **_layer(attention, "self_attn."),
    }
    for mlp in mlps:
        rules |= _layer(mlp, "mlp.")
    return rules


def _mlp(prefix: str = "") -> Table:
    return {
        **_linear(f"{prefix}gate_proj", "gate", "f d -> d f"),
        **_linear(f"{prefix}up_proj", "up", "f d -> d f"),
        **_linear(f"{prefix}down_proj", "down", "d f -> f d"),
    }


_PRE = {"input_layernorm": "attn_norm", "post_attention_layernorm": "mlp_norm"}
_POST = {
    "post_attention_layernorm": "attn_out_norm",
    "post_feedforward_layernorm": "mlp_out_norm",
}
_BOTH = {**_POST, "input_layernorm": "attn_norm", "pre_feedforward_layernorm": "mlp_norm"}

_SEPARATE_EXPERTS = {
    "gate.weight": Rule("router", "E d -> d E"),
    "experts.*.gate_proj.weight": Rule("expert_gate", "f d -> d f"),
    "experts.*.up_proj.weight": Rule("expert_up", "f d -> d f"),
    "experts.*.down_proj.weight": Rule("expert_down", "d f -> f d"),
}
# The layout of transformers 5 in memory, with all experts in one tensor.
_FUSED_EXPERTS = {
    "gate.weight": Rule("router", "E d -> d E"),
    "experts.gate_up_proj": Rule("expert_gate expert_up", "E (n f) d -> n E d f"),
    "experts.down_proj": Rule("expert_down", "E d f -> E f d"),
}
# A dense MLP that every token passes in addition to its experts.
_SHARED_EXPERT = {
    **_mlp("shared_expert."),
    "shared_expert_gate.weight": Rule("shared_router", "1 d -> d"),
}
# Gate and up of gpt-oss are interleaved.
_GPT_OSS_EXPERTS = {
    "router.weight": Rule("router", "E d -> d E"),
    "router.bias": Rule("router_bias"),
    "experts.gate_up_proj": Rule("expert_gate expert_up", "E d (f n) -> n E d f"),
    "experts.gate_up_proj_bias": Rule("expert_gate_bias expert_up_bias", "E (f n) -> n E f"),
    "experts.down_proj": Rule("expert_down"),
    "experts.down_proj_bias": Rule("expert_down_bias"),
}
# Four-bit files store outputs before inputs.
_MXFP4_EXPERTS = {
    **_GPT_OSS_EXPERTS,
    "experts.gate_up_proj": Rule("expert_gate expert_up", "E (f n) d -> n E d f", is_mxfp4=True),
    "experts.down_proj": Rule("expert_down", "E d f -> E f d", is_mxfp4=True),
}
_GATED_ATTENTION = {
    "layers.#.self_attn.q_proj.weight": Rule("q q_gate", "(h n e) d -> n d h e"),
}
_DELTA = {
    "in_proj_qkv.weight": Rule("delta_q delta_k delta_v", "(h e) d -> d h e"),
    "conv1d.weight": Rule("delta_taps_q delta_taps_k delta_taps_v", "(h e) 1 t -> h e t"),
    "in_proj_z.weight": Rule("delta_gate", "(h e) d -> d h e"),
    "in_proj_b.weight": Rule("delta_rate", "h d -> d h"),
    "in_proj_a.weight": Rule("delta_decay", "h d -> d h"),
    "dt_bias": Rule("delta_decay_bias"),
    "A_log": Rule("delta_log_decay"),
    "norm.weight": Rule("delta_norm"),
    "out_proj.weight": Rule("delta_o", "d (h e) -> h e d"),
}
_QWEN3_5 = {**_GATED_ATTENTION, **_layer(_DELTA, "linear_attn.")}

LLAMA = _llama(_mlp(), norms=_PRE)
GEMMA = _llama(_mlp(), norms=_BOTH)
OLMO3 = _llama(_mlp(), norms=_POST, whole_norm=True)
QWEN3_MOE = _llama(_SEPARATE_EXPERTS, norms=_PRE)
QWEN3_MOE_FUSED = _llama(_FUSED_EXPERTS, norms=_PRE)
GPT_OSS = _llama(_GPT_OSS_EXPERTS, norms=_PRE)
GPT_OSS_MXFP4 = _llama(_MXFP4_EXPERTS, norms=_PRE)
QWEN3_5 = {**LLAMA, **_QWEN3_5}
QWEN3_5_MOE = {**_llama(_SEPARATE_EXPERTS, _SHARED_EXPERT, norms=_PRE), **_QWEN3_5}
QWEN3_5_MOE_FUSED = {**_llama(_FUSED_EXPERTS, _SHARED_EXPERT, norms=_PRE), **_QWEN3_5}

GPT_NEOX = {
    "embed_in.weight": Rule("embed"),
    **_linear("final_layer_norm", "final_norm", ""),
    **_linear("layers.#.input_layernorm", "attn_norm", ""),
    **_linear("layers.#.post_attention_layernorm", "mlp_norm", ""),
    # Query, key and value are adjacent within each head.
    "layers.#.attention.query_key_value.weight": Rule("q k v", "(h n e) d -> n d h e"),
    "layers.#.attention.query_key_value.bias": Rule("q_bias k_bias v_bias", "(h n e) -> n h e"),
    **_linear("layers.#.attention.dense", "o", "d (h e) -> h e d"),
    **_linear("layers.#.mlp.dense_h_to_4h", "up", "f d -> d f"),
    **_linear("layers.#.mlp.dense_4h_to_h", "down", "d f -> f d"),
}
# The matrices of GPT-2 are [in, out].
GPT2 = {
    "wte.weight": Rule("embed"),
    "wpe.weight": Rule("position_embed"),
    **_linear("ln_f", "final_norm", ""),
    **_linear("h.#.ln_1", "attn_norm", ""),
    **_linear("h.#.ln_2", "mlp_norm", ""),
    # All queries, then all keys, then all values.
    "h.#.attn.c_attn.weight": Rule("q k v", "d (n h e) -> n d h e"),
    "h.#.attn.c_attn.bias": Rule("q_bias k_bias v_bias", "(n h e) -> n h e"),
    **_linear("h.#.attn.c_proj", "o", "(h e) d -> h e d"),
    **_linear("h.#.mlp.c_fc", "up", ""),
    **_linear("h.#.mlp.c_proj", "down", ""),
}

ENCODER = {
    "embeddings.word_embeddings.weight": Rule("embed"),
    "embeddings.position_embeddings.weight": Rule("positions"),
    "embeddings.token_type_embeddings.weight": Rule("token_types"),
    **_linear("embeddings.LayerNorm", "embed_norm", ""),
    **{
        f"encoder.layer.#.{name}": rule
        for name, rule in {
            **_linear("attention.self.query", "q", "(h e) d -> d h e", "(h e) -> h e"),
            **_linear("attention.self.key", "k", "(h e) d -> d h e", "(h e) -> h e"),
            **_linear("attention.self.value", "v", "(h e) d -> d h e", "(h e) -> h e"),
            **_linear("attention.output.dense", "o", "d (h e) -> h e d"),
            **_linear("attention.output.LayerNorm", "attn_norm", ""),
            **_linear("intermediate.dense", "up", "f d -> d f"),
            **_linear("output.dense", "down", "d f -> f d"),
            **_linear("output.LayerNorm", "mlp_norm", ""),
        }.items()
    },
}
"""RoBERTa and BERT."""
ENCODER_HEAD = {
    **_linear("classifier.dense", "head", "o d -> d o"),
    **_linear("classifier.out_proj", "logits", "o d -> d o"),
}
"""Classifier behind an encoder; its names have no prefix."""
