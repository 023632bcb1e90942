# SPDX-License-Identifier: Apache-2.0
"""Bidirectional encoders: the RoBERTa sequence classifier, and BERT sentence embeddings.

The encoders have learned positions, layer norm after each half of a layer, and exact GELU.
Parameters are plain nested dicts of arrays, with layers stacked on the first axis. A setting of
config.json that is not implemented is refused by name. Invariant: the result of a row depends on
its valid tokens alone, not on position, amount or contents of the padding.
"""

import dataclasses
import math
import os
from collections.abc import Mapping
from typing import Any, cast

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.models import attention
from tba_jax.models.block import norm
from tba_jax.models.hf import config_json, folders, hf_weights, layouts
from tba_jax.models.hf.tensors import bind

Params = Mapping[str, Any]

# Unused tensors: buffers of old checkpoints, and the pooler of the pretraining task.
_SPARE = (
    "embeddings.position_ids",
    "embeddings.token_type_ids",
    "pooler.dense.weight",
    "pooler.dense.bias",
)
_ARCHITECTURES = {"roberta": "RobertaForSequenceClassification", "bert": "BertModel"}
_SIZES = {
    "vocab_size": "vocab_size",
    "hidden_size": "hidden_size",
    "num_layers": "num_hidden_layers",
    "num_heads": "num_attention_heads",
    "mlp_size": "intermediate_size",
    "num_positions": "max_position_embeddings",
    "num_token_types": "type_vocab_size",
}
# Setting -> the only supported value; None: the setting must be missing, null, false or empty.
_COVERED = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    **dict.fromkeys(("is_decoder", "add_cross_attention", "pruned_heads", "quantization_config")),
}
# Defaults of transformers, for fields that old config.json files omit.
_DEFAULTS = {
    "hidden_act": "gelu",
    "position_embedding_type": "absolute",
    "max_position_embeddings": 512,
    "type_vocab_size": 2,
    "layer_norm_eps": 1e-12,
    "pad_token_id": 1,
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
    family = hf_config.get("model_type")
    if family not in _ARCHITECTURES:
        raise _unsupported("model_type", family, " or ".join(_ARCHITECTURES))
    values = {**_DEFAULTS, **{k: v for k, v in hf_config.items() if v is not None}}
    missing = [name for name in _SIZES.values() if name not in values]
    if missing:
        raise ValueError(
            f"config.json of a {family} model lacks {', '.join(missing)}. Add them, as in the "
            "published config.json of the model"
        )
    architecture = _ARCHITECTURES[family]
    if architecture not in values.get("architectures", [architecture]):
        raise _unsupported("architectures", values["architectures"], architecture)
    for name, wanted in _COVERED.items():
        if (values.get(name) or None) != wanted:
            raise _unsupported(name, values[name], wanted or "none")
    names = values.get("id2label") or {i: f"LABEL_{i}" for i in range(values.get("num_labels", 2))}
    is_roberta = family == "roberta"
    return EncoderConfig(
        **{our: config_json.check(their, values[their], int) for our, their in _SIZES.items()},
        norm_eps=values["layer_norm_eps"],
        pad_id=values["pad_token_id"] if is_roberta else None,
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
        ValueError: no such model, an unsupported setting, pickled weights, a damaged file, or
            missing, unexpected or misshaped tensors (all named in one message).
    """
    folder = folders.resolve(path_or_hub_id)
    config = encoder_config(folders.load_config(folder))
    abstract, prefix = abstract_params(config, param_dtype), "roberta." if config.labels else ""
    table = {prefix + name: rule for name, rule in layouts.ENCODER.items()} | layouts.ENCODER_HEAD
    params = hf_weights.read(
        hf_weights.open_folder(folder),
        bind(table, abstract, ("full",) * config.num_layers),
        abstract,
        family="roberta" if config.labels else "bert",
        is_spare=lambda name: name.endswith(_SPARE),
    )
    return config, params


def abstract_params(config: EncoderConfig, param_dtype: Any = jnp.float32) -> Params:
    """Return the tree of `load` as ShapeDtypeStructs."""
    d, f, n = config.hidden_size, config.mlp_size, len(config.labels)
    heads = (config.num_heads, d // config.num_heads)
    layers = {
        **{name: (d, *heads) for name in "qkv"},
        **{f"{name}_bias": heads for name in "qkv"},
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
    return jax.tree.map(
        lambda shape: jax.ShapeDtypeStruct(shape, param_dtype),
        shapes,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def classify(
    params: Params,
    tokens: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    *,
    config: EncoderConfig,
    compute_dtype: Any,
) -> Float32[Array, "b n"]:
    """Return logits of the classes (`config.labels`), from the first valid token, `<s>`.

    Rows may be padded on either side. transformers reads the first position instead, which is
    padding if a row is left-padded.

    Args:
        params: return value of `load`.
        tokens: token ids, special tokens included (`Tokenizer.encode_complete`).
        mask: which tokens are valid.
        compute_dtype: as in `encode`.
    """
    if not config.labels:
        raise ValueError(
            "this encoder has no classification head; load a RobertaForSequenceClassification "
            "checkpoint, or use embed_sentences"
        )
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

    This is the pooling of all-MiniLM-L6-v2. The dot product of two rows is their cosine similarity.

    Args:
        params: return value of `load`.
        tokens: token ids, special tokens included (`Tokenizer.encode_complete`).
        mask: which tokens are valid; a row without any gives zeros.
        compute_dtype: as in `encode`.
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
        tokens: token ids.
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

    def layer(x: Array, p: Params) -> tuple[Array, None]:
        q, k, v = (_linear(p, name, x) for name in "qkv")
        out = attention.attend(q[..., None, :], k, v, bias)[..., 0, :]
        x = _layer_norm(p, "attn_norm", x + _linear(p, "o", out, num_in=2), config)
        y = jax.nn.gelu(_linear(p, "up", x), approximate=False)
        return _layer_norm(p, "mlp_norm", x + _linear(p, "down", y), config), None

    x = (
        params["embed"].at[tokens].get(mode="fill", fill_value=jnp.nan, wrap_negative_indices=False)
        + params["positions"][_positions(tokens, mask, config)]
        + jnp.broadcast_to(params["token_types"][0], (*tokens.shape, config.hidden_size))
    )
    x = _layer_norm(params, "embed_norm", x.astype(compute_dtype), config)
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


def _layer_norm(
    p: Params, name: str, x: Float[Array, "b s d"], config: EncoderConfig
) -> Float[Array, "b s d"]:
    return norm(x, p[name], p[name + "_bias"], cast("Any", config))


def _unsupported(setting: str, got: Any, wanted: str) -> ValueError:
    return ValueError(
        f"config.json has {setting} = {got!r}, which the encoder does not implement (it covers: "
        f"{wanted}). Choose a RobertaForSequenceClassification or BertModel checkpoint without it"
    )
