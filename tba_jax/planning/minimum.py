# SPDX-License-Identifier: Apache-2.0
"""What a program has to do at least, on each device: FLOPs of its products, bytes to be moved.

By hand from shapes and not from any compiler: every weight read once, every cache read or written
once, activations in fast memory, attention only where it is causal. What a compiled program does
beyond that is its own. It counts what the decoder and the trainer of a run are asked for; the
programs of judges have no minimum here. The invariant it owns: no program does less.
"""

from typing import NamedTuple

import jax

from tba_jax.config.schema import Config
from tba_jax.decoding import lowering
from tba_jax.devices.sharding import Placement
from tba_jax.devices.site import Site
from tba_jax.flow.batch import PackedBatch
from tba_jax.models.transformer import Params, TransformerConfig, abstract_params
from tba_jax.planning import programs
from tba_jax.planning.estimates import shard_bytes, state_bytes_by_kind
from tba_jax.run import model_parts, trainer_parts


class Minimum(NamedTuple):
    """Of one execution on each device.

    Attributes:
        flops: of matrix products.
        num_bytes: read and written in device memory.
        steps: of a loop that the program is; 1: it is none.
    """

    flops: float
    num_bytes: float
    steps: int = 1


class _Products(NamedTuple):
    """FLOPs of a model, forward."""

    layers: float  # of one token in all layers, attention apart
    head: float  # of the logits of one token
    pair: float  # of one query looking at one key, in all layers

    def causal(self, rows: int, length: int) -> float:
        """Of whole rows, attention included, logits not."""
        return self.after_prompt(rows, 0, 1, length)

    def after_prompt(self, rows: int, prompt: int, responses: int, length: int) -> float:
        """Return the minimum for rows with a prompt and responses that see it and themselves."""
        pairs = prompt * (prompt + 1) / 2 + responses * (
            length * prompt + length * (length + 1) / 2
        )
        return rows * ((prompt + responses * length) * self.layers + pairs * self.pair)


def _products(config: TransformerConfig) -> _Products:
    params = abstract_params(config)
    # Matrices; of norms and biases there are none.
    matrices = sum(x.size for x in jax.tree.leaves(params["layers"]) if x.ndim > 2)
    heads = config.num_layers * config.num_heads * config.head_dim
    return _Products(2.0 * matrices, 2.0 * config.vocab_size * config.hidden_size, 4.0 * heads)


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
    batch = programs.abstract_batch(config, placement)
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
    state = trainer_parts.abstract_state(config, model_config, placement.trainer_mesh)
    held = state_bytes_by_kind(state)
    published = shard_bytes(
        programs.abstract_weights(config, model_config, placement, config.search.quantization)
    )
    where = programs.publication_mesh(config, placement).shape
    published *= placement.searcher_meshes[0].size / where["fsdp"] / where["model"]
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
    columns, steps = decoder.cache_lengths[-1], decoder.chunk_steps
    cache = lowering.cache_bytes(decoder, sizes.num_slots, columns)
    waiting = lowering.cache_bytes(decoder, sizes.prefill_prompts, sizes.prompt)
    admitted = lowering.cache_bytes(decoder, sizes.num_slots, sizes.prompt)
    token = of.layers + of.head + columns * of.pair
    read = _read_bytes(weights, model_config)
    # Of the last layer a prompt needs no more than keys and values.
    before_last = 1 - 1 / model_config.num_layers
    prompts = of.causal(sizes.prefill_prompts, sizes.prompt) * before_last
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
        shared = (1, sizes.samples) if config.batch.share_prompts else (sizes.samples, 1)
        flops = of.after_prompt(shared[0], sizes.prompt, shared[1], sizes.response)
        flops += sizes.samples * sizes.response * of.head
        found["score_reference"] = Minimum(flops / mesh.size, _read_bytes(reference, model_config))
    return found


def _read_bytes(weights: Params, model_config: TransformerConfig) -> float:
    """Of all weights, each read once; of a table that is only looked up, single rows."""
    looked_up = 0.0 if model_config.tie_embeddings else shard_bytes(weights["embed"])
    return shard_bytes(weights) - looked_up
