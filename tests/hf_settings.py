# SPDX-License-Identifier: Apache-2.0
"""The config.json of an architecture, with the names of settings that transformers 5 has."""

from tba_jax.models import rope

_NAMES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "num_kv_heads": "num_key_value_heads",
    "head_dim": "head_dim",
    "mlp_size": "intermediate_size",
    "max_positions": "max_position_embeddings",
    "norm_eps": "rms_norm_eps",
    "tie_embeddings": "tie_word_embeddings",
    "o_bias": "attention_bias",
}
# Written if they are not 0, null or false.
_OPTIONAL = {
    "window": "sliding_window",
    "score_divisor": "query_pre_attn_scalar",
    "attention_cap": "attn_logit_softcapping",
    "logits_cap": "final_logit_softcapping",
    "num_experts": "num_experts",
    "experts_per_token": "num_experts_per_tok",
    "normalised_experts": "norm_topk_prob",
    "shared_size": "shared_expert_intermediate_size",
    "delta_key_heads": "linear_num_key_heads",
    "delta_value_heads": "linear_num_value_heads",
    "delta_key_dim": "linear_key_head_dim",
    "delta_value_dim": "linear_value_head_dim",
    "delta_taps": "linear_conv_kernel_dim",
}
_GEMMA, _MOE = {"activation": "hidden_activation"}, {"mlp_size": "moe_intermediate_size"}
_OWN = {
    "llama": {"mlp_bias": "mlp_bias"},
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
    "mistral": {"window": "sliding_window"},
    "qwen3_moe": _MOE,
    "qwen3_5_moe_text": _MOE,
    "gpt_oss": {"num_experts": "num_local_experts"},
    "gpt_neox": {"norm_eps": "layer_norm_eps", "parallel_residual": "use_parallel_residual"},
    "gpt2": {
        "hidden_size": "n_embd",
        "num_layers": "n_layer",
        "num_heads": "n_head",
        "mlp_size": "n_inner",
        "max_positions": "n_positions",
        "norm_eps": "layer_norm_epsilon",
        "activation": "activation_function",
    },
}
_ACTIVATIONS = {"gelu": "gelu", "gelu_tanh": "gelu_pytorch_tanh"}
_KINDS = {"full": "full_attention", "window": "sliding_attention", "delta": "linear_attention"}


def hf_config(config, **more):
    """The contents of config.json; `more` are further settings."""
    optional = {our: their for our, their in _OPTIONAL.items() if getattr(config, our)}
    names = {"activation": "hidden_act"} | _NAMES | optional | _OWN.get(config.family, {})
    kind = "SequenceClassification" if config.num_labels else "CausalLM"
    values = {"model_type": config.family, "architectures": [f"AnyFor{kind}"]}
    values |= {their: getattr(config, our) or None for our, their in names.items()}
    values |= {names[x]: getattr(config, x) for x in ("tie_embeddings", "o_bias")}
    values |= {x: bool(values[x]) for x in ("mlp_bias", "use_parallel_residual") if x in values}
    values[names["activation"]] = _ACTIVATIONS.get(config.activation, "silu")
    if len(config.pattern) > 1:
        values["layer_types"] = [_KINDS[kind] for kind in config.layer_kinds]
    if config.positions == "rotary":
        values["rope_parameters"] = _rope(config)
    if config.num_labels:
        labels = [f"LABEL_{i}" for i in range(config.num_labels)]
        values["id2label"] = {str(i): name for i, name in enumerate(labels)}
        values["label2id"] = {name: i for i, name in enumerate(labels)}
    return values | more


def _rope(config):
    of_full = {"rope_type": "default", "rope_theta": config.rope_theta}
    if (scaling := config.rope_scaling) is not None:
        fields = dict(vars(scaling))
        if "original_max_positions" in fields:
            fields["original_max_position_embeddings"] = fields.pop("original_max_positions")
        kinds = {rope.LinearScaling: "linear", rope.Llama3Scaling: "llama3"}
        of_full |= {"rope_type": kinds.get(type(scaling), "yarn"), **fields}
    if config.family in ("gpt_neox", "qwen3_5_text", "qwen3_5_moe_text"):
        of_full["partial_rotary_factor"] = config.rotary_fraction
    if config.family not in ("gemma3_text", "olmo3"):
        return of_full
    theta = config.window_rope_theta or config.rope_theta
    of_windows = {"rope_type": "default", "rope_theta": theta}
    return {"full_attention": of_full, "sliding_attention": of_windows}
