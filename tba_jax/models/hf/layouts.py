# SPDX-License-Identifier: Apache-2.0
"""Names and layouts of the tensors of Hugging Face checkpoints, with one function per layout.

A function returns the tensors of one layer, or of the parts outside the layers, by their names
below the family's prefix. Invariant: every element of every leaf of `transformer.init_params`
belongs to exactly one tensor.
"""

import dataclasses
import math
from collections.abc import Callable

from tba_jax.models.hf.tensors import (
    HFTensor,
    conv1d,
    each_expert,
    linear,
    linear_parts,
    plain,
    split_vector,
)
from tba_jax.models.transformer import TransformerConfig

_QKV = ("q", "k", "v")
_QKV_BIAS = ("q_bias", "k_bias", "v_bias")

# Norms of the residual stream: `norms` of the architecture -> names in the files and in params.
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


def separate_experts(config: TransformerConfig, i: int) -> dict[str, HFTensor]:
    d, f, num = config.hidden_size, config.mlp_size, config.num_experts
    return {
        "mlp.gate.weight": linear("router", i, (d,), (num,)),
        "mlp.experts.*.gate_proj.weight": each_expert(num, linear("expert_gate", i, (d,), (f,))),
        "mlp.experts.*.up_proj.weight": each_expert(num, linear("expert_up", i, (d,), (f,))),
        "mlp.experts.*.down_proj.weight": each_expert(num, linear("expert_down", i, (f,), (d,))),
    }


def fused_experts(config: TransformerConfig, i: int) -> dict[str, HFTensor]:
    """Return the layout of transformers 5 in memory, with all experts in one tensor."""
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


def shared_expert(
    config: TransformerConfig, i: int, experts: FeedForward = separate_experts
) -> dict[str, HFTensor]:
    """Return the tensors of routed experts and of the shared expert, which every token passes."""
    d, shared = config.hidden_size, dataclasses.replace(config, mlp_size=config.shared_size)
    out = experts(config, i)
    for name, tensor in _dense(shared, i).items():
        out[name.replace("mlp.", "mlp.shared_expert.")] = tensor
    out["mlp.shared_expert_gate.weight"] = HFTensor((1, d), i, ("shared_router",), (1, d), (0, 1))
    return out


def gpt_oss_experts(
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


def llama(
    config: TransformerConfig, layer: int | None, feed_forward: FeedForward = _dense
) -> dict[str, HFTensor]:
    """Return the tensors of a Llama-like layer by name; layer None: those outside the layers."""
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
    if config.layer_kinds[i] == "delta":
        return out | _delta(config, i) | feed_forward(config, i)
    out |= {
        "self_attn.q_proj.weight": linear_parts({"q": q, "q_gate": q}, i, d, groups=q[0])
        if config.attention_gate
        else linear("q", i, (d,), q),
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


def _delta(config: TransformerConfig, i: int) -> dict[str, HFTensor]:
    d, taps = config.hidden_size, config.delta_taps
    keys = (config.delta_key_heads, config.delta_key_dim)
    values = (config.delta_value_heads, config.delta_value_dim)
    sizes = {"q": keys, "k": keys, "v": values}
    widths = tuple(math.prod(size) for size in sizes.values())
    convolution = HFTensor(
        (sum(widths), 1, taps),
        i,
        tuple(f"delta_taps_{name}" for name in sizes),
        (1, sum(widths), taps),
        (0, 1, 2),
        widths=widths,
        shapes=tuple((*size, taps) for size in sizes.values()),
    )
    tensors = {
        "in_proj_qkv.weight": linear_parts({f"delta_{x}": y for x, y in sizes.items()}, i, d),
        "conv1d.weight": convolution,
        "in_proj_z.weight": linear("delta_gate", i, (d,), values),
        "in_proj_b.weight": linear("delta_rate", i, (d,), values[:1]),
        "in_proj_a.weight": linear("delta_decay", i, (d,), values[:1]),
        "dt_bias": plain("delta_decay_bias", i, values[:1]),
        "A_log": plain("delta_log_decay", i, values[:1]),
        "norm.weight": plain("delta_norm", i, values[1:]),
        "out_proj.weight": linear("delta_o", i, values, (d,)),
    }
    return {f"linear_attn.{name}": tensor for name, tensor in tensors.items()}


def gpt_neox(config: TransformerConfig, layer: int | None) -> dict[str, HFTensor]:
    """Return the tensors of a GPT-NeoX layer by name; layer None: those outside the layers."""
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


def gpt2(config: TransformerConfig, layer: int | None) -> dict[str, HFTensor]:
    """Return the tensors of a GPT-2 layer by name; layer None: those outside the layers."""
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
