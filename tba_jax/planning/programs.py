# SPDX-License-Identifier: Apache-2.0
"""Device programs of a run, ready to be lowered from its config and shapes alone.

The functions are those that trainer and searchers of a run call, with shapes in place of arrays.
The shapes are the largest of a run: the longest prompt and response buckets, full slots, and a full
round. The work of a program is the bytes and FLOPs of one execution on each device, by arithmetic
(`roofline`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from tba_jax.config.resolved import remat_of, writes_versions
from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.programs import empty_slots
from tba_jax.decoding.shardings import abstract_weights
from tba_jax.devices.placement import Division
from tba_jax.devices.sharding import placed_shapes
from tba_jax.devices.site import Site
from tba_jax.flow.layout import Batch
from tba_jax.models import lora
from tba_jax.models.quantized import Quantization
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, abstract_params, num_params
from tba_jax.planning import roofline
from tba_jax.planning.estimates import shard_bytes
from tba_jax.planning.verdict import Group, Program
from tba_jax.run import model_parts
from tba_jax.train.state import StepShardings, TrainState

FROZEN = "frozen parameters"
"""Kind of bytes: the base of adapters."""
# Share of a pass over the layers that `model.remat=layers` repeats in the backward pass: no
# gradient needs the last product of a layer (0.6 to 0.76 in GPT-NeoX, Llama and Qwen shapes).
_REPEATED_SHARE = 0.75
_WAITING = "caches of waiting conversations"


class Ids(Tokenizer):
    """Fields of a tokenizer that a plan needs; the values of the IDs change no shape."""

    def __init__(self) -> None:
        self.eos_ids, self.pad_id = (0,), 0

    def decode(self, ids: Any, skip_special: bool = True) -> str:
        """Return an empty string, because a plan has no tokens to decode."""
        return ""


@dataclasses.dataclass(frozen=True)
class Planned:
    """One program of one device group.

    Attributes:
        program: name and figures, without those of the compiler.
        lower: function that lowers the program.
        resident: kind -> bytes per device of the arguments that stay in memory.
        result: memory kind of the results that stay in memory; "outputs" if none stay.
    """

    program: Program
    lower: Callable[[], jax.stages.Lowered]
    resident: dict[str, float]
    result: str = "outputs"


def plan_programs(
    config: Config, model_config: TransformerConfig, placement: Division
) -> list[Planned]:
    """Return every program, the trainer's first.

    Raises:
        ValueError: the mesh does not divide the model, or the model's context is too short.
    """
    run = _Run(config, model_config, placement)
    return [*_trainer_programs(run), *_searcher_programs(run)]


def groups_of(
    config: Config, model_config: TransformerConfig, placement: Division
) -> tuple[Group, Group]:
    """Return the trainer and a searcher, with the bytes per device of what they hold."""
    run = _Run(config, model_config, placement)
    trainer, mesh = run.held, placement.trainer_mesh
    if config.mesh.data > 1:
        # Each replica writes a part of the checkpoint; Orbax slices it on the device.
        saved = shard_bytes(run.state) / config.mesh.data
        trainer |= {"parts of the state while it is saved": saved}
    searcher, weights = dict[str, float](), run.weights(config.search.quantization)
    if run.policy.adapters is not None:
        # Only adapted weights have a merged copy; the other weights are those of the base.
        searcher[FROZEN] = shard_bytes(run.base)
        weights = lora.parts(weights, weights, run.policy)[0]
    searcher |= {"weights in use": shard_bytes(weights), "next weights": shard_bytes(weights)}
    exact = shard_bytes(run.weights())
    if writes_versions(config) and run.policy.adapters is None:
        # The first searcher of a host reads the weights in the trainer's layout, then converts
        # them.
        searcher["weights being read"] = exact
    if config.eval.gold:
        searcher["start model, for evaluation"] = exact
    size = placement.searcher_meshes[0].size
    return (
        Group(
            devices=mesh.size,
            residents=trainer,
            mesh=" x ".join(f"{axis} {n}" for axis, n in mesh.shape.items()),
        ),
        Group(devices=size, residents=searcher, transients=run.caches, mesh=f"model {size}"),
    )


@dataclasses.dataclass(frozen=True)
class _Run:
    """A run as shapes: what its trainer and the first searcher of its last host hold."""

    config: Config
    model_config: TransformerConfig
    placement: Division

    @functools.cached_property
    def policy(self) -> TransformerConfig:
        return model_parts.policy_config(self.config, self.model_config)

    @functools.cached_property
    def shardings(self) -> StepShardings:
        mesh = self.placement.trainer_mesh
        return model_parts.make_step_shardings(self.config, self.model_config, mesh)

    @property
    def state(self) -> TrainState:
        return self.shardings.abstract

    @functools.cached_property
    def frozen(self) -> tuple:
        """The base of the adapters, which is the last argument of the train step; or nothing."""
        base = self.shardings.base
        dtype = self.config.model.param_dtype
        return (_abstract(abstract_params(self.model_config, dtype), base),) if base else ()

    @property
    def held(self) -> dict[str, float]:
        """Bytes per device of the train state and of the base of adapters, by kind."""
        kinds = {
            "parameters": self.state.params,
            "optimiser state": self.state.opt_state,
            "reference parameters": self.state.reference_params,
            FROZEN: self.frozen,
        }
        return {kind: shard_bytes(tree) for kind, tree in kinds.items() if jax.tree.leaves(tree)}

    @functools.cached_property
    def decoder(self) -> Decoder:
        site = Site(self.placement.searcher_meshes[0])
        return model_parts.make_decoder(self.config, self.model_config, Ids(), site)

    @property
    def caches(self) -> dict[str, float]:
        """Bytes per device of a searcher's caches."""
        cache = shard_bytes(self.decoder.abstract_cache(self.config.search.slots))
        waiting = {_WAITING: cache} if self.config.task.environment else {}
        prefilled = shard_bytes(self.decoder.abstract_cache(self.decoder.num_rows))
        return {"KV cache": cache, "prefilled prompts": prefilled, **waiting}

    def weights(self, quantization: Quantization = "none") -> Any:
        """Shapes of the weights on the searcher's devices, in the decoder's layout."""
        mesh = self.placement.searcher_meshes[0]
        dtype = jnp.dtype(self.config.model.compute_dtype)
        return abstract_weights(self.model_config, dtype, mesh, quantization)

    @property
    def base(self) -> tuple[Any, Any]:
        """Shapes of the weights that a searcher keeps for adapters: adapted matrices, others."""
        held = self.weights(self.config.search.quantization)
        return lora.parts(self.weights(), held, self.policy)


def _trainer_programs(run: _Run) -> list[Planned]:
    config, model_config, mesh = run.config, run.model_config, run.placement.trainer_mesh
    shardings = run.shardings
    train_step, score = model_parts.make_step_programs(config, run.policy, Ids(), shardings)
    layout = model_parts.make_layout(config, Ids(), mesh)
    batch = jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype), layout.largest())
    whole = batch._replace(missing=jax.ShapeDtypeStruct(batch.tokens.shape[:1], jnp.int32))
    batch, whole = (placed_shapes(x, shardings.of_batch(x)) for x in (batch, whole))
    # Versions on disk keep the trainer's mesh.
    target = mesh if writes_versions(config) else run.placement.publication_mesh
    publish = model_parts.make_publication_program(config, model_config, target)
    state, frozen, held = run.state, run.frozen, run.held
    lengths = len(layout.padding.prompt_buckets) * len(layout.padding.response_buckets)
    variants = len(layout.buckets) * (1 if layout.row_length else lengths)
    flops, read = _step_work(run, batch, layout.at_once)
    weights = shard_bytes(state.params)
    return [
        Planned(
            Program("train_step", "trainer", flops, 2 * sum(held.values()) + read, variants),
            lambda: train_step.lower(state, batch, *frozen),
            held,
        ),
        Planned(
            Program(
                "score_reference", "trainer", flops / 3, held["reference parameters"], variants
            ),
            lambda: score.lower(state.reference_params, whole, *frozen),
            held,
        ),
        Planned(
            Program("publish", "trainer", 0.0, 2 * weights),
            lambda: publish.lower(state.params),
            {"parameters": weights},
        ),
    ]


def _step_work(run: _Run, batch: Batch, at_once: int) -> tuple[float, float]:
    """Return FLOPs of a train step on each device, and bytes of the weights that its passes read.

    Args:
        at_once: rows of a micro-batch; 0: all rows.
    """
    config, mesh = run.config, run.placement.trainer_mesh
    (rows, length), prompt = batch.tokens.shape, config.task.max_prompt_tokens
    c = 1 if batch.response_lengths is None else batch.response_lengths.shape[1]
    flops = roofline.train_flops(
        run.model_config,
        num_rows=rows * c,
        prompt_tokens=prompt,
        response_tokens=(length - prompt) // c,
        responses_per_prompt=c,
    )
    passes = 3 + _REPEATED_SHARE * (remat_of(config) == "layers")
    weights = num_params(run.model_config) * jnp.dtype(config.model.compute_dtype).itemsize
    read = passes * (rows / at_once if at_once else 1) * weights / mesh.shape["model"]
    return passes * flops / 3 / mesh.size, read


def _searcher_programs(run: _Run) -> list[Planned]:
    """Return the programs of a searcher; a decode step reads all weights and the whole cache."""
    config, decoder, model = run.config, run.decoder, run.model_config
    size, slots = run.placement.searcher_meshes[0].size, config.search.slots
    weights, pieces = run.weights(config.search.quantization), decoder.pieces
    length, prompts = max(pieces.items())
    keeps, chunk = bool(config.task.environment), decoder.chunk_steps
    lowered = lower_decoder(decoder, weights, num_slots=slots, num_kept=slots * keeps)
    held, pool = {"parameters": shard_bytes(weights)}, run.caches
    read, cached = *held.values(), pool.pop("KV cache")
    cache = {"KV cache": cached}
    # of forward and backward pass
    flops = roofline.train_flops(model, num_rows=prompts, prompt_tokens=length, response_tokens=0)
    step = roofline.decode_work(
        model,
        itemsize=1,
        num_steps=1,
        prompt_tokens=decoder.cache_length,
        response_lengths=[1] * slots,
    )
    names = ["extend"] if keeps else ["prefill"]
    if config.task.max_prompt_tokens > length and not keeps:
        names.append("extend")  # reads the later pieces of prompts
    found = [
        Planned(
            Program(name, "searcher", flops / 3 / size, read + sum(pool.values()), len(pieces)),
            lowered[name],
            held | pool,
        )
        for name in names
    ]
    found += [
        Planned(Program("copy", "searcher", 0.0, 2 * cached), lowered["copy"], cache | pool),
        Planned(
            Program(
                "decode_chunk", "searcher", chunk * step.num_flops / size, chunk * (read + cached)
            ),
            lowered["chunk"],
            held | cache,
        ),
    ]
    if run.policy.adapters is not None:
        found.append(_merge(run))
    return found


def lower_decoder(
    decoder: Decoder, weights: Any, *, num_slots: int, num_kept: int = 0
) -> dict[str, Callable[[], jax.stages.Lowered]]:
    """Return {name: function that lowers the program} of a decode session.

    Lowering needs neither weights nor attached devices; `jax.experimental.topologies` suffices.
    `prefill` is `extend` without prefixes.

    Args:
        weights: return value of `abstract_weights`, on the devices to compile for.
        num_kept: number of kept caches.
    """

    def ints(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.int32)

    n, where = num_slots, decoder.where(weights)
    width, size = max(decoder.pieces.items())
    rows = n, num_kept + decoder.num_rows
    history, pool = (decoder.abstract_cache(num, where) for num in rows)
    slots, progress = jax.eval_shape(lambda: empty_slots(n, decoder.num_stop_ids))
    progress = _abstract(progress, jax.tree.map(lambda _: where, progress))
    read = weights, pool, ints(size, width), ints(size)
    return {
        "prefill": functools.partial(decoder.extend.lower, *read, None),
        "extend": functools.partial(decoder.extend.lower, *read, (ints(size), ints(size))),
        "copy": functools.partial(decoder.copy.lower, history, pool, ints(n), ints(n), ints()),
        "chunk": functools.partial(decoder.run_chunk.lower, weights, history, slots, progress),
    }


def _merge(run: _Run) -> Planned:
    """Return the program that merges adapters into a searcher's weights."""
    config, policy, kernels = run.config, run.policy, run.base[0]
    shardings = model_parts.adapter_shardings(policy, run.placement.searcher_meshes[0])
    adapters = _abstract(lora.abstract_adapters(policy), shardings, config.model.compute_dtype)
    resident = {FROZEN: shard_bytes(kernels), "adapters": shard_bytes(adapters)}
    return Planned(
        Program("merge", "searcher", 0.0, 2 * resident[FROZEN] + resident["adapters"]),
        lambda: lora.merge_program(kernels, policy, config.search.quantization).lower(
            kernels, adapters
        ),
        resident,
        result="next weights",
    )


def _abstract(shapes: Any, shardings: Any, dtype: str = "") -> Any:
    return jax.tree.map(
        lambda x, sharding: jax.ShapeDtypeStruct(x.shape, dtype or x.dtype, sharding=sharding),
        shapes,
        shardings,
    )
