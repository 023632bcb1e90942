# SPDX-License-Identifier: Apache-2.0
"""The compiled programs of a decoder, shared by all sessions that decode with it.

Invariant: programs are cached by number of slots and use of top-k or top-p, so a new temperature or
weight version compiles nothing.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec, Sharding

from tba_jax.decoding.programs import Caches, Prefixes, Programs, empty_slots
from tba_jax.decoding.shardings import cache_sharding
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.devices.sharding import placed_shapes
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models import attention, kv_cache, transformer
from tba_jax.models.transformer import Params, TransformerConfig

CHUNK_STEPS = 8
"""Default number of decode steps between two checks by the host."""
# Maximum tokens of a call that reads prompts: enough to be limited by arithmetic on every device,
# few enough that attention scores fit in memory with the cache. After kept prefixes, scores of
# every column of the cache are in memory.
PREFILL_TOKENS, EXTEND_TOKENS = 8192, 2048
# Compiled numbers of tokens after a kept prefix; a cache's length is one, too.
ADDED_TOKENS = (8, 32, 128, 512)


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
        extend, copy, run_chunk: the jitted methods of `Programs`.
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
        self.config, self.compute_dtype = config, jnp.dtype(compute_dtype)
        self.eos_ids, self.pad_id = tuple(eos_ids), pad_id
        self.stop_strings: StopStrings | None = None
        self.prompt_buckets = tuple(prompt_buckets)
        self.max_length, self.chunk_steps = max_length, chunk_steps
        self.cache_length = -(-(max_length + chunk_steps) // 8) * 8
        self.cache_sharding = cache_sharding(config, site.mesh) if site.is_divided else None
        self._locked = site.locked
        self._traced: set[tuple[Any, ...]] = set()
        kernels = attention.Kernels(config.attention, site.platform, self.cache_sharding)
        programs = Programs(config, self.compute_dtype, kernels, chunk_steps, pad_id)
        self.extend = self._jit(programs.extend)
        self.copy = self._jit(programs.copy, donate_argnums=0)
        self.run_chunk = self._jit(
            programs.run_chunk, donate_argnums=1, static_argnames="is_truncated"
        )
        unstack = functools.partial(transformer.unstack_layers, config=config)
        self._unstack = site.locked(jax.jit(unstack))

    @property
    def compile_count(self) -> int:
        """Number of distinct programs traced so far."""
        return len(self._traced)

    def _jit(self, program: Callable[..., Any], **options: Any) -> Any:
        """Return the jitted program; count each trace."""

        def placed(x: jax.Array) -> jax.Array:
            if self.cache_sharding is None or x.ndim < 3:  # tokens and log-probs have two axes
                return x
            return jax.lax.with_sharding_constraint(x, self.cache_sharding)

        @functools.wraps(program)
        def traced(*args: Any, **kwargs: Any) -> Any:
            shapes = tuple(x.shape for x in jax.tree.leaves(args))
            self._traced.add((program.__name__, shapes, *kwargs.items()))
            return jax.tree.map(placed, program(*args, **kwargs))

        return self._locked(jax.jit(traced, **options))

    def abstract_cache(
        self, num_rows: int, length: int | None = None, where: Sharding | None = None
    ) -> Caches:
        """Return caches as ShapeDtypeStructs, on a mesh sharded by `cache_sharding`.

        Args:
            length: number of columns; None: `cache_length`.
            where: sharding on one device.
        """
        where, length = self.cache_sharding or where, length or self.cache_length
        shapes = kv_cache.abstract_layers(self.config, num_rows, length, self.compute_dtype)
        return placed_shapes(shapes, jax.tree.map(lambda _: where, shapes)) if where else shapes

    def new_cache(self, num_rows: int, where: Sharding) -> Caches:
        """Return caches of zeros; on one device, on that of `where`."""
        shapes = self.abstract_cache(num_rows, where=where)

        def zeros(x: jax.ShapeDtypeStruct) -> jax.Array:
            return jnp.zeros(x.shape, x.dtype, device=x.sharding)

        return self._locked(lambda: jax.tree.map(zeros, shapes))()

    def weights(self, params: Params) -> Params:
        """Return params in the decoder's layout, a tuple of layers; convert them if necessary."""
        return params if isinstance(params["layers"], tuple) else self._unstack(params)

    def lower_all(
        self,
        weights: Params,
        *,
        num_slots: int,
        prompt_length: int,
        prefill_prompts: int = 1,
        num_stop_ids: int = 1,
    ) -> dict[str, Callable[[], jax.stages.Lowered]]:
        """Return {name: function that lowers the program} of a session of these sizes.

        Lowering needs neither weights nor attached devices; `jax.experimental.topologies` suffices.
        Each lowering counts as a trace.

        Args:
            weights: return value of `abstract_weights`, on the devices to compile for.
            prompt_length: padded length of the prompts.
            prefill_prompts: prompts per prefill call.
            num_stop_ids: maximum number of stop ids of a request.
        """
        # Host arguments have no sharding; caches are on the devices of the weights.
        where = jax.tree.leaves(weights)[0].sharding
        if isinstance(where, NamedSharding):
            where = NamedSharding(where.mesh, PartitionSpec())

        def ints(*shape: int) -> jax.ShapeDtypeStruct:
            return jax.ShapeDtypeStruct(shape, jnp.int32)

        def lower(program: Any, *args: Any, **static: Any) -> Callable[[], jax.stages.Lowered]:
            return lambda: program.lower(*args, **static)

        length, n, p = self.cache_length, num_slots, prefill_prompts
        history = self.abstract_cache(n, where=where)
        read = self.abstract_cache(p, prompt_length, where)
        rows = ints(max(1, EXTEND_TOKENS // length))
        added = ints(*rows.shape, length)  # an observation may be as long as a cache
        chunk = self.run_chunk, weights, history, empty_slots(n, num_stop_ids)
        return {
            "prefill": lower(self.extend, weights, ints(p, prompt_length), ints(p), None),
            "extend": lower(self.extend, weights, added, rows, Prefixes(history, rows, rows)),
            "copy": lower(self.copy, history, read, ints(n), ints(n)),
            "chunk": lower(*chunk, is_truncated=False),
            "chunk_truncated": lower(*chunk, is_truncated=True),
        }
