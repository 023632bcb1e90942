# SPDX-License-Identifier: Apache-2.0
"""Hugging Face tensor names and layouts <-> the leaves of `transformer.init_params`.

It describes; it reads no file and holds no array. The invariants it owns: every element of every
leaf belongs to exactly one tensor, and `join(split(x)) == x` bit for bit.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

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


@dataclass(frozen=True)
class HFTensor:
    """A tensor of a Hugging Face checkpoint and the leaves of ours, or layers of them, it holds.

    Attributes:
        shape: the Hugging Face shape.
        layer: index of the layer it belongs to; -1: none.
        leaves: names in params, or in params["layers"] when it belongs to a layer.
        grid: the same elements with every factor of their axes apart.
        order: permutation of the grid's axes that puts the axis of the leaves first and leaves
            the rest as our leaves have it.
    """

    shape: tuple[int, ...]
    layer: int
    leaves: tuple[str, ...]
    grid: tuple[int, ...]
    order: tuple[int, ...]

    def split(self, theirs: np.ndarray) -> list[np.ndarray]:
        """One array per leaf (or its layer), in the shape of ours: views of `theirs`."""
        return list(theirs.reshape(self.grid).transpose(self.order))

    def join(self, ours: Sequence[np.ndarray]) -> np.ndarray:
        """The Hugging Face tensor of these arrays, given in the order of `leaves`."""
        stacked = ours[0][None] if len(ours) == 1 else np.stack(ours)
        return stacked.transpose(np.argsort(self.order)).reshape(self.shape)


def tensors(config: TransformerConfig) -> dict[str, HFTensor]:
    """Every tensor that a checkpoint of this architecture must have, by its usual name."""
    table = {"gpt_neox": _gpt_neox, "gpt2": _gpt2}.get(config.family, _llama)
    prefix = _PREFIX[config.family]
    out = {prefix + name: tensor for name, tensor in table(config, None).items()}
    d, v = config.hidden_size, config.vocab_size
    if config.num_labels:
        out["score.weight"] = _plain("score", -1, (config.num_labels, d))
    elif not config.tie_embeddings:
        out[_head(config)[0]] = _plain("unembed", -1, (v, d))
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


def _plain(leaf: str, layer: int, shape: tuple[int, ...]) -> HFTensor:
    """A tensor that lies as ours does."""
    grid = (1, *shape)
    return HFTensor(shape, layer, (leaf,), grid, tuple(range(len(grid))))


def _bias(leaf: str, layer: int, axes: tuple[int, ...]) -> HFTensor:
    """A vector whose axis ours splits into `axes`."""
    size = int(np.prod(axes))
    order = tuple(range(len(axes) + 1))
    return HFTensor((size,), layer, (leaf,), (1, *axes), order)


def _linear(leaf: str, layer: int, ins: tuple[int, ...], outs: tuple[int, ...]) -> HFTensor:
    """The weight of a torch Linear, [out, in]; ours is [*ins, *outs]."""
    m, n = len(outs), len(ins)
    return HFTensor(
        shape=(int(np.prod(outs)), int(np.prod(ins))),
        layer=layer,
        leaves=(leaf,),
        grid=(1, *outs, *ins),
        order=(0, *range(m + 1, m + n + 1), *range(1, m + 1)),
    )


def _conv1d(leaf: str, layer: int, ins: tuple[int, ...], outs: tuple[int, ...]) -> HFTensor:
    """The weight of GPT-2's Conv1D, [in, out]: ours with merged axes."""
    grid = (1, *ins, *outs)
    shape = (int(np.prod(ins)), int(np.prod(outs)))
    return HFTensor(shape, layer, (leaf,), grid, tuple(range(len(grid))))


def _llama(config: TransformerConfig, layer: int | None) -> dict[str, HFTensor]:
    """Names in a layer, or outside (layer None), of Llama, Qwen2 and Qwen3."""
    d, f = config.hidden_size, config.mlp_size
    if layer is None:
        return {
            "embed_tokens.weight": _plain("embed", -1, (config.vocab_size, d)),
            "norm.weight": _plain("final_norm", -1, (d,)),
        }
    e, i = config.head_dim, layer
    q, kv = (config.num_heads, e), (config.num_kv_heads, e)
    out = {
        "input_layernorm.weight": _plain("attn_norm", i, (d,)),
        "self_attn.q_proj.weight": _linear("q", i, (d,), q),
        "self_attn.k_proj.weight": _linear("k", i, (d,), kv),
        "self_attn.v_proj.weight": _linear("v", i, (d,), kv),
        "self_attn.o_proj.weight": _linear("o", i, q, (d,)),
        "post_attention_layernorm.weight": _plain("mlp_norm", i, (d,)),
        "mlp.gate_proj.weight": _linear("gate", i, (d,), (f,)),
        "mlp.up_proj.weight": _linear("up", i, (d,), (f,)),
        "mlp.down_proj.weight": _linear("down", i, (f,), (d,)),
    }
    if config.qkv_bias:
        out["self_attn.q_proj.bias"] = _bias("q_bias", i, q)
        out["self_attn.k_proj.bias"] = _bias("k_bias", i, kv)
        out["self_attn.v_proj.bias"] = _bias("v_bias", i, kv)
    if config.o_bias:
        out["self_attn.o_proj.bias"] = _plain("o_bias", i, (d,))
    if config.qk_norm:
        out["self_attn.q_norm.weight"] = _plain("q_norm", i, (e,))
        out["self_attn.k_norm.weight"] = _plain("k_norm", i, (e,))
    if config.mlp_bias:
        out["mlp.gate_proj.bias"] = _plain("gate_bias", i, (f,))
        out["mlp.up_proj.bias"] = _plain("up_bias", i, (f,))
        out["mlp.down_proj.bias"] = _plain("down_bias", i, (d,))
    return out


def _gpt_neox(config: TransformerConfig, layer: int | None) -> dict[str, HFTensor]:
    d, f = config.hidden_size, config.mlp_size
    if layer is None:
        return {
            "embed_in.weight": _plain("embed", -1, (config.vocab_size, d)),
            "final_layer_norm.weight": _plain("final_norm", -1, (d,)),
            "final_layer_norm.bias": _plain("final_norm_bias", -1, (d,)),
        }
    h, e, i = config.num_heads, config.head_dim, layer
    out = {
        "input_layernorm.weight": _plain("attn_norm", i, (d,)),
        "input_layernorm.bias": _plain("attn_norm_bias", i, (d,)),
        # Query, key and value lie side by side within each head.
        "attention.query_key_value.weight": HFTensor(
            (3 * h * e, d), i, _QKV, (h, 3, e, d), (1, 3, 0, 2)
        ),
        "attention.dense.weight": _linear("o", i, (h, e), (d,)),
        "post_attention_layernorm.weight": _plain("mlp_norm", i, (d,)),
        "post_attention_layernorm.bias": _plain("mlp_norm_bias", i, (d,)),
        "mlp.dense_h_to_4h.weight": _linear("up", i, (d,), (f,)),
        "mlp.dense_h_to_4h.bias": _plain("up_bias", i, (f,)),
        "mlp.dense_4h_to_h.weight": _linear("down", i, (f,), (d,)),
        "mlp.dense_4h_to_h.bias": _plain("down_bias", i, (d,)),
    }
    if config.qkv_bias:
        out["attention.query_key_value.bias"] = HFTensor(
            (3 * h * e,), i, _QKV_BIAS, (h, 3, e), (1, 0, 2)
        )
        out["attention.dense.bias"] = _plain("o_bias", i, (d,))
    return out


def _gpt2(config: TransformerConfig, layer: int | None) -> dict[str, HFTensor]:
    d, f = config.hidden_size, config.mlp_size
    if layer is None:
        return {
            "wte.weight": _plain("embed", -1, (config.vocab_size, d)),
            "wpe.weight": _plain("position_embed", -1, (config.max_positions, d)),
            "ln_f.weight": _plain("final_norm", -1, (d,)),
            "ln_f.bias": _plain("final_norm_bias", -1, (d,)),
        }
    h, e, i = config.num_heads, config.head_dim, layer
    return {
        "ln_1.weight": _plain("attn_norm", i, (d,)),
        "ln_1.bias": _plain("attn_norm_bias", i, (d,)),
        # All queries, then all keys, then all values.
        "attn.c_attn.weight": HFTensor((d, 3 * h * e), i, _QKV, (d, 3, h, e), (1, 0, 2, 3)),
        "attn.c_attn.bias": HFTensor((3 * h * e,), i, _QKV_BIAS, (3, h, e), (0, 1, 2)),
        "attn.c_proj.weight": _conv1d("o", i, (h, e), (d,)),
        "attn.c_proj.bias": _plain("o_bias", i, (d,)),
        "ln_2.weight": _plain("mlp_norm", i, (d,)),
        "ln_2.bias": _plain("mlp_norm_bias", i, (d,)),
        "mlp.c_fc.weight": _conv1d("up", i, (d,), (f,)),
        "mlp.c_fc.bias": _plain("up_bias", i, (f,)),
        "mlp.c_proj.weight": _conv1d("down", i, (f,), (d,)),
        "mlp.c_proj.bias": _plain("down_bias", i, (d,)),
    }


_QKV = ("q", "k", "v")
_QKV_BIAS = ("q_bias", "k_bias", "v_bias")
