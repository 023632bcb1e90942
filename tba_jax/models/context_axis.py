# SPDX-License-Identifier: Apache-2.0
"""Sequences divided over the mesh axis `context`: each device has a part of every row.

Attention gathers keys and values of all parts, which are few with grouped queries, and each device
computes the outputs of its own queries. All other values are computed where the token is stored.
Invariant: results are those of one device, up to rounding.

Splash attention skips keys after a query, so that later parts would take longer than earlier ones.
For it, devices exchange halves of their queries: device i computes the parts i and 2n - 1 - i of
2n. The other implementations compute all pairs of a full layer.
"""

from typing import Any, cast

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array, Float

from tba_jax.devices.sharding import CONTEXT, batch_axes
from tba_jax.models import attention
from tba_jax.models.config import SPLASH_TOKENS


def num_parts(mesh: Mesh | None) -> int:
    """Return the number of parts into which a mesh divides sequences."""
    return 1 if mesh is None else mesh.shape.get(CONTEXT, 1)


def row_axes(mesh: Mesh) -> tuple[str, ...]:
    """Return the mesh axes that divide rows; with an axis `context`, the rows of `as_rows`."""
    return (CONTEXT,) * (CONTEXT in mesh.shape) + batch_axes(mesh)


def as_rows(x: Float[Array, "b s *rest"], mesh: Mesh | None) -> Float[Array, "nb s_n *rest"]:
    """Return the n parts of each sequence as rows of their own; nothing moves between devices.

    The layers compute such rows: a product merges the axes of rows and positions, which the
    partitioner cannot do if another axis of the mesh divides positions.

    Raises:
        ValueError: the mesh does not divide the sequences.
    """
    n, (b, s) = num_parts(mesh), x.shape[:2]
    if mesh is None or n == 1:
        return x
    if s % n:
        raise ValueError(
            f"mesh.context={n} does not divide rows of {s} tokens. Set "
            f"--config.batch.packed_length={-(-s // n) * n}, or --config.mesh.context=1"
        )
    x = jnp.swapaxes(x.reshape(b, n, s // n, *x.shape[2:]), 0, 1)
    return _constrained(x.reshape(n * b, *x.shape[2:]), mesh, row_axes(mesh))


def as_sequences(x: Float[Array, "nb s_n *rest"], mesh: Mesh | None) -> Float[Array, "b s *rest"]:
    """Inverse of `as_rows`."""
    n = num_parts(mesh)
    if mesh is None or n == 1:
        return x
    x = jnp.swapaxes(x.reshape(n, -1, *x.shape[1:]), 0, 1)
    return _constrained(x.reshape(len(x), -1, *x.shape[3:]), mesh, batch_axes(mesh), CONTEXT)


def shifted(x: Float[Array, "b s *rest"], mesh: Mesh) -> Float[Array, "b s *rest"]:
    """Return the entry before each position; zeros at the first."""
    n, where = num_parts(mesh), PartitionSpec(batch_axes(mesh), CONTEXT)

    def on_device(x: Array) -> Array:
        before = jax.lax.ppermute(x[:, -1:], CONTEXT, [(i, i + 1) for i in range(n - 1)])
        return jnp.concatenate([before, x[:, :-1]], axis=1)

    return jax.shard_map(on_device, mesh=mesh, in_specs=where, out_specs=where)(x)


def gathered(x: Float[Array, "b s *rest"], mesh: Mesh | None) -> Float[Array, "b s *rest"]:
    """Return whole sequences on every device of the axis."""
    if mesh is None or num_parts(mesh) == 1:
        return x
    return _constrained(x, mesh, batch_axes(mesh))


def _constrained(x: Array, mesh: Mesh, *spec: Any) -> Array:
    return jax.lax.with_sharding_constraint(x, NamedSharding(mesh, PartitionSpec(*spec)))


def attend_causal(
    q: Float[Array, "nb t g r e"],
    k: Float[Array, "nb t g e"],
    v: Float[Array, "nb t g e"],
    visible: attention.Visible,
    *,
    scores: attention.Scores,
    implementation: attention.Implementation,
    sharding: NamedSharding | None,
) -> Float[Array, "nb t g r e"]:
    """Return `attention.attend_causal` of n parts of each sequence, from `as_rows`.

    Args:
        q, k, v, scores, implementation: as in that function; splash needs parts of multiples of 256
            tokens and no shared prompts, else the einsum replaces it.
        visible: visibility of keys in whole sequences, [b s].
        sharding: sharding of keys and values as a cache [nb g t e].
    """
    mesh = None if sharding is None else cast(Mesh, sharding.mesh)
    if sharding is None or mesh is None or num_parts(mesh) == 1:
        how: Any = {"scores": scores, "implementation": implementation, "sharding": sharding}
        return attention.attend_causal(q, k, v, visible, **how)
    _, heads = sharding.spec
    n = num_parts(mesh)
    implementation = scores.allowed(implementation, q.shape[-1], length=n * q.shape[1])
    kernel, of_kernel = None, None
    if implementation == "splash" and visible.prompts is None and q.shape[1] % SPLASH_TOKENS == 0:
        from tba_jax.models import splash

        num_heads = q.shape[2] * q.shape[3] // (1 if heads is None else mesh.shape[heads])
        kernel, of_kernel = splash.balanced_kernel(num_heads, n * q.shape[1], mesh)
    elif implementation == "splash":
        implementation = "xla_tpu"

    def on_device(
        q: Array, k: Array, v: Array, visible: attention.Visible, sinks: Array | None, kernel: Any
    ) -> Array:
        k, v = (jax.lax.all_gather(x, CONTEXT, axis=1, tiled=True) for x in (k, v))
        first = jax.lax.axis_index(CONTEXT) * q.shape[1]
        if kernel is None:
            return attention.attend_part(
                q, k, v, visible, first, scores._replace(sinks=sinks), implementation
            )
        of_keys = visible.mask if visible.segments is None else visible.segments
        of_queries = jax.lax.dynamic_slice_in_dim(of_keys, first, q.shape[1], 1)
        q, of_queries = _balanced(q, n), _balanced(of_queries, n)
        out = splash.attend_part(kernel, q, k, v, of_queries, of_keys)
        return _ordered(out, n)

    of_tokens = PartitionSpec(row_axes(mesh), None, heads)
    of_sequences = PartitionSpec(batch_axes(mesh))
    return jax.shard_map(
        on_device,
        mesh=mesh,
        in_specs=(
            *(of_tokens, of_tokens, of_tokens),
            jax.tree.map(lambda _: of_sequences, visible),
            PartitionSpec(heads),
            of_kernel,
        ),
        out_specs=of_tokens,
        check_vma=False,
    )(q, k, v, visible, scores.sinks, kernel)


def _balanced(x: Float[Array, "b t *rest"], n: int) -> Float[Array, "b t *rest"]:
    """Give device i the parts i and 2n - 1 - i; before, it has the parts 2i and 2i + 1 of 2n."""
    even, odd = jnp.split(x, 2, axis=1)
    to = [_device_of(part, n) for part in range(2 * n)]
    even = jax.lax.ppermute(even, CONTEXT, [(i, to[2 * i]) for i in range(n)])
    odd = jax.lax.ppermute(odd, CONTEXT, [(i, to[2 * i + 1]) for i in range(n)])
    is_even = jax.lax.axis_index(CONTEXT) % 2 == 0
    pair = jnp.where(is_even, even, odd), jnp.where(is_even, odd, even)
    return jnp.concatenate(pair, axis=1)


def _ordered(x: Float[Array, "b t *rest"], n: int) -> Float[Array, "b t *rest"]:
    """Inverse of `_balanced`."""
    first, last = jnp.split(x, 2, axis=1)
    is_even = jax.lax.axis_index(CONTEXT) % 2 == 0
    even, odd = jnp.where(is_even, first, last), jnp.where(is_even, last, first)
    to = [_device_of(part, n) for part in range(2 * n)]
    even = jax.lax.ppermute(even, CONTEXT, [(to[2 * i], i) for i in range(n)])
    odd = jax.lax.ppermute(odd, CONTEXT, [(to[2 * i + 1], i) for i in range(n)])
    return jnp.concatenate([even, odd], axis=1)


def _device_of(part: int, n: int) -> int:
    return min(part, 2 * n - 1 - part)
