# SPDX-License-Identifier: Apache-2.0
"""Architecture of a decoder-only transformer: sizes, traits, and the pattern of its layers."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jaxtyping import Array, Float

from tba_jax.models import rope

LayerKind = Literal["full", "window", "delta"]
"""Kind of a layer: its queries see all earlier positions, the nearest positions, or a state that
summarises all earlier positions (`delta`)."""

Activation = Literal["silu", "gelu", "gelu_tanh", "clamped_swiglu"]
ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
# Constants of gpt-oss: bound of gate and up, and slope of the sigmoid.
_CLAMP, _SLOPE = 7.0, 1.702


def gated(name: Activation, gate: Float[Array, "*b f"], up: Float[Array, "*b f"]) -> Array:
    """Return the inner activations [*b f] of a gated MLP."""
    if name == "clamped_swiglu":
        gate = jnp.minimum(gate, _CLAMP)
        return gate * jax.nn.sigmoid(_SLOPE * gate) * (jnp.clip(up, -_CLAMP, _CLAMP) + 1)
    return ACTIVATIONS[name](gate) * up


class Adapters(NamedTuple):
    """Low-rank adapters on matrices of every layer: x W becomes x W + alpha / rank (x A) B.

    Attributes:
        rank: r, number of columns of A and of rows of B.
        alpha: scale of an adapter, independent of its rank.
        modules: names of the adapted matrices; their A and B are the leaves `lora_names(name)`.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor of the adapter term (x A) B: alpha / rank."""
        return self.alpha / self.rank


def lora_names(name: str) -> tuple[str, str]:
    """Return the names of the leaves A [*inputs r], B [r *outputs] of matrix [*inputs *outputs]."""
    return f"{name}_lora_a", f"{name}_lora_b"


def num_input_axes(name: str) -> int:
    """Return the number of leading axes of a layer's matrix that are its input."""
    return 2 if name in ("o", "delta_o") else 1


def has_leaf(kind: LayerKind, name: str) -> bool:
    """Return whether layers of this kind can have the leaf `name`."""
    if name.startswith("delta_"):
        return kind == "delta"
    return kind != "delta" or name.partition("_")[0] not in ("q", "k", "v", "o", "sinks")


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Architecture of the model; hashable, so it can be a static argument.

    Attributes:
        vocab_size: v, number of rows of the embedding.
        hidden_size: d, width of the residual stream.
        num_layers: l, number of layers.
        num_heads: h, number of query heads.
        num_kv_heads: g, number of key/value heads; divides num_heads.
        head_dim: e, size of a head.
        mlp_size: inner width of the MLP.
        family: name of the record in `hf.families`, for config.json and tensor names.
        norm: RMSNorm, or LayerNorm with biases.
        norm_eps: number that norms add to the mean square or the variance.
        parallel_residual: attention and MLP read the same residual stream (GPT-NeoX) instead of
            one after the other.
        positions: rotary positions of queries and keys, or a learned table added to the embedding.
        rotary_fraction: share of a head's dimensions that is rotated: the first ones.
        rope_theta: base of the rotary frequencies.
        rope_scaling: method of context extension; None: no extension.
        qkv_bias: whether query, key and value projections have a bias.
        o_bias: whether the output projection of attention has a bias.
        mlp_bias: whether the matrices of the MLP, or of experts and router, have a bias.
        qk_norm: whether queries and keys pass an RMSNorm per head before rotation (Qwen3).
        qk_norm_is_whole: whether the norm of queries and keys spans all heads (OLMo).
        activation: activation of the MLP. `gelu` is exact, and `gelu_tanh` its usual approximation.
            `clamped_swiglu` is (up + 1) gate sigmoid(1.702 gate), with up and gate clamped at 7
            (gpt-oss).
        gated_mlp: whether the MLP computes activation(gate) * up instead of activation(up).
        tie_embeddings: whether the embedding is also the output matrix.
        max_positions: maximum length of a sequence in tokens; number of rows of a learned table.
        num_labels: number of outputs of a classifier or reward model; 0: a language model.
        adapters: adapters of a policy in training, or None.
        pattern: kinds of the first layers; the pattern repeats over all layers.
        window: number of positions that a query of a window layer sees, including its own.
        window_rope_theta: base of the rotary frequencies of window layers, which then have no
            `rope_scaling`; None: window layers rotate as full layers do.
        norms: whether the residual stream has norms before attention and MLP, after them, both, or
            after their sum with the stream (encoders).
        norm_offset: whether RMSNorms multiply by 1 + weight (Gemma).
        scaled_embeddings: whether embeddings are multiplied by sqrt(d) (Gemma).
        score_divisor: number whose square root divides attention scores; None: head_dim.
        attention_cap: c of c tanh(score / c), applied before the mask (Gemma 2); None: no cap.
        logits_cap: c of c tanh(logit / c) for logits over tokens; None: no cap.
        num_tokens: number of the vocabulary's first rows that are tokens of the tokenizer; the rows
            behind them have probability 0. 0: every row is a token.
        sinks: whether a logit per query head takes a share of attention, with value 0 (gpt-oss).
        attention_gate: whether the sigmoid of a projection multiplies the output of attention.
        delta_key_heads, delta_value_heads: numbers of heads of delta layers; each key head serves
            the same number of value heads.
        delta_key_dim, delta_value_dim: sizes of these heads.
        delta_taps: number of tokens that the convolution of delta layers spans.
        num_experts: E; an MLP is the weighted sum of a token's best experts. 0: a dense MLP.
        experts_per_token: number of experts that compute each token.
        normalised_experts: whether the weights of the chosen experts sum to 1.
        shared_size: inner width of a dense MLP that every token passes in addition to its experts;
            the sigmoid of a projection multiplies the output. 0: no such MLP.
        attention: implementation of attention: auto, chosen by platform and dtype; xla,
            without kernels.
    """

    vocab_size: int
    hidden_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    mlp_size: int
    family: str = "llama"
    norm: Literal["rms", "layer"] = "rms"
    norm_eps: float = 1e-5
    parallel_residual: bool = False
    positions: Literal["rotary", "learned"] = "rotary"
    rotary_fraction: float = 1.0
    rope_theta: float = 10000.0
    rope_scaling: rope.Scaling | None = None
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    qk_norm_is_whole: bool = False
    activation: Activation = "silu"
    gated_mlp: bool = True
    tie_embeddings: bool = True
    max_positions: int = 2048
    num_labels: int = 0
    adapters: Adapters | None = None
    pattern: tuple[LayerKind, ...] = ("full",)
    window: int = 0
    window_rope_theta: float | None = None
    norms: Literal["pre", "post", "both", "sum"] = "pre"
    norm_offset: bool = False
    scaled_embeddings: bool = False
    score_divisor: float | None = None
    attention_cap: float | None = None
    logits_cap: float | None = None
    num_tokens: int = 0
    sinks: bool = False
    attention_gate: bool = False
    delta_key_heads: int = 0
    delta_value_heads: int = 0
    delta_key_dim: int = 0
    delta_value_dim: int = 0
    delta_taps: int = 0
    num_experts: int = 0
    experts_per_token: int = 0
    normalised_experts: bool = False
    shared_size: int = 0
    attention: Literal["auto", "xla"] = "auto"

    def __post_init__(self) -> None:
        need, is_rotary = self._need, self.positions == "rotary"
        has_window, num, chosen = "window" in self.pattern, self.num_experts, self.experts_per_token
        multiple = "the first must be a multiple of the second"
        need(self.num_heads % self.num_kv_heads == 0, multiple, "num_heads", "num_kv_heads")
        need(0 <= self.rotary_fraction <= 1, "must be a number from 0 to 1", "rotary_fraction")
        is_odd = is_rotary and self.rotary_dim % 2 and self.rotary_dim == self.head_dim
        need(not is_odd, "must be even for rotary positions", "head_dim")
        rule = "window layers need a window of 1 to max_positions, other patterns 0"
        is_in_range = 0 < self.window <= self.max_positions
        need(has_window == is_in_range, rule, "window", "pattern", "max_positions")
        rule = "must be 1 to num_experts, or 0 without experts"
        need(min(num, 1) <= chosen <= num, rule, "experts_per_token", "num_experts")
        if "delta" in self.pattern:
            heads = ("delta_value_heads", "delta_key_heads")
            need(self.delta_value_heads % self.delta_key_heads == 0, multiple, *heads)
            has_attention = {*self.layer_kinds} != {"delta"}
            need(has_attention, "a model needs a layer with attention", "pattern", "num_layers")

    def _need(self, is_met: Any, rule: str, *names: str) -> None:
        if not is_met:
            found = ", ".join(f"{name} = {getattr(self, name)}" for name in names)
            raise ValueError(f"{found}: {rule}. Use the config.json of a published model")

    @property
    def output_table(self) -> str:
        """Name of the leaf whose rows are the output vectors of tokens.

        Raises:
            ValueError: the model is a classifier.
        """
        if self.num_labels:
            raise ValueError(
                f"a classifier with {self.num_labels} labels has no logits over tokens. Use "
                "transformer.classify, or load a language model"
            )
        return "embed" if self.tie_embeddings else "unembed"

    @property
    def float32_leaves(self) -> tuple[str, ...]:
        """Names of the leaves that are always float32.

        The decay of DeltaNet multiplies over all tokens, and is the exponential of a sum.
        """
        return ("delta_decay_bias", "delta_log_decay") * ("delta" in self.pattern)

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return int(self.head_dim * self.rotary_fraction)

    @property
    def layer_kinds(self) -> tuple[LayerKind, ...]:
        """Kind of every layer."""
        period = len(self.pattern)
        return tuple(self.pattern[i % period] for i in range(self.num_layers))

    def row(self, name: str, layer: int) -> int:
        """Return a layer's row in a stacked leaf, which has rows only for layers with the leaf."""
        return sum(has_leaf(kind, name) for kind in self.layer_kinds[:layer])
