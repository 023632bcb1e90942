# SPDX-License-Identifier: Apache-2.0
"""Parts that depend on config and model alone: policy, shardings, decoder, step, batches."""

import dataclasses
import functools
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any, cast

import jax.numpy as jnp
from jax.sharding import Mesh

from tba_jax.config.resolved import remat_of, shares_prompts
from tba_jax.config.schema import Config
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.programs import CHUNK_STEPS
from tba_jax.decoding.requests import StopStrings
from tba_jax.decoding.shardings import weight_shardings
from tba_jax.devices.sharding import batch_axes, hand_over
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.flow.layout import RowLayout
from tba_jax.flow.padding import Padding, padded_lengths
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.logprobs import Scoring
from tba_jax.models.quantized import Quantization
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import TransformerConfig, unstack_layers
from tba_jax.train.optimizers import make_optimizer
from tba_jax.train.state import StepShardings, step_shardings
from tba_jax.train.step import StepSettings, make_reference_pass, make_train_step
from tba_jax.weights.publication import make_publish_program

START_MODEL = Path(__file__).parents[1] / "assets" / "start_model"


def model_path(config: Config) -> str:
    """Return the configured model path, or the path of the embedded start model."""
    return config.model.path or str(START_MODEL)


def describe_model(config: Config, *, with_weights: bool = True) -> models.Description:
    """Describe the start model of a run, with the settings of the run."""
    found = models.describe(model_path(config), with_weights=with_weights)
    architecture = dataclasses.replace(found.config, attention=config.model.attention)
    return dataclasses.replace(found, config=architecture)


def policy_config(config: Config, model_config: TransformerConfig) -> TransformerConfig:
    """Return the architecture of the policy, with adapters if lora.rank is set."""
    rank, alpha, modules = config.lora.rank, config.lora.alpha, tuple(config.lora.modules)
    return lora.with_adapters(model_config, rank, alpha, modules) if rank else model_config


def end_ids(config: Config, tokenizer: Tokenizer) -> tuple[int, ...]:
    """Return the tokens that end a response: those of the model and of search.stop_ids."""
    return tuple(dict.fromkeys((*tokenizer.eos_ids, *config.search.stop_ids)))


def make_scoring(config: Config, tokenizer: Tokenizer) -> Scoring:
    """Return the scoring of policy, reference and given responses, in their weights' dtype."""
    return Scoring(
        temperature=config.search.sampling_temperature,
        eos_ids=end_ids(config, tokenizer),
        min_new_tokens=config.search.min_new_tokens,
        compute_dtype=config.model.compute_dtype,
    )


def make_padding(config: Config, tokenizer: Tokenizer) -> Padding:
    """Return the padded lengths of prompts and responses."""
    prompts = padded_lengths(config.task.max_prompt_tokens)
    return Padding(prompts, padded_lengths(config.search.max_new_tokens), tokenizer.pad_id)


def make_layout_program(
    config: Config, model_config: TransformerConfig, where: Mesh, quantization: Quantization
) -> Callable[[Any], Any]:
    """Return the jitted program that copies parameters in the decoder's layout and dtype.

    `where` is the mesh of the parameters and of the copy, with the axes `placement.MESH_AXES`.
    """
    layout = functools.partial(unstack_layers, config=model_config)
    shardings = weight_shardings(model_config, where, quantization)
    dtype, exact = jnp.dtype(config.model.compute_dtype), model_config.float32_leaves
    return make_publish_program(dtype, layout, shardings, quantization, exact)


def make_publication_program(
    config: Config, model_config: TransformerConfig, where: Mesh
) -> Callable[[Any], Any]:
    """Return the jitted program of a publication: weights in the decoder's layout, or adapters.

    The caller holds the device lock (`locked`). `where` is `Sites.publication`.
    """
    policy, dtype = policy_config(config, model_config), jnp.dtype(config.model.compute_dtype)
    if policy.adapters is None:
        return make_layout_program(config, model_config, where, config.search.quantization)
    shardings = lora.split(param_shardings(policy, where))[1]
    return make_publish_program(dtype, None, shardings, "none", model_config.float32_leaves)


def adapter_shardings(policy: TransformerConfig, mesh: Mesh) -> Any:
    """Return the shardings of adapters, divided as the matrices that they adapt."""
    return on_mesh(mesh, lora.split(param_shardings(policy, mesh))[1])


def decoder_weights(
    config: Config, model_config: TransformerConfig, params: Any, source: Mesh, mesh: Mesh
) -> Any:
    """Return parameters with stacked layers, on `source`, in the decoder's form on `mesh`."""
    program = make_layout_program(config, model_config, source, "none")
    return hand_over(program(params), on_mesh(mesh, weight_shardings(model_config, mesh)))


def start_weights(config: Config, model: models.Description, source: Mesh, mesh: Mesh) -> Any:
    """Load the weights of a model, on the mesh `source`, in the form of `decoder_weights`."""
    params = model.load_on(source, jnp.dtype(config.model.compute_dtype))
    return decoder_weights(config, model.config, params, source, mesh)


def longest_sequence(config: Config, model_config: TransformerConfig) -> int:
    """Return the maximum number of tokens of prompt and response together.

    Raises:
        ValueError: the model has fewer positions.
    """
    longest = config.task.max_prompt_tokens + config.search.max_new_tokens
    if longest > model_config.max_positions:
        half = model_config.max_positions // 2
        raise ValueError(
            f"prompt and response may take {longest} tokens, the model at {model_path(config)} "
            f"was made for {model_config.max_positions}; lower both, for example "
            f"--config.task.max_prompt_tokens={half} --config.search.max_new_tokens={half}"
        )
    return longest


def make_decoder(
    config: Config, model_config: TransformerConfig, tokenizer: Tokenizer, site: Site = ANY_DEVICE
) -> Decoder:
    """Make the decoder of a run on the site of a searcher, for training and evaluation.

    Raises:
        ValueError: as `longest_sequence`; or search.stop_ids has an ID that is no token.
    """
    longest = longest_sequence(config, model_config)
    ids, max_new_tokens = end_ids(config, tokenizer), config.search.max_new_tokens
    if max(ids, default=0) >= model_config.vocab_size:
        raise ValueError(
            f"config.search.stop_ids = {config.search.stop_ids!r}: the model at "
            f"{model_path(config)} has ids 0 to {model_config.vocab_size - 1}. Give ids of its "
            "tokenizer"
        )
    decoder = Decoder(
        model_config,
        compute_dtype=jnp.dtype(config.model.compute_dtype),
        eos_ids=ids,
        pad_id=tokenizer.pad_id,
        prompt_tokens=config.task.max_prompt_tokens,
        max_length=longest,
        # A finished slot idles for half a chunk on average, which matters for short responses.
        chunk_steps=min(CHUNK_STEPS, max(1, max_new_tokens // 4)),
        site=site,
    )
    decoder.stop_strings = stop_strings(config, tokenizer)
    return decoder


def stop_strings(config: Config, tokenizer: Tokenizer) -> StopStrings | None:
    """Return the texts that end a response; None: none."""
    # Special tokens keep their text, so that a stop string can be a special token.
    text_of = functools.partial(tokenizer.decode, skip_special=False)
    texts = config.search.stop_strings
    return StopStrings(texts, text_of) if texts else None


def make_layout(config: Config, tokenizer: Tokenizer, mesh: Mesh) -> RowLayout:
    """Return how draws become the rows of a batch on the trainer's mesh."""
    size, rows = config.objective.group_size, config.batch.micro_batch_rows
    micro_batch_rows = rows if rows < config.batch.num_prompts * size else 0
    may_fork = bool(config.task.environment)  # paths may need more rows than a micro-batch has
    return RowLayout(
        num_prompts=config.batch.num_prompts,
        group_size=size,
        padding=make_padding(config, tokenizer),
        policy_temperature=config.search.sampling_temperature,
        row_length=config.batch.packed_length,
        shares_prompts=shares_prompts(config),
        row_multiple=math.prod(mesh.shape[axis] for axis in batch_axes(mesh)),
        micro_batch_rows=micro_batch_rows,
        is_whole=micro_batch_rows >= size and not may_fork,
        has_advantages=config.objective.built.needs.advantages,
        uncounted=end_ids(config, tokenizer) if config.objective.mask_eos else (),
        reference="scored" if config.reference.reset_period else "stored",
    )


def make_step_programs(
    config: Config, policy: TransformerConfig, tokenizer: Tokenizer, shardings: StepShardings
) -> tuple[Callable[..., Any], Callable[..., Any]]:
    """Return the jitted train step, and the jitted pass that scores the reference."""
    mesh = cast("Mesh", shardings.batch.mesh)
    o, layout = config.objective, make_layout(config, tokenizer, mesh)
    settings = StepSettings(
        objective=o.built,
        scoring=make_scoring(config, tokenizer),
        beta=o.beta.over(config.num_steps),
        reference_temperature=o.reference_temperature.over(config.num_steps),
        reward_temperature=o.reward_temperature.over(config.num_steps),
        reference_reset_period=config.reference.reset_period,
        micro_batch_rows=layout.micro_batch_rows,
        row_multiple=layout.row_multiple,
        is_whole=layout.is_whole,
        remat=remat_of(config),
        rounding_seed=config.seed,
    )
    rate = config.optimizer.learning_rate.over(config.num_steps)
    optimizer = make_optimizer(config.optimizer)
    update = make_train_step(policy, optimizer, rate, settings, shardings)
    return update, make_reference_pass(policy, settings, shardings)


def make_step_shardings(
    config: Config, model_config: TransformerConfig, mesh: Mesh
) -> StepShardings:
    """Return the shardings of train state and batches, and the compiler options of the step."""
    return step_shardings(
        policy_config(config, model_config),
        make_optimizer(config.optimizer),
        mesh,
        keep_reference=True,
        has_head=bool(config.objective.built.needs.head),
        num_prompts=config.batch.num_prompts,
        param_dtype=jnp.dtype(config.model.param_dtype),
    )
