# SPDX-License-Identifier: Apache-2.0
"""One layer of the transformer: its parameters, their logical axes, and its computation.

Only this module and `transformer` use Flax NNX. The caller defines which keys the queries see.
"""

import math
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from flax import nnx
from jaxtyping import Array, Float

from tba_jax.models import attention, delta, experts, rope
from tba_jax.models.architecture import (
    ACTIVATIONS,
    LayerKind,
    TransformerConfig,
    gated,
    lora_names,
    num_input_axes,
)

Rope = rope.Rope | None  # None: learned positions, which are in the residual stream already
Attend = Callable[..., tuple[Array, Any]]
"""(queries [*b g r e], keys [*b g e], values [*b g e], `attention.Scores`) -> (output [*b g r e],
anything); queries and keys are rotated. In delta layers: (`delta.Inputs`) -> (output [*b h r f],
anything)."""


class Leaf(NamedTuple):
    """Declaration of a parameter.

    Attributes:
        axes: logical axes, without the layers; `devices.sharding` maps them to mesh axes.
        shape: sizes of these axes.
        fan_in: initial values are normal with the standard deviation fan_in**-0.5; 0: constant.
        constant: initial value if `fan_in` is 0.
        dtype: storage dtype; None: that of the model.
    """

    axes: tuple[str, ...]
    shape: tuple[int, ...]
    fan_in: int = 0
    constant: float = 0.0
    dtype: Any = None

    def start(self, rngs: nnx.Rngs, dtype: Any) -> Array:
        """Return the initial values, in `dtype` unless the leaf has its own."""
        dtype = self.dtype or dtype
        if not self.fan_in:
            return jnp.full(self.shape, self.constant, dtype)
        values = jax.random.normal(rngs.params(), self.shape) / math.sqrt(self.fan_in)
        return values.astype(dtype)


def outer_leaves(config: TransformerConfig) -> dict[str, Leaf]:
    """Declare the parameters outside the layers: embeddings, final norm, output matrix."""
    d = config.hidden_size

    def table(rows: str, num: int) -> Leaf:
        return Leaf((rows, "embed"), (num, d), d)

    found = {
        "embed": table("vocab", config.vocab_size),
        "final_norm": Leaf(("embed",), (d,), constant=0 if config.norm_offset else 1),
    }
    if config.norm == "layer":
        found["final_norm_bias"] = Leaf(("embed",), (d,))
    if config.positions == "learned":
        found["position_embed"] = table("positions", config.max_positions)
    if config.num_labels:
        found["score"] = table("labels", config.num_labels)
    elif not config.tie_embeddings:
        found["unembed"] = table("vocab", config.vocab_size)
    return found


def layer_leaves(config: TransformerConfig, kind: LayerKind) -> dict[str, Leaf]:
    """Declare the parameters of one layer."""
    d, f = config.hidden_size, config.mlp_size
    sizes = {
        "embed": d,
        "heads": config.num_heads,
        "kv_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "mlp": f,
        "experts": config.num_experts,
        "routes": config.num_experts,  # on every device, unlike the experts
    }
    start = 0.0 if config.norm_offset else 1.0
    # Matrices that write into the residual stream have smaller initial values, so that its
    # scale does not grow with depth (GPT-2).
    depth = 2 * config.num_layers
    found: dict[str, Leaf] = {}

    def add(axes: str, fan_in: int = 0, constant: float = 0.0, **names: bool) -> None:
        """Declare the leaves whose names are given as true."""
        split = tuple(axes.split())
        for name in (name for name, is_wanted in names.items() if is_wanted):
            dtype = jnp.float32 if name in config.float32_leaves else None
            found[name] = Leaf(split, tuple(sizes[x] for x in split), fan_in, constant, dtype)

    add("embed", constant=start, **dict.fromkeys(norm_names(config), True))
    if kind == "delta":
        sizes["taps"] = config.delta_taps
        for name, (heads, size) in _delta_shapes(config).items():
            axis = "heads" if name == "v" else "kv_heads"
            sizes |= {axis: heads, "head_dim": size}
            add(f"embed {axis} head_dim", d, **{f"delta_{name}": True})
            add(f"{axis} head_dim taps", config.delta_taps, **{f"delta_taps_{name}": True})
        add("embed heads head_dim", d, delta_gate=True)
        add("heads head_dim embed", sizes["heads"] * sizes["head_dim"] * depth, delta_o=True)
        add("embed heads", d, delta_rate=True, delta_decay=True)
        add("heads", constant=1.0, delta_decay_bias=True)
        add("heads", delta_log_decay=True)
        add("head_dim", constant=1.0, delta_norm=True)
    else:
        add("embed heads head_dim", d, q=True)
        add("embed kv_heads head_dim", d, k=True, v=True)
        add("heads head_dim embed", config.num_heads * config.head_dim * depth, o=True)
        add("embed heads head_dim", d, q_gate=config.attention_gate)
        add("heads head_dim", q_bias=config.qkv_bias)
        add("kv_heads head_dim", k_bias=config.qkv_bias, v_bias=config.qkv_bias)
        add("embed", o_bias=config.o_bias)
        heads, kv_heads = ("heads ", "kv_heads ") if config.qk_norm_is_whole else ("", "")
        add(f"{heads}head_dim", constant=start, q_norm=config.qk_norm)
        add(f"{kv_heads}head_dim", constant=start, k_norm=config.qk_norm)
        add("heads", sinks=config.sinks)
    has_bias, has_gate = config.mlp_bias, config.gated_mlp
    if config.num_experts:
        add("embed routes", d, router=True)
        add("experts embed mlp", d, expert_gate=has_gate, expert_up=True)
        add("experts mlp embed", f * depth, expert_down=True)
        add("routes", router_bias=has_bias)
        add("experts mlp", expert_gate_bias=has_bias and has_gate, expert_up_bias=has_bias)
        add("experts embed", expert_down_bias=has_bias)
    if dense := config.shared_size if config.num_experts else f:
        sizes["mlp"] = dense
        has_bias = has_bias and not config.num_experts
        add("embed mlp", d, gate=has_gate, up=True)
        add("mlp embed", dense * depth, down=True)
        add("mlp", gate_bias=has_bias and has_gate, up_bias=has_bias)
        add("embed", down_bias=has_bias)
        add("embed", d, shared_router=config.num_experts > 0)
    if config.norm == "layer":
        add("embed", **{f"{name}_bias": True for name in norm_names(config)})
    if config.adapters is not None:
        rank = (config.adapters.rank,)
        for name in (name for name in config.adapters.modules if name in found):
            leaf, at, (a, b) = found[name], num_input_axes(name), lora_names(name)
            found[a] = Leaf((*leaf.axes[:at], "rank"), leaf.shape[:at] + rank)
            found[b] = Leaf(("rank", *leaf.axes[at:]), rank + leaf.shape[at:])
    return found


class Block(nnx.Module):
    """One layer; its argument `attend` defines which keys the queries see.

    Args:
        names: names of its leaves; `nnx.merge` provides their values.
    """

    def __init__(self, config: TransformerConfig, kind: LayerKind, names: Iterable[str]):
        self.config = config
        self.kind: LayerKind = kind
        for name in names:
            setattr(self, name, nnx.Param(jnp.zeros(())))

    def _leaf(self, name: str) -> Array:
        return getattr(self, name)[...]

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
        x = self._norm("attn_sum_norm", x + out)
        out = self._mlp(self._norm("mlp_norm", x), mesh)
        return self._norm("mlp_sum_norm", x + self._norm("mlp_out_norm", out)), extra

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
        sinks = self._leaf("sinks").reshape(g, h // g) if config.sinks else None
        # Group the queries of one key/value head instead of repeating keys and values.
        scores = scores_of(self.kind, config, sinks)
        out, extra = attend(q.reshape(*q.shape[:-2], g, h // g, e), k, v, scores)
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
        taps = [self._leaf(f"delta_taps_{name}") for name in shapes]
        taps = [x.reshape(h, -1, config.delta_taps) for x in taps]
        decay = self._linear("delta_decay", y, False, shape[:1]).astype(wide)

        def vector(name: str) -> Array:
            return jnp.broadcast_to(self._leaf(name).astype(wide), decay.shape)

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
        out = _rms_norm(out.astype(wide), self._leaf("delta_norm"), config.norm_eps)
        gate = self._linear("delta_gate", y, False, shape).astype(wide)
        out = (out * jax.nn.silu(gate)).astype(y.dtype).reshape(*y.shape[:-1], -1)
        return self._linear("delta_o", out, False, y.shape[-1:]), extra

    def _mlp(self, y: Float[Array, "*b d"], mesh: Any) -> Float[Array, "*b d"]:
        config = self.config
        if config.num_experts:
            names = (name for name in experts.LEAVES if hasattr(self, name))
            leaves = {name: self._leaf(name) for name in names}
            out = experts.feed_forward(y, leaves, config=config, mesh=mesh)
            if not config.shared_size:
                return out
            shared = jax.nn.sigmoid(y @ self._leaf("shared_router").astype(y.dtype))
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
        kernel = self._leaf(name).astype(x.dtype).reshape(x.shape[-1], -1)
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
            a, b = (self._leaf(leaf).astype(x.dtype) for leaf in lora_names(name))
            narrow = rows @ a.reshape(x.shape[-1], -1)
            out = out + adapters.scale * narrow @ b.reshape(adapters.rank, -1)
        out = out.reshape(*x.shape[:-1], *out_shape)
        if has_bias:
            bias = self._leaf(name + "_bias").astype(x.dtype)
            out = out + jnp.broadcast_to(bias, out.shape)
        return out

    def _norm(self, name: str, x: Float[Array, "*b d"]) -> Float[Array, "*b d"]:
        """Apply a norm by name, if the architecture has it."""
        if name not in norm_names(self.config):
            return x
        bias = self._leaf(name + "_bias") if self.config.norm == "layer" else None
        return norm(x, self._leaf(name), bias, self.config)

    def _head_norm(self, name: str, x: Float[Array, "*b h e"]) -> Float[Array, "*b h e"]:
        weight = self._leaf(name)
        if not self.config.qk_norm_is_whole:
            return norm(x, weight, None, self.config)
        merged = norm(x.reshape(*x.shape[:-2], -1), weight.reshape(-1), None, self.config)
        return merged.reshape(x.shape)


def _delta_shapes(config: TransformerConfig) -> dict[str, tuple[int, int]]:
    """Return (heads, size) of queries, keys and values of a delta layer."""
    keys = (config.delta_key_heads, config.delta_key_dim)
    return {"q": keys, "k": keys, "v": (config.delta_value_heads, config.delta_value_dim)}


def scores_of(
    kind: LayerKind, config: TransformerConfig, sinks: Float[Array, "g r"] | None
) -> attention.Scores:
    """Return the treatment of scores in a layer of this kind."""
    window = config.window if kind == "window" else None
    return attention.Scores(window, config.attention_cap, sinks)


def norm_names(config: TransformerConfig) -> tuple[str, ...]:
    """Return the names of the norms of a layer's residual stream."""
    kinds = {"pre": ("",), "post": ("_out",), "both": ("", "_out"), "sum": ("_sum",)}
    return tuple(f"{part}{kind}_norm" for kind in kinds[config.norms] for part in ("attn", "mlp"))


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
