# SPDX-License-Identifier: Apache-2.0
"""Loop over layers, and rematerialisation in the backward pass.

Invariant: the weights of one layer are gathered once per pass, whatever uses them.
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any, Literal, TypeVar

import jax

Remat = Literal["none", "layers", "dots"]
"""What the backward pass recomputes instead of keeping it.

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


def run_layers(
    layer: Callable[[_Streams, Mapping[str, Any]], _Streams],
    x: _Streams,
    params: Mapping[str, Any],
    *,
    compute_dtype: Any,
    remat: Remat,
    sharding: Any,
) -> _Streams:
    """Return `x` after all layers.

    Args:
        layer: (x, parameters of a layer) -> x after it.
        x: residual streams, a tree of arrays [b ...].
        params, compute_dtype, remat, sharding: as in `transformer.apply`.

    Raises:
        ValueError: `remat` is not the name of a policy.
    """
    if remat not in _REMAT:
        raise ValueError(f"remat {remat!r}; want one of {', '.join(map(repr, _REMAT))}")

    def step(x: _Streams, layer_params: Mapping[str, Any]) -> tuple[_Streams, None]:
        if sharding is None:
            return layer(x, layer_params), None
        x = layer(x, sharding.layer(layer_params, compute_dtype))
        return jax.tree.map(sharding.rows, x), None

    if sharding is not None:
        x = jax.tree.map(sharding.rows, x)
    run = _REMAT[remat](step)
    if isinstance(params["layers"], tuple):  # the decoder's layout
        for layer_params in params["layers"]:
            x, _ = run(x, layer_params)
        return x
    return jax.lax.scan(run, x, params["layers"])[0]
