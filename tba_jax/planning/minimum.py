# SPDX-License-Identifier: Apache-2.0
"""Lower bounds of a program's work on each device: FLOPs of its products, bytes that it moves.

The bounds are computed from shapes, independent of any compiler: every weight is read once, every
cache entry is read or written once, activations stay in fast memory, and attention is causal. They
cover the programs of decoder and trainer, but not the programs of judges.

Invariant: no compiled program does less work.
"""

import math
from typing import NamedTuple

from tba_jax.config.resolved import shares_prompts
from tba_jax.config.schema import Config
from tba_jax.devices.sharding import Placement
from tba_jax.devices.site import Site
from tba_jax.flow.batch import PackedBatch
from tba_jax.models.transformer import Params, TransformerConfig
from tba_jax.planning import programs
from tba_jax.planning.estimates import shard_bytes, state_bytes_by_kind
from tba_jax.planning.roofline import matrix_entries, state_entries
from tba_jax.run import model_parts


class Minimum(NamedTuple):
    """Lower bound of one execution on each device.

    Attributes:
        flops: FLOPs of matrix products.
        num_bytes: bytes read and written in device memory.
        steps: steps of the program's loop; 1 for a program that is not a loop.
    """

    flops: float
    num_bytes: float
    steps: int = 1


class _Products(NamedTuple):
    """FLOPs of a model's forward pass."""

    layers: float  # one token in all layers, without attention over pairs
    head: float  # logits of one token
    pair: float  # one pair of query and key in all layers with full attention
    near_pair: float  # one pair of query and key in all window layers
    window: int

    def causal(self, rows: int, length: int) -> float:
        """Return the FLOPs of whole rows with causal attention, without logits."""
        return self.after_prompt(rows, 0, 1, length)

    def after_prompt(self, rows: int, prompt: int, responses: int, length: int) -> float:
        """Return the FLOPs of rows: the responses of a row see its prompt, not each other."""
        tokens, pairs = prompt + responses * length, 0.0
        for pair, window in ((self.pair, prompt + length), (self.near_pair, self.window)):
            before = _num_pairs(prompt, window)
            pairs += pair * (before + responses * (_num_pairs(prompt + length, window) - before))
        return rows * (tokens * self.layers + pairs)

    def step(self, columns: int) -> float:
        """Return the FLOPs of one new token that attends to a number of columns, with logits."""
        seen = columns * self.pair + min(columns, self.window) * self.near_pair
        return self.layers + self.head + seen


def _num_pairs(length: int, window: int) -> float:
    """Return the number of (query, key) pairs of a causal row with this window."""
    full = min(length, window)
    return full * (full + 1) / 2 + (length - full) * window


def _products(config: TransformerConfig) -> _Products:
    table = config.vocab_size * config.hidden_size
    of_layer = 4.0 * config.num_heads * config.head_dim
    num = {kind: config.layer_kinds.count(kind) for kind in ("full", "window")}
    return _Products(
        2.0 * (matrix_entries(config) - table + 3 * state_entries(config)),
        2.0 * table,
        of_layer * num["full"],
        of_layer * num["window"],
        config.window,
    )


def minima(
    config: Config, model_config: TransformerConfig, placement: Placement
) -> dict[str, Minimum]:
    """Return the minimum of each program of policy and reference, by its name in the plan."""
    return _of_trainer(config, model_config, placement) | _of_searcher(
        config, model_config, placement
    )


def _of_trainer(
    config: Config, model_config: TransformerConfig, placement: Placement
) -> dict[str, Minimum]:
    sizes, of = programs.sizes_of(config), _products(model_config)
    devices = placement.trainer_mesh.size
    batch = programs.abstract_batch(config, placement, model_config)
    rows, length = batch.tokens.shape
    if isinstance(batch, PackedBatch):
        forward = of.causal(rows, length) + rows * length * of.head
    else:
        c = batch.slots.shape[1]
        forward = of.after_prompt(rows, sizes.prompt, c, sizes.response)
        forward += rows * c * sizes.response * of.head
    flops = 3 * forward
    if config.reference.placement == "trainer":
        flops *= 4 / 3
    state = model_parts.abstract_state(config, model_config, placement.trainer_mesh)
    held = state_bytes_by_kind(state)
    published = shard_bytes(
        programs.abstract_weights(config, model_config, placement, config.search.quantization)
    )
    where = programs.publication_mesh(config, placement).shape
    divided = math.prod(size for axis, size in where.items() if axis != "data")
    published *= placement.searcher_meshes[0].size / divided
    return {
        # The state is read and written; the backward pass reads the parameters once more.
        "train_step": Minimum(flops / devices, 2 * sum(held.values()) + held["parameters"]),
        "publish": Minimum(0.0, held["parameters"] + published),
    }


def _of_searcher(
    config: Config, model_config: TransformerConfig, placement: Placement
) -> dict[str, Minimum]:
    sizes, of = programs.sizes_of(config), _products(model_config)
    mesh = placement.searcher_meshes[0]
    decoder = model_parts.make_decoder(config, model_config, programs.Ids(), Site(mesh))
    weights = programs.abstract_weights(config, model_config, placement, config.search.quantization)
    columns, steps = decoder.cache_length, decoder.chunk_steps
    cache = decoder.cache_bytes(sizes.num_slots, columns)
    num_prompts, length = programs.largest_prefill(config, decoder)
    waiting = decoder.cache_bytes(num_prompts, length)
    admitted = decoder.cache_bytes(sizes.num_slots, length)
    token = of.step(columns)
    read = _read_bytes(weights, model_config)
    # A prompt needs only keys and values of the last layer.
    before_last = 1 - 1 / model_config.num_layers
    prompts = of.causal(num_prompts, length) * before_last
    found = {
        "prefill": Minimum(
            prompts / mesh.size, shard_bytes(weights["layers"]) * before_last + waiting
        ),
        "admit": Minimum(0.0, float(waiting + admitted)),
        "decode_chunk": Minimum(
            steps * sizes.num_slots * token / mesh.size, steps * (read + cache), steps
        ),
    }
    if config.reference.placement == "searcher":
        reference = programs.abstract_reference(config, model_config, placement)
        shared = (1, sizes.samples) if shares_prompts(config) else (sizes.samples, 1)
        flops = of.after_prompt(shared[0], sizes.prompt, shared[1], sizes.response)
        flops += sizes.samples * sizes.response * of.head
        found["score_reference"] = Minimum(flops / mesh.size, _read_bytes(reference, model_config))
    return found


def _read_bytes(weights: Params, model_config: TransformerConfig) -> float:
    """Return the bytes of all weights; tables that are only indexed count no bytes."""
    looked_up = 0.0 if model_config.tie_embeddings else shard_bytes(weights["embed"])
    return shard_bytes(weights) - looked_up
