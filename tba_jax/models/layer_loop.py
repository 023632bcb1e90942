# SPDX-License-Identifier: Apache-2.0
"""Loop over layers, and rematerialisation in the backward pass.

Invariant: the weights of one layer are gathered once per pass, whatever the number of their uses.
"""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax

from tba_jax.models.architecture import LayerKind, TransformerConfig, has_leaf

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

_Streams = TypeVar("_Streams")
_Layer = Callable[[_Streams, Mapping[str, Any]], _Streams]


def run_layers(
    layers: Sequence[_Layer[_Streams]],
    x: _Streams,
    params: Mapping[str, Any],
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    remat: Remat,
    sharding: Any,
) -> _Streams:
    """Return `x` after all layers.

    Args:
        layers: (x, parameters of a layer) -> x after it, for each kind of the pattern in turn; the
            loop scans over repeats of the pattern.
        x: residual streams, a tree of arrays [b ...].
        params, config, compute_dtype, remat, sharding: as in `transformer.apply`.

    Raises:
        ValueError: `remat` is not the name of a policy.
    """
    if remat not in _REMAT:
        raise ValueError(f"remat {remat!r}; want one of {', '.join(map(repr, _REMAT))}")

    def step_of(layer: _Layer[_Streams]) -> Callable[..., Any]:
        def step(x: _Streams, layer_params: Mapping[str, Any]) -> tuple[_Streams, None]:
            if sharding is None:
                return layer(x, layer_params), None
            x = layer(x, sharding.layer(layer_params, compute_dtype))
            return jax.tree.map(sharding.rows, x), None

        return _REMAT[remat](step)

    if sharding is not None:
        x = jax.tree.map(sharding.rows, x)
    steps, stacked = [step_of(layer) for layer in layers], params["layers"]
    if isinstance(stacked, tuple):  # the decoder's layout
        for i, layer_params in enumerate(stacked):
            x, _ = steps[i % len(steps)](x, layer_params)
        return x
    if len(steps) == 1:
        return jax.lax.scan(steps[0], x, stacked)[0]

    def run(
        x: _Streams, of_layers: Mapping[str, Any], kinds: tuple[LayerKind, ...]
    ) -> tuple[_Streams, None]:
        for i, layer_params in enumerate(_unstacked(of_layers, kinds)):
            x, _ = steps[i](x, layer_params)
        return x, None

    num, pattern = config.num_layers, config.pattern
    whole = num // len(pattern) * len(pattern)
    ends = {name: config.row(name, whole) for name in stacked}  # end of the rows of whole repeats
    repeats = {
        name: leaf[: ends[name]].reshape(whole // len(pattern), -1, *leaf.shape[1:])
        for name, leaf in stacked.items()
    }
    x, _ = jax.lax.scan(functools.partial(run, kinds=pattern), x, repeats)
    if whole < num:  # layers after the last whole repeat
        rest = {name: leaf[ends[name] :] for name, leaf in stacked.items()}
        x, _ = run(x, rest, pattern[: num - whole])
    return x


def _unstacked(
    layers: Mapping[str, Any], kinds: tuple[LayerKind, ...]
) -> tuple[Mapping[str, Any], ...]:
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
