# SPDX-License-Identifier: Apache-2.0
"""Hugging Face tensor names and layouts <-> the leaves of `transformer.init_params`.

It describes; it reads no file and holds no array. The invariant it owns: every element of every
leaf belongs to exactly one tensor.
"""

import re

from tba_jax.models.hf.tensors import HFTensor, conv1d, linear, plain, split_vector
from tba_jax.models.transformer import TransformerConfig

_PREFIX = {
    "llama": "model.",
    "qwen2": "model.",
    "qwen3": "model.",
    "gpt_neox": "gpt_neox.",
    "gpt2": "transformer.",
}
# transformers renamed the output matrix of GPT-NeoX in version 5 and reads both names.
_HEAD = {"gpt_neox": ("embed_out.weight", "lm_head.weight")}
# Constants that old checkpoints carry: rotary frequencies and causal masks.
_BUFFER = re.compile(r"(^|\.)(rotary_emb\.inv_freq|(attention|attn)\.(bias|masked_bias))$")


def tensors(config: TransformerConfig) -> dict[str, HFTensor]:
    """Every tensor that a checkpoint of this architecture must have, by its usual name."""
    table = {"gpt_neox": _gpt_neox, "gpt2": _gpt2}.get(config.family, _llama)
    prefix = _PREFIX[config.family]
    out = {prefix + name: tensor for name, tensor in table(config, None).items()}
    d, v = config.hidden_size, config.vocab_size
    if config.num_labels:
        out["score.weight"] = plain("score", -1, (config.num_labels, d))
    elif not config.tie_embeddings:
        out[_head(config)[0]] = plain("unembed", -1, (v, d))
    layers = "h" if config.family == "gpt2" else "layers"
    for i in range(config.num_layers):
        for name, tensor in table(config, i).items():
            out[f"{prefix}{layers}.{i}.{name}"] = tensor
    return out


def aliases(name: str, config: TransformerConfig) -> tuple[str, ...]:
    """Other names under which checkpoints hold the tensor that `tensors` calls `name`.

    Files saved from the bare trunk lack its prefix; so does GPT-2 itself on the hub.
    """
    prefix, head = _PREFIX[config.family], _head(config)
    if name.startswith(prefix):
        return (name.removeprefix(prefix),)
    return tuple(other for other in head if other != name) if name in head else ()


def is_spare(name: str, config: TransformerConfig) -> bool:
    """Whether a tensor that `tensors` does not list may be there, because it is no parameter.

    Such are buffers of old checkpoints and the copy of a tied embedding.
    """
    is_copy = config.tie_embeddings and not config.num_labels and name in _head(config)
    return is_copy or _BUFFER.search(name) is not None


def _head(config: TransformerConfig) -> tuple[str, ...]:
    return _HEAD.get(config.family, ("lm_head.weight",))


def _llama(config: TransformerConfig, layer: int | None) -> dict[str, HFTensor]:
    """Names in a layer, or outside (layer None), of Llama, Qwen2 and Qwen3."""
    d, f = config.hidden_size, config.mlp_size
    if layer is None:
        return {
            "embed_tokens.weight": plain("embed", -1, (config.vocab_size, d)),
            "norm.weight": plain("final_norm", -1, (d,)),
        }
    e, i = config.head_dim, layer
    q, kv = (config.num_heads, e), (config.num_kv_heads, e)
    out = {
        "input_layernorm.weight": plain("attn_norm", i, (d,)),
        "self_attn.q_proj.weight": linear("q", i, (d,), q),
        "self_attn.k_proj.weight": linear("k", i, (d,), kv),
        "self_attn.v_proj.weight": linear("v", i, (d,), kv),
        "self_attn.o_proj.weight": linear("o", i, q, (d,)),
        "post_attention_layernorm.weight": plain("mlp_norm", i, (d,)),
        "mlp.gate_proj.weight": linear("gate", i, (d,), (f,)),
        "mlp.up_proj.weight": linear("up", i, (d,), (f,)),
        "mlp.down_proj.weight": linear("down", i, (f,), (d,)),
    }
    if config.qkv_bias:
        out["self_attn.q_proj.bias"] = split_vector("q_bias", i, q)
        out["self_attn.k_proj.bias"] = split_vector("k_bias", i, kv)
        out["self_attn.v_proj.bias"] = split_vector("v_bias", i, kv)
    if config.o_bias:
        out["self_attn.o_proj.bias"] = plain("o_bias", i, (d,))
    if config.qk_norm:
        out["self_attn.q_norm.weight"] = plain("q_norm", i, (e,))
        out["self_attn.k_norm.weight"] = plain("k_norm", i, (e,))
    if config.mlp_bias:
        out["mlp.gate_proj.bias"] = plain("gate_bias", i, (f,))
        out["mlp.up_proj.bias"] = plain("up_bias", i, (f,))
        out["mlp.down_proj.bias"] = plain("down_bias", i, (d,))
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
        # Query, key and value lie side by side within each head.
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


_QKV = ("q", "k", "v")
_QKV_BIAS = ("q_bias", "k_bias", "v_bias")
