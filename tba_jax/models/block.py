# SPDX-License-Identifier: Apache-2.0
"""One layer of the transformer: its parameters, their logical axes, and its computation.

Only this module and `transformer` use Flax NNX. An argument defines which keys the queries see.
"""

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tba_jax.models import delta, experts, rope
from tba_jax.models.activations import ACTIVATIONS, gated
from tba_jax.models.architecture import (
    LayerKind,
    TransformerConfig,
    has_leaf,
    lora_names,
    num_input_axes,
)

Rope = rope.Rope | None  # None: learned positions, which are in the residual stream already
Attend = Callable[..., tuple[Array, Any]]
"""(queries [*b g r e], keys [*b g e], values [*b g e], sinks [g r] or None) -> (output [*b g r e],
anything); queries and keys are rotated. In delta layers: (`delta.Inputs`) -> (output [*b h r f],
anything)."""
_New = Callable[..., nnx.Param]  # makes a leaf


class Block(nnx.Module):
    """One layer; its argument `attend` defines which keys the queries see."""

    def __init__(
        self, config: TransformerConfig, dtype: Any, rngs: nnx.Rngs, kind: LayerKind = "full"
    ):
        d, f = config.hidden_size, config.mlp_size

        def kernel(shape: tuple[int, ...], fan_in: int) -> nnx.Param:
            return nnx.Param(
                (jax.random.normal(rngs.params(), shape) / math.sqrt(fan_in)).astype(dtype)
            )

        def zeros(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.zeros(shape, dtype))

        def ones(*shape: int) -> nnx.Param:
            return nnx.Param(jnp.ones(shape, dtype))

        # Matrices that write into the residual stream have smaller initial values, so that its
        # scale does not grow with depth (GPT-2).
        depth = 2 * config.num_layers
        self.config = config
        self.kind = kind
        start = zeros if config.norm_offset else ones
        for name in norm_names(config):
            setattr(self, name, start(d))
        if kind == "delta":
            self._add_delta(kernel, zeros, ones)
        else:
            self._add_attention(kernel, zeros, start)
        num = (config.num_experts,) if config.num_experts else ()
        if config.num_experts:
            self.router = kernel((d, *num), d)
        matrix = "expert_{}" if config.num_experts else "{}"
        if config.gated_mlp:
            setattr(self, matrix.format("gate"), kernel((*num, d, f), d))
        setattr(self, matrix.format("up"), kernel((*num, d, f), d))
        setattr(self, matrix.format("down"), kernel((*num, f, d), f * depth))
        if shared := config.shared_size:
            self.gate, self.up = kernel((d, shared), d), kernel((d, shared), d)
            self.down = kernel((shared, d), shared * depth)
            self.shared_router = kernel((d,), d)
        if config.norm == "layer":
            self.attn_norm_bias, self.mlp_norm_bias = zeros(d), zeros(d)
        if config.router_bias:
            self.router_bias = zeros(*num)
        if config.mlp_bias:
            setattr(self, matrix.format("up_bias"), zeros(*num, f))
            setattr(self, matrix.format("down_bias"), zeros(*num, d))
            if config.gated_mlp:
                setattr(self, matrix.format("gate_bias"), zeros(*num, f))
        if config.adapters is not None:
            for name in config.adapters.modules:
                if not has_leaf(kind, name):
                    continue
                shape, at = getattr(self, name).shape, num_input_axes(name)
                for leaf, axes in zip(
                    lora_names(name),
                    ((*shape[:at], config.adapters.rank), (config.adapters.rank, *shape[at:])),
                    strict=True,
                ):
                    setattr(self, leaf, zeros(*axes))

    def _add_attention(self, kernel: _New, zeros: _New, start: _New) -> None:
        config, d, e = self.config, self.config.hidden_size, self.config.head_dim
        h, g = config.num_heads, config.num_kv_heads
        self.q = kernel((d, h, e), d)
        self.k = kernel((d, g, e), d)
        self.v = kernel((d, g, e), d)
        self.o = kernel((h, e, d), h * e * 2 * config.num_layers)
        if config.attention_gate:
            self.q_gate = kernel((d, h, e), d)
        if config.qkv_bias:
            self.q_bias, self.k_bias, self.v_bias = zeros(h, e), zeros(g, e), zeros(g, e)
        if config.o_bias:
            self.o_bias = zeros(d)
        if config.qk_norm:
            whole = config.qk_norm_is_whole
            self.q_norm = start(h, e) if whole else start(e)
            self.k_norm = start(g, e) if whole else start(e)
        if config.sinks:
            self.sinks = zeros(h)

    def _add_delta(self, kernel: _New, zeros: _New, ones: _New) -> None:
        config, d = self.config, self.config.hidden_size
        for name, shape in _delta_shapes(config).items():
            setattr(self, f"delta_{name}", kernel((d, *shape), d))
            taps = (*shape, config.delta_taps)
            setattr(self, f"delta_taps_{name}", kernel(taps, config.delta_taps))
        heads, size = config.delta_value_heads, config.delta_value_dim
        self.delta_gate = kernel((d, heads, size), d)
        self.delta_o = kernel((heads, size, d), heads * size * 2 * config.num_layers)
        self.delta_rate, self.delta_decay = kernel((d, heads), d), kernel((d, heads), d)
        # `TransformerConfig.float32_leaves`
        self.delta_decay_bias = nnx.Param(jnp.ones(heads, jnp.float32))
        self.delta_log_decay = nnx.Param(jnp.zeros(heads, jnp.float32))
        self.delta_norm = ones(size)

    def __call__(
        self,
        x: Float[Array, "*b d"],
        angles: Rope,
        attend: Attend,
        mesh: Any = None,
    ) -> tuple[Float[Array, "*b d"], Any]:
        """Return (x after this layer, second result of `attend`)."""
        y = self._norm("attn_norm", x)
        if self.kind == "delta":
            out, extra = self._delta(y, attend)
        else:
            out, extra = self._attention(y, angles, attend)
        out = self._norm("attn_out_norm", out)
        if self.config.parallel_residual:
            total = x + out  # before the MLP: another order of the sums changes the last bits
            return total + self._mlp(self._norm("mlp_norm", x), mesh), extra
        x = x + out
        out = self._mlp(self._norm("mlp_norm", x), mesh)
        return x + self._norm("mlp_out_norm", out), extra

    def _attention(
        self, y: Float[Array, "*b d"], angles: Rope, attend: Attend
    ) -> tuple[Float[Array, "*b d"], Any]:
        config = self.config
        h, g, e = config.num_heads, config.num_kv_heads, config.head_dim
        q = self._linear("q", y, config.qkv_bias, (h, e))
        k = self._linear("k", y, config.qkv_bias, (g, e))
        v = self._linear("v", y, config.qkv_bias, (g, e))
        if config.qk_norm:
            q, k = self._head_norm("q_norm", q), self._head_norm("k_norm", k)
        if angles is not None:
            q, k = rope.rotate(q, angles), rope.rotate(k, angles)
        if config.score_divisor not in (None, e):  # attention divides by the root of head_dim
            q = q * math.sqrt(e / config.score_divisor)
        sinks = self.sinks[...].reshape(g, h // g) if config.sinks else None
        # Group the queries of one key/value head instead of repeating keys and values.
        out, extra = attend(q.reshape(*q.shape[:-2], g, h // g, e), k, v, sinks)
        out = out.reshape(*q.shape[:-2], h * e)
        if config.attention_gate:
            out = out * jax.nn.sigmoid(self._linear("q_gate", y, False, (h * e,)))
        return self._linear("o", out, config.o_bias, y.shape[-1:]), extra

    def _delta(self, y: Float[Array, "*b d"], mix: Attend) -> tuple[Float[Array, "*b d"], Any]:
        config, shapes = self.config, _delta_shapes(self.config)
        (h, k), shape = shapes["k"], shapes["v"]
        wide = jnp.promote_types(y.dtype, jnp.float32)

        def heads(x: Array) -> Array:
            return x.reshape(*y.shape[:-1], h, -1)

        qkv = [heads(self._linear(f"delta_{name}", y, False, shapes[name])) for name in shapes]
        taps = [getattr(self, f"delta_taps_{name}")[...] for name in shapes]
        taps = [x.reshape(h, -1, config.delta_taps) for x in taps]
        decay = self._linear("delta_decay", y, False, shape[:1]).astype(wide)

        def vector(name: str) -> Array:
            return jnp.broadcast_to(getattr(self, name)[...].astype(wide), decay.shape)

        decay = jax.nn.softplus(decay + vector("delta_decay_bias"))
        decay = -jnp.exp(vector("delta_log_decay")) * decay
        rate = jax.nn.sigmoid(self._linear("delta_rate", y, False, shape[:1]).astype(wide))
        inputs = delta.Inputs(
            jnp.concatenate(qkv, axis=-1),
            jnp.concatenate(taps, axis=1),
            heads(decay),
            heads(rate),
            key_dim=k,
        )
        out, extra = mix(inputs)
        out = out.reshape(*y.shape[:-1], *shape)
        out = _rms_norm(out.astype(wide), self.delta_norm[...], config.norm_eps)
        gate = self._linear("delta_gate", y, False, shape).astype(wide)
        out = (out * jax.nn.silu(gate)).astype(y.dtype).reshape(*y.shape[:-1], -1)
        return self._linear("delta_o", out, False, y.shape[-1:]), extra

    def _mlp(self, y: Float[Array, "*b d"], mesh: Any) -> Float[Array, "*b d"]:
        config = self.config
        if config.num_experts:
            names = (name for name in experts.LEAVES if hasattr(self, name))
            leaves = {name: getattr(self, name)[...] for name in names}
            out = experts.feed_forward(y, leaves, config=config, mesh=mesh)
            if not config.shared_size:
                return out
            shared = jax.nn.sigmoid(y @ self.shared_router[...].astype(y.dtype))
            return out + shared[..., None] * self._dense_mlp(y, config.shared_size)
        return self._dense_mlp(y, config.mlp_size)

    def _dense_mlp(self, y: Float[Array, "*b d"], f: int) -> Float[Array, "*b d"]:
        config, d = self.config, self.config.hidden_size
        up = self._linear("up", y, config.mlp_bias, (f,))
        if config.gated_mlp:
            y = gated(config.activation, self._linear("gate", y, config.mlp_bias, (f,)), up)
        else:
            y = ACTIVATIONS[config.activation](up)
        return self._linear("down", y, config.mlp_bias, (d,))

    def _linear(
        self, name: str, x: Float[Array, "*b i"], has_bias: bool, out_shape: tuple[int, ...]
    ) -> Array:
        """Return [*b *out_shape]: x times the matrix of this name, plus its bias, in x's dtype.

        The product is two-dimensional, so that the weight gradient contracts one long axis instead
        of several (229 instead of 262 ms for the gradient of 256 rows x 28 positions of the start
        model on 2 CPU cores). Keys and values, and gate and up, are separate products. A fused
        product took two to three times as long in training on CPU, and on TPU an axis of two made
        XLA copy the weights to another layout.
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
        """Apply a norm by name, if the architecture has it."""
        if name not in norm_names(self.config):
            return x
        bias = getattr(self, name + "_bias")[...] if self.config.norm == "layer" else None
        return norm(x, getattr(self, name)[...], bias, self.config)

    def _head_norm(self, name: str, x: Float[Array, "*b h e"]) -> Float[Array, "*b h e"]:
        weight = getattr(self, name)[...]
        if not self.config.qk_norm_is_whole:
            return norm(x, weight, None, self.config)
        merged = norm(x.reshape(*x.shape[:-2], -1), weight.reshape(-1), None, self.config)
        return merged.reshape(x.shape)


def _delta_shapes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Return (heads, size) of queries, keys and values of a delta layer."""
    keys = (config.delta_key_heads, config.delta_key_dim)
    return {"q": keys, "k": keys, "v": (config.delta_value_heads, config.delta_value_dim)}


def norm_names(config: TransformerConfig) -> tuple[str, ...]:
    """Return the names of the norms of a layer's residual stream."""
    before, after = ("attn_norm", "mlp_norm"), ("attn_out_norm", "mlp_out_norm")
    return {"pre": before, "post": after, "both": before + after}[config.norms]


# Logical axes of all parameters (`devices.sharding` maps them to mesh axes).
AXES = {
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
    "q_gate": ("layers", "embed", "heads", "head_dim"),
    "delta_q": ("layers", "embed", "kv_heads", "head_dim"),
    "delta_k": ("layers", "embed", "kv_heads", "head_dim"),
    "delta_v": ("layers", "embed", "heads", "head_dim"),
    "delta_taps_q": ("layers", "kv_heads", "head_dim", None),
    "delta_taps_k": ("layers", "kv_heads", "head_dim", None),
    "delta_taps_v": ("layers", "heads", "head_dim", None),
    "delta_gate": ("layers", "embed", "heads", "head_dim"),
    "delta_o": ("layers", "heads", "head_dim", "embed"),
    "delta_rate": ("layers", "embed", "heads"),
    "delta_decay": ("layers", "embed", "heads"),
    "delta_decay_bias": ("layers", "heads"),
    "delta_log_decay": ("layers", "heads"),
    "delta_norm": ("layers", "head_dim"),
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
    "attn_out_norm": ("layers", "embed"),
    "mlp_out_norm": ("layers", "embed"),
    "sinks": ("layers", "heads"),
    "shared_router": ("layers", "embed"),
    "router": ("layers", "embed", None),
    "router_bias": ("layers", None),
    "expert_gate": ("layers", "experts", "embed", "mlp"),
    "expert_gate_bias": ("layers", "experts", "mlp"),
    "expert_up": ("layers", "experts", "embed", "mlp"),
    "expert_up_bias": ("layers", "experts", "mlp"),
    "expert_down": ("layers", "experts", "mlp", "embed"),
    "expert_down_bias": ("layers", "experts", "embed"),
}


def leaf_axes(name: str, config: TransformerConfig) -> tuple[str | None, ...]:
    """Return the logical axes of a parameter."""
    if config.qk_norm_is_whole and name in ("q_norm", "k_norm"):
        return ("layers", "heads" if name == "q_norm" else "kv_heads", "head_dim")
    return AXES[name]


def norm(
    x: Float[Array, "*b d"],
    weight: Float[Array, " d"],
    bias: Float[Array, " d"] | None,
    config: TransformerConfig,
) -> Float[Array, "*b d"]:
    """Apply LayerNorm with a bias, RMSNorm without."""
    if bias is None:
        if config.norm_offset:
            weight = 1 + weight.astype(jnp.promote_types(weight.dtype, jnp.float32))
        return _rms_norm(x, weight, config.norm_eps)
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y - jnp.mean(y, axis=-1, keepdims=True)
    y = _rms_norm(y, weight, config.norm_eps)
    return (y + jnp.broadcast_to(bias.astype(y.dtype), y.shape)).astype(x.dtype)


def _rms_norm(
    x: Float[Array, "*b d"], weight: Float[Array, " d"], eps: float
) -> Float[Array, "*b d"]:
    # At least float32: the mean of squares of bfloat16 values loses small contributions.
    y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
    y = y * jax.lax.rsqrt(jnp.mean(y * y, axis=-1, keepdims=True) + eps)
    return (y * jnp.broadcast_to(weight.astype(y.dtype), y.shape)).astype(x.dtype)
