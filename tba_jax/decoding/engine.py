# SPDX-License-Identifier: Apache-2.0
"""The decoding engine: prompts in, sampled responses out as they finish.

`Decoder` holds the compiled programs, `Session` (in `session`) the slots of one stream of requests.
Neither knows text, rewards, tasks or training. The invariants they own: a response is (tokens up to
and including the first stop token, log-probs of the distribution actually sampled from), and at a
fixed number of slots and cache length it depends on its own prompt, key and settings only.
"""

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.decoding import programs
from tba_jax.decoding.session import SamplingSettings, Session
from tba_jax.devices.device_turns import InTurn, no_turns
from tba_jax.models import transformer
from tba_jax.models.attention import Implementation, KVCache
from tba_jax.models.transformer import Params, TransformerConfig

CHUNK_STEPS = 8
"""Steps between two looks of the host, unless a decoder is made with another number."""


class Decoded(NamedTuple):
    """Responses of one `decode` call; host arrays.

    Attributes:
        tokens: int32 [p k t], `pad_id` after the end; t = max_new_tokens.
        lengths: int32 [p k], tokens of each response, the stop token included.
        token_logprobs: float32 [p k t], of the distribution sampled from; 0 at padding.
        has_eos: bool [p k], False where the length limit cut the response.
        version_min, version_max: int32 [p k], span of the versions that read its prompt or drew it.
    """

    tokens: np.ndarray
    lengths: np.ndarray
    token_logprobs: np.ndarray
    has_eos: np.ndarray
    version_min: np.ndarray
    version_max: np.ndarray


class Decoder:
    """Compiled decoding for one architecture; safe to share between threads.

    Runs where the weights live, on one device or sharded over a mesh. Programs are kept per cache
    length and kind of sampling; neither a temperature nor a new weight version compiles one.

    Args:
        config: the architecture.
        compute_dtype: dtype of activations.
        eos_ids: tokens that end a response unless a request says otherwise; may be empty.
        pad_id: token written after the end.
        prompt_buckets: ascending prompt lengths to pad to.
        max_length: longest prompt and response together.
        cache_dtype: dtype of cached keys and values; None: compute_dtype.
        chunk_steps: steps between two looks of the host. A finished slot idles for half a chunk
            on average; each chunk costs one round trip to the device.
        cache_sharding: sharding of a cache [n g c e] on a mesh; None: the device of the weights.
        implementation: who computes attention.
        in_turn: where other threads launch programs on the mesh, makes every program wait for its
            turn.
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
        cache_dtype: Any = None,
        chunk_steps: int = CHUNK_STEPS,
        cache_sharding: jax.sharding.NamedSharding | None = None,
        implementation: Implementation = "auto",
        in_turn: InTurn = no_turns,
    ):
        if max_length > config.max_positions:
            raise ValueError(
                f"decoding got max_length = {max_length}; the model has {config.max_positions} "
                "positions. Shorten the prompts or the responses"
            )
        self.config = config
        self.compute_dtype = jnp.dtype(compute_dtype)
        self.cache_dtype = self.compute_dtype if cache_dtype is None else jnp.dtype(cache_dtype)
        self.eos_ids = tuple(eos_ids)
        self.pad_id = pad_id
        self.prompt_buckets = tuple(prompt_buckets)
        self.max_length = max_length
        self.chunk_steps = chunk_steps
        self.cache_lengths = cache_lengths(max_length + chunk_steps)
        self.cache_sharding = cache_sharding
        self._in_turn = in_turn
        self._traced: set[tuple[Any, ...]] = set()
        static = {
            "config": config,
            "compute_dtype": self.compute_dtype,
            "implementation": implementation,
            "cache_sharding": cache_sharding,
        }
        self.prefill = self._jit(
            programs.prefill, "prefill", **static, cache_dtype=self.cache_dtype
        )
        self.admit = self._jit(programs.admit, "admit", donate_argnums=0)
        self.resize = self._jit(programs.resize, "resize", static_argnames="length")
        self.take = self._jit(programs.take, "take")
        self.run_chunk = self._jit(
            programs.run_chunk,
            "chunk",
            donate_argnums=1,
            static_argnames=("mode", "is_truncated", "has_minimum"),
            **static,
            num_steps=chunk_steps,
            pad_id=pad_id,
        )
        self._new_cache: dict[jax.sharding.Sharding, Any] = {}
        self._unstack = in_turn(
            jax.jit(functools.partial(transformer.unstack_layers, config=config))
        )

    @property
    def compile_count(self) -> int:
        """Number of distinct programs traced so far."""
        return len(self._traced)

    def _jit(
        self,
        function: Callable[..., Any],
        name: str,
        *,
        donate_argnums: int | tuple[int, ...] = (),
        static_argnames: str | tuple[str, ...] = (),
        **fixed: Any,
    ) -> Any:
        """Jitted `function` with some keywords fixed; each trace is counted."""

        @functools.wraps(function)
        def traced(*args: Any, **kwargs: Any) -> Any:
            shapes = tuple(x.shape for x in jax.tree.leaves(args))
            self._traced.add((name, shapes, tuple(sorted(kwargs.items()))))
            out = function(*args, **kwargs, **fixed)
            if self.cache_sharding is None:
                return out
            return jax.tree.map(
                lambda x: (
                    x if x.ndim != 4 else jax.lax.with_sharding_constraint(x, self.cache_sharding)
                ),
                out,
            )

        program = jax.jit(traced, donate_argnums=donate_argnums, static_argnames=static_argnames)
        return self._in_turn(program)

    def new_cache(
        self, num_slots: int, length: int, where: jax.sharding.Sharding
    ) -> tuple[KVCache, ...]:
        """Zeroed caches on the devices of `where`, sharded by cache_sharding when there is one."""
        where = self.cache_sharding or where
        if where not in self._new_cache:
            self._new_cache[where] = self._in_turn(
                jax.jit(
                    functools.partial(programs.init_history, self.config, dtype=self.cache_dtype),
                    static_argnums=(0, 1),
                    out_shardings=where,
                )
            )
        return self._new_cache[where](num_slots, length)

    def weights(self, params: Params) -> Params:
        """Params in the decoder's layout, a tuple of layers; those that have it pass through."""
        return params if isinstance(params["layers"], tuple) else self._unstack(params)

    def session(
        self,
        params: Params,
        *,
        num_slots: int,
        min_slots: int | None = None,
        prefill_prompts: int = 1,
        num_stop_ids: int | None = None,
        version: int = 0,
    ) -> Session:
        """An empty session on the devices of `params`.

        Args:
            params: weights, stacked or in the decoder's layout.
            num_slots: unfinished responses at a time.
            min_slots: when the queue is empty and half the slots are free, their number is halved
                down to this; None: to an eighth. Set it to num_slots for responses that depend, to
                the last bit, on nothing but their own prompt, key and settings.
            prefill_prompts: prompts per prefill call (fewer where they are long).
            num_stop_ids: most stop ids of a request; None: as many as eos_ids.
            version: of the weights.
        """
        return Session(self, params, num_slots, min_slots, prefill_prompts, num_stop_ids, version)

    def decode(
        self,
        params: Params,
        prompts: Sequence[np.ndarray],
        *,
        num_samples: int,
        key: Array,
        settings: SamplingSettings,
        num_slots: int | None = None,
        min_slots: int | None = None,
        version: int = 0,
        newest: Callable[[], tuple[int, Params] | None] | None = None,
        temperatures: np.ndarray | None = None,
    ) -> Decoded:
        """Draw `num_samples` responses to each prompt.

        Args:
            params: weights, on the devices to run on.
            prompts: p rows of token ids, each at least one token long.
            num_samples: S.
            key: JAX PRNG key; sample j of prompt i draws from fold_in(key, i * S + j).
            settings: how to draw.
            num_slots: unfinished responses at a time; None: all.
            min_slots: as in `session`.
            version: of `params`.
            newest: asked between chunks for (version, params); a newer version is swapped in.
            temperatures: float [p S], one for each response; None: that of the settings.

        Raises:
            ValueError: a prompt or a setting that cannot be decoded.
        """
        for name, value in (("number of prompts", len(prompts)), ("num_samples", num_samples)):
            if value < 1:
                raise ValueError(f"decode() got {name} = {value}; wanted at least 1")
        p, k, t = len(prompts), num_samples, settings.max_new_tokens
        num_slots = min(p * k, num_slots or p * k)
        session = self.session(
            params,
            num_slots=num_slots,
            min_slots=min_slots,
            prefill_prompts=min(p, -(-num_slots // k)),
            num_stop_ids=len(settings.stop_ids) if settings.stop_ids is not None else None,
            version=version,
        )
        keys = row_keys(key, p * k).reshape(p, k, 2)
        for i, (prompt, own) in enumerate(zip(prompts, keys, strict=True)):
            session.submit(prompt, own, settings, None if temperatures is None else temperatures[i])
        out = Decoded(
            tokens=np.full((p, k, t), self.pad_id, np.int32),
            lengths=np.zeros((p, k), np.int32),
            token_logprobs=np.zeros((p, k, t), np.float32),
            has_eos=np.zeros((p, k), bool),
            version_min=np.zeros((p, k), np.int32),
            version_max=np.zeros((p, k), np.int32),
        )
        for response in session.run(newest):
            at = (response.request, response.sample)
            n = len(response.tokens)
            out.tokens[at][:n] = response.tokens
            out.token_logprobs[at][:n] = response.token_logprobs
            out.lengths[at] = n
            out.has_eos[at] = response.has_eos
            out.version_min[at] = response.version_min
            out.version_max[at] = response.version_max
        return out


def row_keys(key: Array, num_rows: int) -> np.ndarray:
    """uint32 [num_rows 2]: key data of fold_in(key, row) for every row."""
    size = 1 << (num_rows - 1).bit_length()  # few sizes are compiled
    return np.asarray(_fold_rows(np.asarray(jax.random.key_data(key)), size))[:num_rows]


@functools.partial(jax.jit, static_argnums=1)
def _fold_rows(key_data: Array, num_rows: int) -> Array:
    key = jax.random.wrap_key_data(key_data)
    return jax.random.key_data(
        jax.vmap(lambda row: jax.random.fold_in(key, row))(jnp.arange(num_rows))
    )


def cache_lengths(longest: int, smallest: int = 64) -> tuple[int, ...]:
    """Cache lengths that are compiled for, ascending: 64, 96, 128, 192, 256, ..., the longest.

    Each is at most 1.5 times the one before, so attention reads at most half more than is live.
    Multiples of 8; the last holds `longest`.
    """
    last = -(-longest // 8) * 8
    lengths, size = [], smallest
    while size < last:
        lengths += [size] if size + size // 2 >= last else [size, size + size // 2]
        size *= 2
    return (*lengths, last)
