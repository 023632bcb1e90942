# SPDX-License-Identifier: Apache-2.0
"""A decoder-only transformer, which can be a model of any family in `hf.families`.

Parameters are plain nested dicts of arrays with the layers stacked on the first axis. Only this
module and `block` use Flax NNX. Invariant: scoring (`apply`) and the decoder's prefill and steps
use the same layer, `run_layer`, and differ only in the keys that queries see.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from jax.sharding import Mesh
from jaxtyping import Array, Bool, Float, Float32, Int

from tba_jax.models import attention, delta, rope, shared_prompts
from tba_jax.models.architecture import (
    LayerKind,
    TransformerConfig,
    has_leaf,
    num_input_axes,
)
from tba_jax.models.block import Attend, Block, Rope, layer_leaves, norm, outer_leaves
from tba_jax.models.config import MATRICES

Params = Mapping[str, Any]

Remat = Literal["none", "layers", "dots"]
"""Values that the backward pass recomputes instead of keeping them.

none: nothing.
dots: all except outputs of projections (attention scores, norms and activations).
layers: whole layers; only their inputs are kept.
"""

_REMAT: dict[str, Callable[..., Any]] = {
    "none": lambda layer: layer,
    "layers": jax.checkpoint,
    "dots": functools.partial(
        jax.checkpoint, policy=jax.checkpoint_policies.dots_with_no_batch_dims_saveable
    ),
}


@functools.partial(jax.jit, static_argnames=("config", "param_dtype"))
def init_params(config: TransformerConfig, key: Array, param_dtype: Any = jnp.float32) -> Params:
    """Return random initial parameters: a nested dict, layers stacked on a leading axis.

    Args:
        key: JAX PRNG key.
        param_dtype: storage dtype, except of `config.float32_leaves`.
    """
    outer_key, layers_key = jax.random.split(key)
    rngs = nnx.Rngs(outer_key)
    ends = {name: leaf.start(rngs, param_dtype) for name, leaf in outer_leaves(config).items()}
    keys = jax.random.split(layers_key, config.num_layers)

    def init(kind: LayerKind) -> dict[str, Array]:
        def of_layer(key: Array) -> dict[str, Array]:
            rngs, leaves = nnx.Rngs(key), layer_leaves(config, kind)
            return {name: leaf.start(rngs, param_dtype) for name, leaf in leaves.items()}

        return jax.vmap(of_layer)(keys)

    layers = init("full")
    if "delta" in config.pattern:
        kinds = config.layer_kinds
        layers = {
            name: leaf[np.array([i for i, kind in enumerate(kinds) if has_leaf(kind, name)])]
            for name, leaf in (init("delta") | layers).items()
        }
    return {**ends, "layers": layers}


def abstract_params(config: TransformerConfig, param_dtype: Any = jnp.float32) -> Params:
    """Return the tree of `init_params` as ShapeDtypeStructs, without computation."""
    return jax.eval_shape(lambda: init_params(config, jax.random.key(0), param_dtype))


def param_axes(config: TransformerConfig) -> Params:
    """Return the tree of `init_params` with a tuple of logical axis names for each array."""
    layers = {
        name: ("layers", *leaf.axes)
        for kind in dict.fromkeys(config.layer_kinds)
        for name, leaf in layer_leaves(config, kind).items()
    }
    return {**{name: leaf.axes for name, leaf in outer_leaves(config).items()}, "layers": layers}


def num_params(config: TransformerConfig) -> int:
    """Return the number of parameters."""
    return sum(math.prod(x.shape) for x in jax.tree.leaves(abstract_params(config)))


def apply(
    params: Params,
    tokens: Int[Array, "b s"],
    positions: Int[Array, "b s"],
    visible: Bool[Array, "b s"] | attention.Visible | shared_prompts.Rows,
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    remat: Remat = "none",
    sharding: Any = None,
) -> Float[Array, "b s d"]:
    """Return hidden states after the final norm.

    The output at a padded position is finite but has no meaning.

    Args:
        params: parameters from `init_params` or `model.load`, also in the decoder's layout.
        tokens: token ids.
        positions: position of each token in its sequence. A left-padded row starts at 0 after its
            padding, and each sequence of a packed row at 0.
        visible: which tokens are valid, in rows of one sequence padded on either side; or the
            return value of `attention.packed`; or `shared_prompts.Rows`.
        compute_dtype: dtype of matmul inputs and of the residual stream; norms, rotations and
            softmax are float32.
        remat: what the backward pass recomputes.
        sharding: a `shardings.ComputeSharding`, which on a mesh gathers the layers; `params`
            outside the layers are gathered already. None: any single device.
    """
    attend_rows: Callable[..., Array] = attention.attend_causal
    mix_rows: Callable[..., Any] = delta.mix
    if isinstance(visible, shared_prompts.Rows):
        attend_rows, mix_rows = shared_prompts.attend, shared_prompts.mix
    elif not isinstance(visible, attention.Visible):
        visible = attention.causal(visible)
    elif visible.prompts is not None:
        visible = visible._replace(positions=positions)
    kernels, mesh = attention.Kernels(config.attention), None
    if sharding is not None:
        kernels, mesh = sharding.kernels, sharding.mesh
    angles = rotary(positions, config)

    def attend(q: Array, k: Array, v: Array, scores: attention.Scores) -> tuple[Array, None]:
        return attend_rows(q, k, v, visible, scores=scores, kernels=kernels), None

    def layer_of(kind: LayerKind) -> Callable[[Array, Params], Array]:
        mix = functools.partial(mix_rows, visible=visible)
        use: Attend = mix if kind == "delta" else attend

        def layer(x: Array, params: Params) -> Array:
            if sharding is not None:
                params = sharding.layer(params, compute_dtype)
            x = run_layer(kind, params, x, angles[kind], use, config=config, mesh=mesh)[0]
            return x if sharding is None else sharding.rows(x)

        return _REMAT[remat](layer)

    x = embed(params, tokens, positions, config=config, compute_dtype=compute_dtype)
    x = x if sharding is None else sharding.rows(x)
    x = _run_layers({kind: layer_of(kind) for kind in config.pattern}, x, params["layers"], config)
    return final_norm(params, x, config=config)


def _run_layers(
    of_kind: Mapping[LayerKind, Callable[[Array, Params], Array]],
    x: Float[Array, "b s d"],
    layers: Any,
    config: TransformerConfig,
) -> Float[Array, "b s d"]:
    """Return the residual stream after all layers; each kind of layer is traced once.

    Args:
        of_kind: for each kind of layer, (x, parameters of a layer) -> x after the layer.
        layers: parameters of the layers, stacked or separate. Stacked layers are a scan over
            repeats of the pattern.
    """
    pattern = config.pattern
    if len(pattern) == 1 and not isinstance(layers, tuple):
        (layer,) = of_kind.values()
        return jax.lax.scan(lambda x, params: (layer(x, params), None), x, layers)[0]
    of_kind = {kind: jax.jit(layer) for kind, layer in of_kind.items()}

    def run(x: Array, layers: Sequence[Params], kinds: Sequence[LayerKind]) -> Array:
        for params, kind in zip(layers, kinds, strict=True):
            x = of_kind[kind](x, params)
        return x

    if isinstance(layers, tuple):  # the decoder's layout
        return run(x, layers, config.layer_kinds)

    def repeat(x: Array, layers: Params) -> tuple[Array, None]:
        return run(x, _unstacked(layers, pattern), pattern), None

    whole = config.num_layers // len(pattern)
    kinds = config.layer_kinds[whole * len(pattern) :]  # after the last whole repeat
    ends = {name: config.row(name, config.num_layers - len(kinds)) for name in layers}
    repeats = {
        name: leaf[: ends[name]].reshape(whole, -1, *leaf.shape[1:])
        for name, leaf in layers.items()
    }
    x, _ = jax.lax.scan(repeat, x, repeats)
    rest = {name: leaf[ends[name] :] for name, leaf in layers.items()}
    return run(x, _unstacked(rest, kinds), kinds)


def _unstacked(layers: Params, kinds: Sequence[LayerKind]) -> tuple[Params, ...]:
    """Return the parameters of each layer.

    The gradient of a split is a concatenation. The gradient of plain indexing would add up arrays
    that are zero except for one layer.
    """
    rows = {
        name: iter(jax.lax.split(leaf, (1,) * len(leaf)) if len(leaf) else ())
        for name, leaf in layers.items()
    }
    return tuple(
        {name: next(rows[name]).squeeze(0) for name in layers if has_leaf(kind, name)}
        for kind in kinds
    )


def embed(
    params: Params,
    tokens: Int[Array, "*b"],
    positions: Int[Array, "*b"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
) -> Float[Array, "*b d"]:
    """Return the input of the first layer.

    A position beyond a learned table reads the last row, so keep sequences within max_positions.
    """
    x = params["embed"][tokens].astype(compute_dtype)
    if config.scaled_embeddings:
        x = x * jnp.asarray(config.hidden_size**0.5, compute_dtype)
    if config.positions == "learned":
        row = jnp.clip(positions, 0, config.max_positions - 1)
        x = x + params["position_embed"][row].astype(compute_dtype)
    return x


def rotary(positions: Int[Array, "*b"], config: TransformerConfig) -> dict[LayerKind, Rope]:
    """Return the rotary angles of these positions for each kind of layer."""
    if config.positions == "learned":
        return dict.fromkeys(config.pattern)
    dim, theta = config.rotary_dim, config.window_rope_theta
    found: dict[LayerKind, Rope] = dict.fromkeys(
        config.pattern, rope.angles(positions, dim, config.rope_theta, config.rope_scaling)
    )
    if theta is not None and "window" in found:
        found["window"] = rope.angles(positions, dim, theta, None)
    return found


def run_layer(
    kind: LayerKind,
    layer_params: Params,
    x: Float[Array, "*b d"],
    angles: Rope,
    attend: Attend,
    *,
    config: TransformerConfig,
    mesh: Mesh | None = None,
) -> tuple[Float[Array, "*b d"], Any]:
    """Return (x after one layer, second result of `attend`).

    Args:
        kind: kind of the layer.
        layer_params: parameters of one layer, without the layer axis; possibly `quantized`.
        x: residual stream; any batch axes, the last of them may be the sequence.
        angles: return value of `rotary` for the layer's kind.
        attend: function that attends to the keys that queries see.
        mesh: devices of the program, for experts; None: one device.
    """
    block = nnx.merge(_block_graph(config, kind, tuple(sorted(layer_params))), layer_params)
    return block(x, angles, attend, mesh)


def final_norm(
    params: Params, x: Float[Array, "*b d"], *, config: TransformerConfig
) -> Float[Array, "*b d"]:
    """Apply the norm between the last layer and `unembed`."""
    return norm(x, params["final_norm"], params.get("final_norm_bias"), config)


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
    logits = jnp.einsum(
        "...d,vd->...v",
        hidden.astype(compute_dtype),
        params[config.output_table].astype(compute_dtype),
        preferred_element_type=jnp.float32,
    )
    logits = attention.capped(logits, config.logits_cap)
    if not config.num_tokens:
        return logits
    return jnp.where(jnp.arange(logits.shape[-1]) < config.num_tokens, logits, attention.NO_TOKEN)


def classify(
    params: Params,
    tokens: Int[Array, "b s"],
    mask: Bool[Array, "b s"],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    sharding: Any = None,
) -> Float32[Array, "b labels"]:
    """Return raw scores (no softmax) at the last valid token of each row, as in transformers.

    The scores of a row depend only on its valid tokens; rows may be padded on either side.
    transformers treats every token except the pad token as valid. If responses may end in the pad
    token, pass the mask of transformers to get equal scores. The scores of a row without valid
    tokens are finite but have no meaning.

    Args:
        params: parameters with the leaf `score`.
        tokens, mask: token ids, and which of them are valid.
        config: the architecture; num_labels > 0.
        compute_dtype, sharding: as in `apply`, but all of `params` may be divided.
    """
    if sharding is not None:
        params = sharding.ends(params, compute_dtype)
    positions = jnp.maximum(jnp.cumsum(mask, axis=1) - 1, 0)
    how: Any = {"config": config, "compute_dtype": compute_dtype, "sharding": sharding}
    hidden = apply(params, tokens, positions, mask, **how)
    last = jnp.max(jnp.where(mask, jnp.arange(tokens.shape[1])[None], 0), axis=1)
    pooled = jnp.take_along_axis(hidden, last[:, None, None], axis=1)[:, 0]
    table = params["score"].astype(compute_dtype)
    return jnp.einsum("bd,nd->bn", pooled, table, preferred_element_type=jnp.float32)


def unstack_layers(params: Params, config: TransformerConfig) -> Params:
    """Return the tree in the decoder's layout: with a tuple of layers instead of stacked layers.

    Slices of stacked layers would be copied at every step of a decode loop. Matrices have two axes,
    with heads and head_dim merged: a TPU would copy [d h e] to a matrix layout in every chunk.
    """

    def matrix(name: str, x: Array) -> Array:
        if name not in MATRICES or x.ndim == 2:
            return x
        return x.reshape(-1, x.shape[-1]) if num_input_axes(name) > 1 else x.reshape(len(x), -1)

    layers = tuple(
        {name: matrix(name, x) for name, x in layer.items()}
        for layer in _unstacked(params["layers"], config.layer_kinds)
    )
    return {**params, "layers": layers}


@functools.lru_cache(maxsize=64)
def _block_graph(config: TransformerConfig, kind: LayerKind, names: tuple[str, ...]) -> Any:
    """Return the NNX graph definition of a layer with leaves of these names."""
    return nnx.split(nnx.eval_shape(lambda: Block(config, kind, names)))[0]
