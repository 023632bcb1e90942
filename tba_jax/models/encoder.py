# SPDX-License-Identifier: Apache-2.0
"""Bidirectional encoders: the RoBERTa sequence classifier, and BERT sentence embeddings.

The encoders have learned positions, layer norm after each half of a layer, and exact GELU.
Parameters are plain nested dicts of arrays, with layers stacked on the first axis. A setting of
config.json that is not implemented is refused by name. Invariant: the result of a row depends on
its valid tokens alone, not on position, amount or contents of the padding.
"""

import dataclasses
import functools
import math
import os
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.models import attention
from tba_jax.models.block import norm
from tba_jax.models.hf import config_json, folders, hf_weights
from tba_jax.models.hf.tensors import Rule, bind, linear, within

Params = Mapping[str, Any]

# Ends of unused tensors: buffers of old checkpoints, and the pooler of the pretraining task.
_SPARE = ("position_ids", "token_type_ids", "pooler.dense.weight", "pooler.dense.bias")
_ARCHITECTURES = {"roberta": "RobertaForSequenceClassification", "bert": "BertModel"}
# Axes of tensors and leaves as in `families`.
_HEADS = ("(h e) d -> d h e", "(h e) -> h e")
_LAYER = {
    **linear("attention.self.query", "q", *_HEADS),
    **linear("attention.self.key", "k", *_HEADS),
    **linear("attention.self.value", "v", *_HEADS),
    **linear("attention.output.dense", "o", "d (h e) -> h e d"),
    **linear("attention.output.LayerNorm", "attn_norm"),
    **linear("intermediate.dense", "up", "f d -> d f"),
    **linear("output.dense", "down", "d f -> f d"),
    **linear("output.LayerNorm", "mlp_norm"),
}
_TRUNK = {
    "embeddings.word_embeddings.weight": Rule("embed"),
    "embeddings.position_embeddings.weight": Rule("positions"),
    "embeddings.token_type_embeddings.weight": Rule("token_types"),
    **linear("embeddings.LayerNorm", "embed_norm"),
    **within("encoder.layer.#.", _LAYER),
}
_HEAD = {
    **linear("classifier.dense", "head", "o d -> d o"),
    **linear("classifier.out_proj", "logits", "o d -> d o"),
}


@dataclasses.dataclass(frozen=True)
class EncoderConfig:
    """Architecture of an encoder; hashable, so it can be a static argument.

    Attributes:
        vocab_size: v, number of rows of the embedding.
        hidden_size: d, width of the residual stream.
        num_layers: l, number of layers.
        num_heads: h, number of heads; divides hidden_size.
        mlp_size: inner width of the MLP.
        num_positions: number of rows of the position table.
        num_token_types: number of rows of the token type table; every token has type 0.
        norm_eps: number that a layer norm adds to the variance.
        pad_id: RoBERTa's padding token, which has position `pad_id`; other tokens count from
            pad_id + 1. None: all tokens count from 0 (BERT).
        labels: names of the classes, one per logit; empty: no classification head.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    mlp_size: int
    num_positions: int
    num_token_types: int
    norm_eps: float
    pad_id: int | None
    labels: tuple[str, ...]

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a row, special tokens included."""
        return self.num_positions - (0 if self.pad_id is None else self.pad_id + 1)


def encoder_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
    """Return the architecture for the contents of a Hugging Face config.json.

    Raises:
        ValueError: an unsupported setting; names its value and the supported values.
    """
    s = config_json.Settings(hf_config)
    if s.family not in _ARCHITECTURES:
        raise config_json.unsupported("model_type", s.family, " or ".join(_ARCHITECTURES))
    is_roberta, wanted = s.family == "roberta", _ARCHITECTURES[s.family]
    if wanted not in (found := s.get("architectures", [wanted])):
        raise config_json.unsupported("architectures", found, wanted)
    s.only(hidden_act="gelu", position_embedding_type="absolute", is_decoder=False)
    s.only(add_cross_attention=False, pruned_heads={}, quantization_config={})
    names = s.get("id2label") or {i: f"LABEL_{i}" for i in range(s.get("num_labels", 2))}
    return EncoderConfig(
        vocab_size=s("vocab_size", int),
        hidden_size=s("hidden_size", int),
        num_layers=s("num_hidden_layers", int),
        num_heads=s("num_attention_heads", int),
        mlp_size=s("intermediate_size", int),
        num_positions=s("max_position_embeddings", int),
        num_token_types=s("type_vocab_size", int),
        norm_eps=s("layer_norm_eps", float),
        pad_id=s.get("pad_token_id", 1) if is_roberta else None,
        labels=tuple(names[i] for i in sorted(names, key=int)) if is_roberta else (),
    )


def load(
    path_or_hub_id: str | os.PathLike[str], *, param_dtype: Any = jnp.float32
) -> tuple[EncoderConfig, Params]:
    """Return (architecture, parameters) of a Hugging Face encoder, on the default device.

    Args:
        path_or_hub_id: a folder with config.json and safetensors, or a hub ID.
        param_dtype: storage dtype; the checkpoint is converted.

    Raises:
        ValueError: no such model, an unsupported setting, or as `hf_weights.read`.
    """
    folder = folders.resolve(path_or_hub_id)
    config = encoder_config(folders.load_config(folder))
    abstract, prefix = abstract_params(config, param_dtype), "roberta." if config.labels else ""
    tensors = bind({**within(prefix, _TRUNK), **_HEAD}, abstract, ("full",) * config.num_layers)
    stored = hf_weights.open_folder(folder)
    stored = {name: x for name, x in stored.items() if not name.endswith(_SPARE)}
    return config, hf_weights.read(stored, tensors, abstract, folder)


def abstract_params(config: EncoderConfig, param_dtype: Any = jnp.float32) -> Params:
    """Return the tree of `load` as ShapeDtypeStructs."""
    d, f, n = config.hidden_size, config.mlp_size, len(config.labels)
    heads = (config.num_heads, d // config.num_heads)
    layers = {
        **dict.fromkeys("qkv", (d, *heads)),
        **dict.fromkeys(("q_bias", "k_bias", "v_bias"), heads),
        **{"o": (*heads, d), "o_bias": (d,), "attn_norm": (d,), "attn_norm_bias": (d,)},
        **{"up": (d, f), "up_bias": (f,), "down": (f, d), "down_bias": (d,)},
        **{"mlp_norm": (d,), "mlp_norm_bias": (d,)},
    }
    shapes: dict[str, Any] = {
        "embed": (config.vocab_size, d),
        "positions": (config.num_positions, d),
        "token_types": (config.num_token_types, d),
        "embed_norm": (d,),
        "embed_norm_bias": (d,),
        "layers": {name: (config.num_layers, *shape) for name, shape in layers.items()},
    }
    if n:
        shapes |= {"head": (d, d), "head_bias": (d,), "logits": (d, n), "logits_bias": (n,)}
    spec = functools.partial(jax.ShapeDtypeStruct, dtype=param_dtype)
    return jax.tree.map(spec, shapes, is_leaf=lambda x: isinstance(x, tuple))


def classify(
    params: Params,
    tokens: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    *,
    config: EncoderConfig,
    compute_dtype: Any,
) -> Float32[Array, "b n"]:
    """Return logits of the classes (`config.labels`), from the first valid token, `<s>`.

    Arguments as in `encode`. Rows may be padded on either side; transformers reads the first
    position instead, which is padding if a row is left-padded.
    """
    hidden = encode(params, tokens, mask, config=config, compute_dtype=compute_dtype)
    first = jnp.argmax(mask, axis=1)  # 0 for a row without valid tokens
    x = jnp.take_along_axis(hidden, first[:, None, None], axis=1)[:, 0]
    x = jnp.tanh(_linear(params, "head", x)).astype(jnp.float32)
    # Use float32, because nearly equal scores decide rewards, and this product is small.
    return _linear(params, "logits", x)


def embed_sentences(
    params: Params,
    tokens: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    *,
    config: EncoderConfig,
    compute_dtype: Any,
) -> Float32[Array, "b d"]:
    """Return the mean hidden state of each row's valid tokens, scaled to length 1.

    Arguments as in `encode`; a row without valid tokens gives zeros. This is the pooling of
    all-MiniLM-L6-v2. The dot product of two rows is their cosine similarity.
    """
    hidden = encode(params, tokens, mask, config=config, compute_dtype=compute_dtype)
    mean = jnp.mean(hidden.astype(jnp.float32), axis=1, where=mask[..., None])
    mean = jnp.where(mask.any(axis=1, keepdims=True), mean, 0.0)
    # The lower bound prevents 0 / 0 for a row of zeros.
    return mean / jnp.maximum(jnp.linalg.norm(mean, axis=1, keepdims=True), 1e-12)


def encode(
    params: Params,
    tokens: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    *,
    config: EncoderConfig,
    compute_dtype: Any,
) -> Float[Array, "b s d"]:
    """Return hidden states after the last layer; every token attends to all valid ones of its row.

    The output at a padded position has no meaning. A token id outside the vocabulary makes its row
    nan, because the embedding of another token would give a plausible but wrong result.

    Args:
        params: return value of `load`.
        tokens: token ids, special tokens included (`Tokenizer.encode_complete`).
        mask: which tokens are valid.
        compute_dtype: dtype of matmul inputs and of the residual stream; norms and softmax are
            float32.

    Raises:
        ValueError: rows longer than `config.max_tokens`.
    """
    if tokens.shape[1] > config.max_tokens:
        raise ValueError(
            f"rows of {tokens.shape[1]} tokens, but this encoder has positions for "
            f"{config.max_tokens}; cut the texts (Tokenizer.encode_complete does, given max_tokens)"
        )
    tokens = jnp.where(mask, tokens, 0)
    bias = jnp.broadcast_to(
        jnp.where(mask, 0.0, attention.MASKED)[:, None, :], (*mask.shape, mask.shape[1])
    )

    def layer_norm(p: Params, name: str, x: Array) -> Array:
        return norm(x, p[name], p[name + "_bias"], cast("Any", config))

    def layer(x: Array, p: Params) -> tuple[Array, None]:
        q, k, v = (_linear(p, name, x) for name in "qkv")
        out = attention.attend(q[..., None, :], k, v, bias)[..., 0, :]
        x = layer_norm(p, "attn_norm", x + _linear(p, "o", out, num_in=2))
        y = jax.nn.gelu(_linear(p, "up", x), approximate=False)
        return layer_norm(p, "mlp_norm", x + _linear(p, "down", y)), None

    x = (
        params["embed"].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        + params["positions"][_positions(tokens, mask, config)]
        + jnp.broadcast_to(params["token_types"][0], (*tokens.shape, config.hidden_size))
    )
    x = layer_norm(params, "embed_norm", x.astype(compute_dtype))
    return jax.lax.scan(layer, x, params["layers"])[0]


def _positions(
    tokens: Int[Array, "b s"], mask: Bool[Array, "b s"], config: EncoderConfig
) -> Int[Array, "b s"]:
    """Return the row of the position table for each token."""
    if config.pad_id is None:
        return jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    # A padding token inside a text has no position number, as in training of the model.
    counted = mask & (tokens != config.pad_id)
    return config.pad_id + jnp.where(counted, jnp.cumsum(counted, axis=1), 0)


def _linear(p: Params, name: str, x: Array, num_in: int = 1) -> Array:
    """Return x [..., *in] times kernel [*in, *out] plus bias [*out], in the dtype of x."""
    kernel, bias = p[name].astype(x.dtype), p[name + "_bias"].astype(x.dtype)
    size = math.prod(kernel.shape[:num_in])
    out = x.reshape(-1, size) @ kernel.reshape(size, -1)
    out = out.reshape(*x.shape[: x.ndim - num_in], *kernel.shape[num_in:])
    return out + jnp.broadcast_to(bias, out.shape)
