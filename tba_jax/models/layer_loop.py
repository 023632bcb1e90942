# SPDX-License-Identifier: Apache-2.0
"""Loop over layers, and rematerialisation in the backward pass.

Invariant: the weights of one layer are gathered once per pass, whatever uses them.
"""

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp

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
    layers: Sequence[Callable[[_Streams, Mapping[str, Any]], _Streams]],
    x: _Streams,
    params: Mapping[str, Any],
    *,
    compute_dtype: Any,
    remat: Remat,
    sharding: Any,
) -> _Streams:
    """Return `x` after all layers.

    Args:
        layers: (x, parameters of a layer) -> x after it, for each kind of the pattern in turn; the
            loop scans over repeats of the pattern.
        x: residual streams, a tree of arrays [b ...].
        params, compute_dtype, remat, sharding: as in `transformer.apply`.

    Raises:
        ValueError: `remat` is not the name of a policy.
    """
    if remat not in _REMAT:
        raise ValueError(f"remat {remat!r}; want one of {', '.join(map(repr, _REMAT))}")

    def step_of(layer: Callable[[_Streams, Mapping[str, Any]], _Streams]) -> Callable[..., Any]:
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

    def run_pattern(x: _Streams, several: Mapping[str, Any]) -> tuple[_Streams, None]:
        for step, layer_params in zip(steps, _unstacked(several), strict=False):
            x, _ = step(x, layer_params)
        return x, None

    num, period = len(jax.tree.leaves(stacked)[0]), len(steps)
    whole = num // period * period
    repeats = jax.tree.map(lambda leaf: leaf[:whole].reshape(-1, period, *leaf.shape[1:]), stacked)
    x, _ = jax.lax.scan(run_pattern, x, repeats)
    if whole < num:  # layers after the last whole repeat
        x, _ = run_pattern(x, jax.tree.map(lambda leaf: leaf[whole:], stacked))
    return x


@jax.custom_vjp
def _unstacked(layers: Mapping[str, Any]) -> tuple[Mapping[str, Any], ...]:
    """Return the parameters of each layer.

    The gradient stacks those of the layers, where that of indexing adds up arrays of zeros.
    """
    num = len(jax.tree.leaves(layers)[0])
    return tuple(jax.tree.map(operator.itemgetter(i), layers) for i in range(num))


def _unstacked_forward(layers: Mapping[str, Any]) -> tuple[Any, None]:
    return _unstacked(layers), None


def _unstacked_backward(_: None, cotangents: tuple[Any, ...]) -> tuple[Any]:
    return (jax.tree.map(lambda *leaves: jnp.stack(leaves), *cotangents),)


_unstacked.defvjp(_unstacked_forward, _unstacked_backward)
