# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of a decoder, shared by all sessions that decode with it.

Invariant: programs are cached by number of slots and use of top-k or top-p, so a new temperature or
weight version compiles nothing.
"""

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, NamedSharding, PartitionSpec
from jaxtyping import Array

from tba_jax.decoding import programs
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.devices.sharding import AXIS_RULES
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models import attention, kv_cache, transformer
from tba_jax.models.kv_cache import LayerCache
from tba_jax.models.transformer import Params, TransformerConfig

CHUNK_STEPS = 8
"""Default number of decode steps between two checks by the host."""


class Compiled:
    """The jitted programs of a decoder for one architecture; thread-safe.

    Programs run on the devices of the weights: one device, or the devices of a mesh.

    Args:
        compute_dtype: dtype of activations, and of cached keys and values.
        eos_ids: tokens that end a response unless a request says otherwise; may be empty.
        pad_id: token at positions after the end of a response.
        prompt_buckets: padded prompt lengths, ascending.
        max_length: maximum number of tokens of a prompt and its response.
        chunk_steps: steps between two checks by the host. A finished slot idles for half a chunk on
            average; each chunk costs one round trip to the device.
        site: devices over which weights and caches are sharded; default: the device of the weights.

    Attributes:
        stop_strings: texts that also end a response; initially None.
        cache_length: columns of every cache, for `max_length` tokens and one chunk.
        extend, copy, run_chunk: the jitted functions of `programs`.
    """

    def __init__(
        self,
        config: TransformerConfig,
        *,
        compute_dtype: Any,
        eos_ids: Sequence[int],
        pad_id: int,
        prompt_buckets: Sequence[int],
        max_length: int,
        chunk_steps: int = CHUNK_STEPS,
        site: Site = ANY_DEVICE,
    ):
        if max_length > config.max_positions:
            raise ValueError(
                f"decoding got max_length = {max_length}; the model has {config.max_positions} "
                "positions. Shorten the prompts or the responses"
            )
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.eos_ids = tuple(eos_ids)
        self.stop_strings: StopStrings | None = None
        self.pad_id = pad_id
        self.prompt_buckets = tuple(prompt_buckets)
        self.max_length = max_length
        self.chunk_steps = chunk_steps
        self.cache_length = -(-(max_length + chunk_steps) // 8) * 8
        self.cache_sharding = cache_sharding(config, site.mesh) if site.is_divided else None
        self._locked = site.locked
        self._traced: set[tuple[Any, ...]] = set()
        static = {
            "config": config,
            "compute_dtype": self.compute_dtype,
            "cache_sharding": self.cache_sharding,
        }
        kernels = attention.Kernels(config.attention, site.platform, self.cache_sharding)
        self.extend = self._jit(programs.extend, **static, kernels=kernels)
        self.copy = self._jit(programs.copy, donated=0)
        self.run_chunk = self._jit(
            programs.run_chunk, donated=1, **static, num_steps=chunk_steps, pad_id=pad_id
        )
        self._unstack = site.locked(
            jax.jit(functools.partial(transformer.unstack_layers, config=config))
        )

    @property
    def compile_count(self) -> int:
        """Number of distinct programs traced so far."""
        return len(self._traced)

    def _jit(
        self, function: Callable[..., Any], *, donated: int | tuple[()] = (), **fixed: Any
    ) -> Any:
        """Return the jitted function with some keyword arguments fixed; count each trace."""

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            shapes = tuple(x.shape for x in jax.tree.leaves(args))
            self._traced.add((function, shapes, tuple(kwargs.items())))
            out = function(*args, **kwargs, **fixed)
            if self.cache_sharding is None:
                return out
            return jax.tree.map(
                lambda x: (  # tokens and log-probs have two axes, caches more
                    x if x.ndim < 3 else jax.lax.with_sharding_constraint(x, self.cache_sharding)
                ),
                out,
            )

        static = () if function is not programs.run_chunk else ("is_truncated",)
        return self._locked(jax.jit(traced, donate_argnums=donated, static_argnames=static))

    def new_cache(self, num_rows: int, where: jax.sharding.Sharding) -> tuple[LayerCache, ...]:
        """Return caches of zeros on the devices of `where`, sharded by `cache_sharding` if any."""
        where = self.cache_sharding or where

        def zeros(x: jax.ShapeDtypeStruct) -> Array:
            return jnp.zeros(x.shape, x.dtype, device=where)

        return self._locked(lambda: jax.tree.map(zeros, self._abstract_cache(num_rows)))()

    def cache_bytes(self, num_rows: int, length: int | None = None) -> int:
        """Return the bytes of caches per device, without padding of the device's layout.

        Args:
            length: number of columns; None: `cache_length`.
        """
        sharding = self.cache_sharding
        return sum(
            math.prod(x.shape if sharding is None else sharding.shard_shape(x.shape))
            * x.dtype.itemsize
            for x in jax.tree.leaves(self._abstract_cache(num_rows, length))
        )

    def _abstract_cache(self, num_rows: int, length: int | None = None) -> tuple[LayerCache, ...]:
        length = self.cache_length if length is None else length
        return kv_cache.abstract_layers(self.config, num_rows, length, self.compute_dtype)

    def weights(self, params: Params) -> Params:
        """Return params in the decoder's layout, a tuple of layers; convert them if necessary."""
        return params if isinstance(params["layers"], tuple) else self._unstack(params)


def cache_sharding(config: TransformerConfig, mesh: Mesh) -> NamedSharding:
    """Return the sharding of a cache [n g c e] and of states: over key/value heads.

    With fewer heads than devices, neighbouring devices replicate a head: the mesh axis is split in
    two. If heads were not sharded, the compiler would copy each device's head out of the cache in
    every chunk: half a cache more for 2 heads on 4 devices.
    """
    axis = AXIS_RULES["kv_heads"].mesh_axis
    if axis not in mesh.shape:
        return NamedSharding(mesh, PartitionSpec())
    divided = math.gcd(mesh.shape[axis], config.num_kv_heads, config.delta_key_heads)
    copies = mesh.shape[axis] // divided
    if copies > 1:
        at = mesh.axis_names.index(axis)
        before, after = mesh.devices.shape[:at], mesh.devices.shape[at + 1 :]
        names = (*mesh.axis_names[:at], axis, f"{axis}_copies", *mesh.axis_names[at + 1 :])
        mesh = Mesh(mesh.devices.reshape(*before, divided, copies, *after), names)
    return NamedSharding(mesh, PartitionSpec(None, axis))
