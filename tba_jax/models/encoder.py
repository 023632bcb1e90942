# SPDX-License-Identifier: Apache-2.0
"""Bidirectional encoders: the RoBERTa sequence classifier, and BERT sentence embeddings.

The encoders have learned positions, layer norm after each half of a layer, and exact GELU.
Parameters are plain nested dicts of arrays, with layers stacked on the first axis. A setting of
config.json that is not implemented is refused by name. Invariant: the result of a row depends on
its valid tokens alone, not on position, amount or contents of the padding.
"""

import os
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.models import attention, transformer
from tba_jax.models.block import norm
from tba_jax.models.hf import config_json, families, folders, hf_weights
from tba_jax.models.hf.tensors import Rule, bind, linear, within
from tba_jax.models.transformer import Params, TransformerConfig

# Ends of unused tensors: buffers of old checkpoints, and the pooler of the pretraining task.
_SPARE = ("position_ids", "token_type_ids", "pooler.dense.weight", "pooler.dense.bias")
_ARCHITECTURES = {"roberta": "RobertaForSequenceClassification", "bert": "BertModel"}
_TRAITS: Mapping[str, Any] = {
    **{"norm": "layer", "norms": "sum", "positions": "learned", "gated_mlp": False},
    **dict.fromkeys(("qkv_bias", "o_bias", "mlp_bias"), True),
}
# Axes of tensors and leaves as in `families`.
_HEADS = ("(h e) d -> d h e", "(h e) -> h e")
_LAYER = {
    **linear("attention.self.query", "q", *_HEADS),
    **linear("attention.self.key", "k", *_HEADS),
    **linear("attention.self.value", "v", *_HEADS),
    **linear("attention.output.dense", "o", "d (h e) -> h e d"),
    **linear("attention.output.LayerNorm", "attn_sum_norm"),
    **linear("intermediate.dense", "up", "f d -> d f"),
    **linear("output.dense", "down", "d f -> f d"),
    **linear("output.LayerNorm", "mlp_sum_norm"),
}
_TRUNK = {
    "embeddings.word_embeddings.weight": Rule("embed"),
    "embeddings.position_embeddings.weight": Rule("position_embed"),
    "embeddings.token_type_embeddings.weight": Rule("token_types"),
    **linear("embeddings.LayerNorm", "embed_norm"),
    **within("encoder.layer.#.", _LAYER),
}
_HEAD = {
    **linear("classifier.dense", "head", "o d -> d o"),
    **linear("classifier.out_proj", "logits", "o d -> d o"),
}


@dataclass(frozen=True)
class EncoderConfig(TransformerConfig):
    """Architecture of an encoder.

    Attributes:
        num_token_types: number of rows of the token type table; every token has type 0.
        pad_id: RoBERTa's padding token, which has position `pad_id`; other tokens count from
            pad_id + 1. None: all tokens count from 0 (BERT).
        labels: names of the classes, one per logit; empty: no classification head.
    """

    num_token_types: int = 1
    pad_id: int | None = None
    labels: tuple[str, ...] = ()

    @property
    def max_tokens(self) -> int:
        """Maximum number of tokens of a row, special tokens included."""
        return self.max_positions - (0 if self.pad_id is None else self.pad_id + 1)


def encoder_config(hf_config: Mapping[str, Any]) -> EncoderConfig:
    """Return the architecture for the contents of a Hugging Face config.json.

    Raises:
        ValueError: an unsupported setting; names its value and the supported values.
    """
    s = families.settings(hf_config, {"hidden_act": "gelu"})
    if s.family not in _ARCHITECTURES:
        raise config_json.unsupported("model_type", s.family, " or ".join(_ARCHITECTURES))
    is_roberta, wanted = s.family == "roberta", _ARCHITECTURES[s.family]
    if wanted not in (found := s.get("architectures", [wanted])):
        raise config_json.unsupported("architectures", found, wanted)
    s.only(hidden_act="gelu", position_embedding_type="absolute", is_decoder=False)
    s.only(add_cross_attention=False, pruned_heads={}, quantization_config={})
    names = s.get("id2label") or {i: f"LABEL_{i}" for i in range(s.get("num_labels", 2))}
    return EncoderConfig(
        **families.sizes(s),
        **_TRAITS,
        num_token_types=s("type_vocab_size", int),
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
    tensors = bind({**within(prefix, _TRUNK), **_HEAD}, abstract, config)
    stored = hf_weights.open_folder(folder)
    stored = {name: x for name, x in stored.items() if not name.endswith(_SPARE)}
    return config, hf_weights.read(stored, tensors, abstract, folder)


def abstract_params(config: EncoderConfig, param_dtype: Any = jnp.float32) -> Params:
    """Return the tree of `load` as ShapeDtypeStructs."""
    d, n = config.hidden_size, len(config.labels)
    shapes = {"token_types": (config.num_token_types, d)}
    shapes |= {"embed_norm": (d,), "embed_norm_bias": (d,)}
    if n:
        shapes |= {"head": (d, d), "head_bias": (d,), "logits": (d, n), "logits_bias": (n,)}
    found = transformer.abstract_params(config, param_dtype)
    own = {name: jax.ShapeDtypeStruct(shape, param_dtype) for name, shape in shapes.items()}
    return own | {name: found[name] for name in ("embed", "position_embed", "layers")}


def classify(
    params: Params,
    tokens: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    **options: Any,
) -> Float32[Array, "b n"]:
    """Return logits of the classes (`config.labels`), from the first valid token, `<s>`.

    Arguments as in `encode`. Rows may be padded on either side; transformers reads the first
    position instead, which is padding if a row is left-padded.
    """
    hidden = encode(params, tokens, mask, **options)
    first = jnp.argmax(mask, axis=1)  # 0 for a row without valid tokens
    x = jnp.take_along_axis(hidden, first[:, None, None], axis=1)[:, 0]
    x = jnp.tanh(_linear(params, "head", x)).astype(jnp.float32)
    # Use float32, because nearly equal scores decide rewards, and this product is small.
    return _linear(params, "logits", x)


def embed_sentences(
    params: Params,
    tokens: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    **options: Any,
) -> Float32[Array, "b d"]:
    """Return the mean hidden state of each row's valid tokens, scaled to length 1.

    Arguments as in `encode`; a row without valid tokens gives zeros. This is the pooling of
    all-MiniLM-L6-v2. The dot product of two rows is their cosine similarity.
    """
    hidden = encode(params, tokens, mask, **options)
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

    The output at a padded position has no meaning. The rows have at most `config.max_tokens`.

    Args:
        params: return value of `load`.
        tokens: token ids, special tokens included (`Tokenizer.encode_complete`).
        mask: which tokens are valid.
        compute_dtype: dtype of matmul inputs and of the residual stream; norms and softmax are
            float32.
    """
    tokens = jnp.where(mask, tokens, 0)
    positions, how = _positions(tokens, mask, config), {"config": config}
    x = transformer.embed(params, tokens, positions, compute_dtype=compute_dtype, **how)
    x = x + jnp.broadcast_to(params["token_types"][0].astype(compute_dtype), x.shape)
    x = norm(x, params["embed_norm"], params["embed_norm_bias"], config)
    seen = jnp.broadcast_to(mask[:, None], (*mask.shape, mask.shape[1]))

    def attend(q: Array, k: Array, v: Array, scores: attention.Scores) -> tuple[Array, None]:
        return attention.attend(q, k, v, seen, scores), None

    def layer(x: Array, params: Params) -> tuple[Array, None]:
        return transformer.run_layer("full", params, x, None, attend, config=config)

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


def _linear(p: Params, name: str, x: Float[Array, "b i"]) -> Float[Array, "b o"]:
    """Return x times a matrix plus its bias, in the dtype of x."""
    out = x @ p[name].astype(x.dtype)
    return out + jnp.broadcast_to(p[name + "_bias"].astype(x.dtype), out.shape)
