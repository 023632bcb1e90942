# SPDX-License-Identifier: Apache-2.0
"""One decoder-only transformer: by its config a Llama, Qwen2, Qwen3, GPT-NeoX or GPT-2.

Parameters are plain nested dicts of arrays with the layers stacked on a leading axis; Flax NNX is
used only inside this module. Invariant: there is one layer, `run_layer`; scoring (`apply`) and the
decoder's prefill and steps differ only in what queries see.
"""

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.models import attention, rope
from tba_jax.models.layer_loop import Remat, run_layers

Params = Mapping[str, Any]


class Adapters(NamedTuple):
    """Low-rank adapters on the matrices of every layer: x W becomes x W + alpha / rank (x A) B.

    Attributes:
        rank: r, columns of A and rows of B.
        alpha: scale of an adapter, independent of its rank.
        modules: names of the adapted matrices; their A and B are the leaves `lora_names(name)`.
    """

    rank: int
    alpha: float
    modules: tuple[str, ...]

    @property
    def scale(self) -> float:
        """Factor of A B."""
        return self.alpha / self.rank


def lora_names(name: str) -> tuple[str, str]:
    """Return the names of the leaves A [*inputs r], B [r *outputs] of matrix [*inputs *outputs]."""
    return f"{name}_lora_a", f"{name}_lora_b"


def num_input_axes(name: str) -> int:
    """Return the number of leading axes of a layer's matrix that are its input."""
    return 2 if name == "o" else 1


@dataclasses.dataclass(frozen=True)
class TransformerConfig:
    """Architecture of the model; hashable, so it can be a static argument.

    Attributes:
        vocab_size: v, rows of the embedding.
        hidden_size: d.
        num_layers: l.
        num_heads: h, query heads.
        num_kv_heads: g, key/value heads; divides num_heads.
        head_dim: e.
        mlp_size: inner width of the MLP.
        family: name of the record in `hf.families`, for config.json and tensor names.
        norm: RMSNorm, or LayerNorm with biases.
        norm_eps: added to the mean square or the variance.
        parallel_residual: attention and MLP read the same residual stream (GPT-NeoX) instead of
            one after the other.
        positions: rotated into queries and keys, or a learned table added to the embedding.
        rotary_fraction: share of head_dim that is rotated, from its start.
        rope_theta: base of the rotary frequencies.
        rope_scaling: context extension, or None.
        qkv_bias: query, key and value projections have a bias.
        o_bias: the attention output projection has a bias.
        mlp_bias: the matrices of the MLP have a bias.
        qk_norm: queries and keys pass an RMSNorm per head before they are rotated (Qwen3).
        activation: of the MLP; `gelu` is exact, `gelu_tanh` its usual approximation.
        gated_mlp: activation(gate) * up instead of activation(up).
        tie_embeddings: the embedding is also the output matrix.
        max_positions: maximum sequence length, in tokens; rows of a learned table.
        num_labels: outputs of a sequence classifier or reward model; 0: a language model.
        adapters: adapters of a policy in training, or None.
        attention: implementation: auto, the fastest measured one for the platform; xla, without
            kernels; tpu_kernel, kernels for TPU.
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
    activation: Literal["silu", "gelu", "gelu_tanh"] = "silu"
    gated_mlp: bool = True
    tie_embeddings: bool = True
    max_positions: int = 2048
    num_labels: int = 0
    adapters: Adapters | None = None
    attention: Literal["auto", "xla", "tpu_kernel"] = "auto"

    def __post_init__(self) -> None:
        if self.num_heads % self.num_kv_heads:
            raise ValueError(
                f"num_heads = {self.num_heads} is not a multiple of num_kv_heads = "
                f"{self.num_kv_heads}; every key/value head must serve equally many query heads"
            )
        if not 0 <= self.rotary_fraction <= 1:
            raise ValueError(
                f"rotary_fraction = {self.rotary_fraction} is not a share of head_dim. Set it to a "
                "number from 0 to 1"
            )
        if self.positions == "rotary" and self.rotary_dim % 2 and self.rotary_dim == self.head_dim:
            raise ValueError(f"head_dim = {self.head_dim} is odd; rotary positions need it even")

    @property
    def rotary_dim(self) -> int:
        """Number of rotated dimensions of a head."""
        return int(self.head_dim * self.rotary_fraction)


Rope = rope.Rope | None  # None: learned positions, already in the residual stream
Attend = Callable[[Array, Array, Array], tuple[Array, Any]]


class Block(nnx.Module):
    """One layer; `attend` defines what queries see."""

    def __init__(self, config: TransformerConfig, dtype: Any, rngs: nnx.Rngs):
        d, h, g, e, f = (
            config.hidden_size,
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.mlp_size,
        )

        def kernel(shape: tuple[int, ...], fan_in: int) -> nnx.Param:
            return nnx.Param(
                (jax.random.normal(rngs.params(), shape) / math.sqrt(fan_in)).astype(dtype)
            )

        def zeros(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, dtype))

        def ones(size: int) -> nnx.Param:
            return nnx.Param(jnp.ones((size,), dtype))

        # Matrices that write into the residual stream have smaller initial values, so that its
        # scale does not grow with depth (GPT-2).
        depth = 2 * config.num_layers
        self.config = config
        self.attn_norm = ones(d)
        self.q = kernel((d, h, e), d)
        self.k = kernel((d, g, e), d)
        self.v = kernel((d, g, e), d)
        self.o = kernel((h, e, d), h * e * depth)
        self.mlp_norm = ones(d)
        if config.gated_mlp:
            self.gate = kernel((d, f), d)
        self.up = kernel((d, f), d)
        self.down = kernel((f, d), f * depth)
        if config.norm == "layer":
            self.attn_norm_bias, self.mlp_norm_bias = zeros(d), zeros(d)
        if config.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = zeros(h, e), zeros(g, e), zeros(g, e)
        if config.o_bias:
            self.o_bias = zeros(d)
        if config.qk_norm:
            self.q_norm, self.k_norm = ones(e), ones(e)
        if config.mlp_bias:
            self.up_bias, self.down_bias = zeros(f), zeros(d)
            if config.gated_mlp:
                self.gate_bias = zeros(f)
        if config.adapters is not None:
            for name in config.adapters.modules:
                shape, at = getattr(self, name).shape, num_input_axes(name)
                for leaf, axes in zip(
                    lora_names(name),
                    ((*shape[:at], config.adapters.rank), (config.adapters.rank, *shape[at:])),
                    strict=True,
                ):
                    setattr(self, leaf, zeros(*axes))

    def __call__(
        self, x: Float[Array, "*b d"], angles: Rope, attend: Attend
    ) -> tuple[Float[Array, "*b d"], Any]:
        """Return (x after this layer, second result of `attend`)."""
        out, extra = self._attention(self._norm("attn_norm", x), angles, attend)
        if self.config.parallel_residual:
            return x + out + self._mlp(self._norm("mlp_norm", x)), extra
        x = x + out
        return x + self._mlp(self._norm("mlp_norm", x)), extra

    def _attention(
        self, y: Float[Array, "*b d"], angles: Rope, attend: Attend
    ) -> tuple[Float[Array, "*b d"], Any]:
        config = self.config
        h, g, e = config.num_heads, config.num_kv_heads, config.head_dim
        q = self._linear("q", y, config.qkv_bias, (h, e))
        k = self._linear("k", y, config.qkv_bias, (g, e))
        v = self._linear("v", y, config.qkv_bias, (g, e))
        if config.qk_norm:
            q = _rms_norm(q, self.q_norm[...], config.norm_eps)
            k = _rms_norm(k, self.k_norm[...], config.norm_eps)
        if angles is not None:
            q, k = rope.rotate(q, angles), rope.rotate(k, angles)
        # Group the queries of one key/value head instead of repeating keys and values.
        out, extra = attend(q.reshape(*q.shape[:-2], g, h // g, e), k, v)
        out = out.reshape(*q.shape[:-2], h * e)
        return self._linear("o", out, config.o_bias, y.shape[-1:]), extra

    def _mlp(self, y: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        config, activation = self.config, _ACTIVATIONS[self.config.activation]
        d, f = config.hidden_size, config.mlp_size
        up = self._linear("up", y, config.mlp_bias, (f,))
        if config.gated_mlp:
            y = activation(self._linear("gate", y, config.mlp_bias, (f,))) * up
        else:
            y = activation(up)
        return self._linear("down", y, config.mlp_bias, (d,))

    def _linear(
        self, name: str, x: Float[Array, "*b i"], has_bias: bool, out_shape: tuple[int, ...]
    ) -> Array:
        """Return [*b *out_shape]: x times the matrix of this name, plus its bias, in x's dtype.

        As one two-dimensional product: the weight gradient then contracts one long axis instead of
        several (229 against 262 ms for the gradient of 256 rows x 28 positions of the start model
        on 2 CPU cores). Keys and values, and gate and up, are separate products: fused into one,
        they took two to three times as long in training on CPU, and on TPU an axis of two made XLA
        copy the weights to another layout.
        """
        kernel = getattr(self, name)[...].astype(x.dtype).reshape(x.shape[-1], -1)
        rows = x.reshape(-1, x.shape[-1])
        scale = getattr(self, f"{name}_scale", None)
        if scale is None:
            out = rows @ kernel
        else:  # `quantized`
            out = jnp.matmul(rows, kernel, preferred_element_type=jnp.float32)
            out = (out * jnp.broadcast_to(scale[...], out.shape)).astype(x.dtype)
        adapters = self.config.adapters
        if adapters is not None and name in adapters.modules:
            # Not W + A B first, because its gradient would have the size of W.
            a, b = (getattr(self, leaf)[...].astype(x.dtype) for leaf in lora_names(name))
            narrow = rows @ a.reshape(x.shape[-1], -1)
            out = out + adapters.scale * narrow @ b.reshape(adapters.rank, -1)
        out = out.reshape(*x.shape[:-1], *out_shape)
        if has_bias:
            bias = getattr(self, name + "_bias")[...].astype(x.dtype)
            out = out + jnp.broadcast_to(bias, out.shape)
        return out

    def _norm(self, name: str, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        bias = getattr(self, name + "_bias")[...] if self.config.norm == "layer" else None
        return _norm(x, getattr(self, name)[...], bias, self.config.norm_eps)


class Ends(nnx.Module):
    """Parameters outside the layers: embeddings, final norm, output matrix."""

    def __init__(self, config: TransformerConfig, dtype: Any, rngs: nnx.Rngs):
        d = config.hidden_size

        def table(rows: int) -> nnx.Param:
            values = jax.random.normal(rngs.params(), (rows, d)) / math.sqrt(d)
            return nnx.Param(values.astype(dtype))

        self.embed = table(config.vocab_size)
        self.final_norm = nnx.Param(jnp.ones((d,), dtype))
        if config.norm == "layer":
            self.final_norm_bias = nnx.Param(jnp.zeros((d,), dtype))
        if config.positions == "learned":
            self.position_embed = table(config.max_positions)
        if config.num_labels:
            self.score = table(config.num_labels)
        elif not config.tie_embeddings:
            self.unembed = table(config.vocab_size)


# Logical axes of every parameter (`devices.sharding` maps them to mesh axes).
_AXES = {
    "embed": ("vocab", "embed"),
    "unembed": ("vocab", "embed"),
    "position_embed": (None, "embed"),
    "score": (None, "embed"),
    "final_norm": ("embed",),
    "final_norm_bias": ("embed",),
    "attn_norm": ("layers", "embed"),
    "attn_norm_bias": ("layers", "embed"),
    "q": ("layers", "embed", "heads", "head_dim"),
    "k": ("layers", "embed", "kv_heads", "head_dim"),
    "v": ("layers", "embed", "kv_heads", "head_dim"),
    "q_bias": ("layers", "heads", "head_dim"),
    "k_bias": ("layers", "kv_heads", "head_dim"),
    "v_bias": ("layers", "kv_heads", "head_dim"),
    "o": ("layers", "heads", "head_dim", "embed"),
    "o_bias": ("layers", "embed"),
    "q_norm": ("layers", "head_dim"),
    "k_norm": ("layers", "head_dim"),
    "mlp_norm": ("layers", "embed"),
    "mlp_norm_bias": ("layers", "embed"),
    "gate": ("layers", "embed", "mlp"),
    "gate_bias": ("layers", "mlp"),
    "up": ("layers", "embed", "mlp"),
    "up_bias": ("layers", "mlp"),
    "down": ("layers", "mlp", "embed"),
    "down_bias": ("layers", "embed"),
}


@functools.partial(jax.jit, static_argnames=("config", "param_dtype"))
def init_params(config: TransformerConfig, key: Array, param_dtype: Any = jnp.float32) -> Params:
    """Return random initial parameters: a nested dict, layers stacked on a leading axis.

    Args:
        config: the architecture.
        key: JAX PRNG key.
        param_dtype: storage dtype.
    """
    ends_key, layers_key = jax.random.split(key)
    ends = nnx.to_pure_dict(nnx.state(Ends(config, param_dtype, nnx.Rngs(ends_key))))
    layers = jax.vmap(
        lambda k: nnx.to_pure_dict(nnx.state(Block(config, param_dtype, nnx.Rngs(k))))
    )(jax.random.split(layers_key, config.num_layers))
    return {**ends, "layers": layers}


def abstract_params(config: TransformerConfig, param_dtype: Any = jnp.float32) -> Params:
    """Return the tree of `init_params` as ShapeDtypeStructs, without computation."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), param_dtype))


def param_axes(config: TransformerConfig) -> Params:
    """Return the tree of `init_params` with a tuple of logical axis names for each array."""
    axes = dict(_AXES)
    for name in config.adapters.modules if config.adapters else ():
        (layers, *rest), at = _AXES[name], num_input_axes(name)
        for leaf, names in zip(
            lora_names(name), ((*rest[:at], "rank"), ("rank", *rest[at:])), strict=True
        ):
            axes[leaf] = (layers, *names)
    return jax.tree_util.tree_map_with_path(
        lambda path, _: axes[path[-1].key], abstract_params(config)
    )


def num_params(config: TransformerConfig) -> int:
    """Return the number of parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config)))


def apply(
    params: Params,
    tokens: Int[Array, "b s"],
    positions: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    visible: attention.Visible | None = None,
    remat: Remat = "none",
    sharding: Any = None,
) -> Float[Array, "b s d"]:
    """Return hidden states after the final norm; positions attend to valid ones up to themselves.

    Rows may be padded on either side, or hold several sequences (`visible`); the output at a padded
    position is finite but has no meaning.

    Args:
        params: from `init_params` or `model.load`, or these in the decoder's layout.
        tokens: token ids.
        positions: position of each token in its sequence (a left-padded row starts at 0 after its
            padding, each sequence of a packed row at 0).
        mask: which tokens are valid.
        config: the architecture.
        compute_dtype: dtype of matmul inputs and of the residual stream; norms, rotations and
            softmax are float32.
        visible: of packed rows, from `attention.packed`; None: one sequence per row.
        remat: what the backward pass recomputes.
        sharding: a `shardings.ComputeSharding`: on a mesh it gathers the layers, and `params`
            outside the layers are gathered already. None: any one device.

    Raises:
        ValueError: `remat` is not the name of a policy.
    """
    angles = rotary(positions, config)
    visible = attention.causal(mask) if visible is None else visible
    implementation = choose_attention(config, compute_dtype, sharding)

    cache = None if sharding is None else sharding.cache

    def attend(q: Array, k: Array, v: Array) -> tuple[Array, None]:
        out = attention.attend_causal(
            q, k, v, visible, implementation=implementation, sharding=cache
        )
        return out, None

    def layer(x: Array, layer_params: Params) -> Array:
        return run_layer(layer_params, x, angles, attend, config=config)[0]

    x = embed(params, tokens, positions, config=config, compute_dtype=compute_dtype)
    x = run_layers(layer, x, params, compute_dtype=compute_dtype, remat=remat, sharding=sharding)
    return final_norm(params, x, config=config)


def choose_attention(
    config: TransformerConfig, compute_dtype: Any, sharding: Any
) -> attention.Implementation:
    """Return the attention implementation for whole sequences; arguments as in `apply`."""
    platform = "any" if sharding is None else sharding.platform
    return attention.choose(config.attention, platform, compute_dtype, config.head_dim)


def embed(
    params: Params,
    tokens: Int[Array, "*b"],
    positions: Int[Array, "*b"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
) -> Float[Array, "*b d"]:
    """Return the input of the first layer.

    A position beyond a learned table reads its last row: keep sequences within max_positions.
    """
    x = params["embed"][tokens].astype(compute_dtype)
    if config.positions == "learned":
        row = jnp.clip(positions, 0, config.max_positions - 1)
        x = x + params["position_embed"][row].astype(compute_dtype)
    return x


def rotary(positions: Int[Array, "*b"], config: TransformerConfig) -> Rope:
    """Return the rotary angles of these positions, the same for every layer."""
    if config.positions == "learned":
        return None
    return rope.angles(positions, config.rotary_dim, config.rope_theta, config.rope_scaling)


def run_layer(
    layer_params: Params,
    x: Float[Array, "*b d"],
    angles: Rope,
    attend: Attend,
    *,
    config: TransformerConfig,
) -> tuple[Float[Array, "*b d"], Any]:
    """Return (x after one layer, second result of `attend`).

    Args:
        layer_params: parameters of one layer, without the layer axis; possibly `quantized`.
        x: residual stream; any batch axes, the last of them may be the sequence.
        angles: from `rotary`.
        attend: (q [*b g r e], k [*b g e], v [*b g e]) -> (output [*b g r e], anything); it defines
            what queries see. Keys are rotated.
        config: the architecture.
    """
    return nnx.merge(_block_graph(config, layer_params), layer_params)(x, angles, attend)


def final_norm(
    params: Params, x: Float[Array, "*b d"], *, config: TransformerConfig
) -> Float[Array, "*b d"]:
    """Apply the norm between the last layer and `unembed`."""
    return _norm(x, params["final_norm"], params.get("final_norm_bias"), config.norm_eps)


def unembed(
    params: Params,
    hidden: Float[Array, "*b d"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
) -> Float32[Array, "*b v"]:
    """Return logits, accumulated in float32 for any dtype of the matmul inputs.

    Raises:
        ValueError: the model is a classifier.
    """
    if config.num_labels:
        raise ValueError(
            f"a classifier with {config.num_labels} labels has no logits over tokens. Use "
            "classifier.classify, or load a language model"
        )
    table = params["embed"] if config.tie_embeddings else params["unembed"]
    return jnp.einsum(
        "...d,vd->...v",
        hidden.astype(compute_dtype),
        table.astype(compute_dtype),
        preferred_element_type=jnp.float32,
    )


def unstack_layers(params: Params, config: TransformerConfig) -> Params:
    """Return the tree with a tuple of layers instead of stacked ones: the decoder's layout.

    Slices inside a decode loop would be copied at every step. Matrices have two axes, with heads
    and head_dim merged: TPU would copy [d h e] to the layout of a matrix in every chunk.
    """

    def matrix(name: str, x: Array) -> Array:
        if name in ("q", "k", "v"):
            return x.reshape(x.shape[0], -1)
        return x.reshape(-1, x.shape[-1]) if name == "o" else x

    layers = tuple(
        {name: matrix(name, x[i]) for name, x in params["layers"].items()}
        for i in range(config.num_layers)
    )
    return {**params, "layers": layers}


def _block_graph(config: TransformerConfig, names: Iterable[str]) -> Any:
    """Return the graph of a layer with leaves of these names."""

    def make() -> Block:
        block = Block(config, jnp.float32, nnx.Rngs(0))
        for name in names:
            if name.endswith("_scale"):
                setattr(block, name, nnx.Param(jnp.zeros(())))
        return block

    return nnx.split(nnx.eval_shape(make))[0]


def _norm(
    x: Float[Array, "*b d"],
    weight: Float[Array, " d"],
    bias: Float[Array, " d"] | None,
    eps: float,
) -> Float[Array, "*b d"]:
    """Apply LayerNorm with a bias, RMSNorm without."""
    if bias is None:
        return _rms_norm(x, weight, eps)
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = _rms_norm(y, weight, eps)
    return (y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)).astype(x.dtype)


def _rms_norm(
    x: Float[Array, "*b d"], weight: Float[Array, " d"], eps: float
) -> Float[Array, "*b d"]:
    # At least float32: the mean of squares of bfloat16 values loses small contributions.
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * jnp.broadcast_to(weight.astype(y.dtype), y.shape)).astype(x.dtype)


_ACTIVATIONS: dict[str, Callable[[Array], Array]] = {
    "silu": jax.nn.silu,
    "gelu": functools.partial(jax.nn.gelu, approximate=False),
    "gelu_tanh": functools.partial(jax.nn.gelu, approximate=True),
}
