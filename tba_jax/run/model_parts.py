# SPDX-License-Identifier: Apache-2.0
"""The policy that a config describes: its model, its shardings, its decoder."""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from tba_jax.config.resolved import transport_of
from tba_jax.config.schema import Config
from tba_jax.decoding import lowering
from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.stop_strings import StopStrings
from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.environments.host import TOOL_END
from tba_jax.flow.padding import Padding, length_buckets
from tba_jax.models import lora
from tba_jax.models import model as models
from tba_jax.models.quantized import Quantization
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import on_mesh, param_shardings
from tba_jax.models.transformer import TransformerConfig, unstack_layers
from tba_jax.weights.transport import Layout, make_publish_program

START_MODEL = Path(__file__).parents[1] / "assets" / "start_model"


def model_path(config: Config) -> str:
    """Return the configured model path, or that of the embedded start model."""
    return config.model.path or str(START_MODEL)


def describe_model(config: Config, *, with_weights: bool = True) -> models.Description:
    """Describe the start model of a run, with its settings.

    Args:
        config: config of the run.
        with_weights: as in `models.describe`.

    Raises:
        ValueError: as `models.describe`.
    """
    found = models.describe(model_path(config), with_weights=with_weights)
    return dataclasses.replace(found, config=with_settings(found.config, config))


def with_settings(architecture: TransformerConfig, config: Config) -> TransformerConfig:
    """Return the architecture of a model file with the settings of a run."""
    model = config.model
    return dataclasses.replace(
        architecture, attention=model.attention, float32_head=model.float32_head
    )


def policy_config(config: Config, model_config: TransformerConfig) -> TransformerConfig:
    """Return the architecture that is trained, with adapters if lora.rank is set.

    Raises:
        ValueError: lora.modules names a matrix that this model lacks.
    """
    rank, alpha, modules = config.lora.rank, config.lora.alpha, tuple(config.lora.modules)
    return lora.with_adapters(model_config, rank, alpha, modules) if rank else model_config


def end_ids(config: Config, eos_ids: tuple[int, ...]) -> tuple[int, ...]:
    """Return the tokens that end a response: those of the model and of search.stop_ids."""
    return tuple(dict.fromkeys((*eos_ids, *config.search.stop_ids)))


def make_scoring(config: Config, eos_ids: tuple[int, ...]) -> Scoring:
    """Return the scoring of policy, reference and start data, in the dtype of their weights."""
    return Scoring(
        temperature=config.search.sampling_temperature,
        eos_ids=end_ids(config, eos_ids),
        min_new_tokens=config.search.min_new_tokens,
        mask_eos=config.objective.mask_eos,
        chunk_tokens=config.batch.logprob_chunk_tokens,
        compute_dtype=config.model.compute_dtype,
    )


def make_rollout_scoring(config: Config, eos_ids: tuple[int, ...]) -> Scoring:
    """Return the scoring with published weights, for start data and divergence metrics."""
    scoring = make_scoring(config, eos_ids)
    return dataclasses.replace(scoring, compute_dtype=config.model.rollout_dtype)


def make_padding(config: Config, pad_id: int, max_new_tokens: int = 0) -> Padding:
    """Return the padded lengths of prompts and responses."""
    num = config.batch.num_length_buckets
    return Padding(
        length_buckets(config.task.max_prompt_tokens, num),
        length_buckets(max_new_tokens or config.search.max_new_tokens, num),
        pad_id,
    )


def searcher_shardings(
    model_config: TransformerConfig, mesh: Mesh, quantization: Quantization = "none"
) -> Any:
    """Return the shardings of a searcher's weights in the decoder's layout.

    Args:
        model_config: the architecture.
        mesh: the searcher's.
        quantization: of the weights.

    Raises:
        ValueError: the mesh does not divide the model.
    """
    return on_mesh(mesh, lowering.weight_shardings(model_config, mesh, quantization))


def adapter_shardings(policy: TransformerConfig, mesh: Mesh) -> Any:
    """Return the shardings of adapters, which follow their matrices."""
    return on_mesh(mesh, lora.split(param_shardings(policy, mesh))[1])


def reference_shardings(model_config: TransformerConfig, mesh: Mesh) -> Any:
    """Return the shardings of a searcher's reference in the trainer's layout."""
    return on_mesh(mesh, param_shardings(model_config, mesh))


def make_publication(
    model_config: TransformerConfig, mesh: Mesh, quantization: Quantization = "none"
) -> tuple[Layout, Any]:
    """(layout that searchers want, shardings in which the publish program leaves its copy).

    Args:
        model_config: the architecture.
        mesh: `Placement.publication_mesh`.
        quantization: of the copy, which is made once its weights are in the rollout dtype.
    """
    layout = functools.partial(unstack_layers, config=model_config)
    return layout, lowering.weight_shardings(model_config, mesh, quantization)


def make_publication_program(
    config: Config, model_config: TransformerConfig, where: Mesh
) -> Callable[[Any], Any]:
    """Return the jitted program of a publication: copy and cast the trained weights.

    Whole weights that stay in memory get the decoder's layout; adapters and weights for files keep
    the trainer's layout. The caller takes the device lock (`locked`).

    Args:
        config: config of the run.
        model_config: the architecture.
        where: `Placement.publication_mesh`.
    """
    policy, layout, shardings = policy_config(config, model_config), None, None
    quantization: Quantization = "none"
    if transport_of(config) == "memory":
        if policy.adapters is None:
            quantization = config.search.quantization
            layout, shardings = make_publication(model_config, where, quantization)
        else:
            shardings = lora.split(param_shardings(policy, where))[1]
    dtype = jnp.dtype(config.model.rollout_dtype)
    exact = model_config.float32_leaves
    return make_publish_program(dtype, layout, shardings, quantization, exact)


def decoder_weights(
    config: Config, model_config: TransformerConfig, params: Any, source: Mesh, mesh: Mesh
) -> Any:
    """Convert parameters to the rollout dtype and the decoder's layout on a searcher's mesh.

    Args:
        config: config of the run.
        model_config: the architecture.
        params: parameters, layers stacked.
        source: mesh of `params`, with the axes `sharding.MESH_AXES`.
        mesh: the searcher's.
    """
    layout, published = make_publication(model_config, source)
    dtype, exact = jnp.dtype(config.model.rollout_dtype), model_config.float32_leaves
    program = make_publish_program(dtype, layout, published, float32_leaves=exact)
    return hand_over(program(params), searcher_shardings(model_config, mesh))


def start_weights(config: Config, model_config: TransformerConfig, source: Mesh, mesh: Mesh) -> Any:
    """Load the start model's weights in the form of `decoder_weights`.

    Args:
        config: config of the run.
        model_config: the architecture that is wanted.
        source: mesh on which the files are read.
        mesh: the searcher's.

    Raises:
        ValueError: config.model.path is a model of another architecture.
    """
    dtype = jnp.dtype(config.model.rollout_dtype)
    shardings = param_shardings(model_config, source)
    found = describe_model(config)
    if found.config != model_config:
        raise ValueError(
            "config.eval.reference_metrics compares with the model at config.model.path = "
            f"{model_path(config)!r}, which has another architecture; name the right one, or set "
            "--config.eval.reference_metrics=False"
        )
    params = found.load_params(param_dtype=dtype, shardings=shardings)
    return decoder_weights(config, model_config, params, source, mesh)


class SpecialIds(Protocol):
    """The tokenizer interface of a decoder."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Return the tokens that end a response."""
        ...

    @property
    def pad_id(self) -> int:
        """Return the padding token."""
        ...

    def decode(self, ids: Sequence[int] | np.ndarray, skip_special: bool = True) -> str:
        """Return the text of token IDs."""
        ...


def longest_sequence(config: Config, model_config: TransformerConfig) -> int:
    """Return the tokens that prompt and response may take.

    Raises:
        ValueError: the model has fewer positions.
    """
    longest = config.task.max_prompt_tokens + max(
        config.search.max_new_tokens, config.eval.max_new_tokens
    )
    if longest > model_config.max_positions:
        half = model_config.max_positions // 2
        raise ValueError(
            f"prompt and response may take {longest} tokens, the model at {model_path(config)} "
            f"was made for {model_config.max_positions}; lower both, for example "
            f"--config.task.max_prompt_tokens={half} --config.search.max_new_tokens={half} "
            f"--config.eval.max_new_tokens={half}"
        )
    return longest


def make_decoder(
    config: Config,
    model_config: TransformerConfig,
    tokenizer: SpecialIds,
    site: Site = ANY_DEVICE,
) -> Decoder:
    """Make the decoder of a run, for training and evaluation.

    Args:
        config: config of the run.
        model_config: the architecture.
        tokenizer: the model's.
        site: the searcher's; one device serves weights on any one device.

    Raises:
        ValueError: as `longest_sequence`; or the model has no token of an id in search.stop_ids.
    """
    longest = longest_sequence(config, model_config)
    ids = end_ids(config, tokenizer.eos_ids)
    if max(ids, default=0) >= model_config.vocab_size:
        raise ValueError(
            f"config.search.stop_ids = {config.search.stop_ids!r}: the model at "
            f"{model_path(config)} has ids 0 to {model_config.vocab_size - 1}. Give ids of its "
            "tokenizer"
        )
    decoder = Decoder(
        model_config,
        compute_dtype=jnp.dtype(config.model.rollout_dtype),
        eos_ids=ids,
        pad_id=tokenizer.pad_id,
        prompt_buckets=(
            *length_buckets(config.task.max_prompt_tokens, config.batch.num_length_buckets),
            # VinePPO prefills a prompt with the beginning of a response.
            *((longest,) if config.objective.built.vine_tokens else ()),
            *_conversation_lengths(config, longest),
        ),
        max_length=longest,
        chunk_steps=config.search.chunk_steps,
        cache_dtype=config.search.cache_dtype or None,
        site=site,
    )
    stop_strings = config.search.stop_strings
    if config.task.environment:
        stop_strings = (*stop_strings, TOOL_END)
    if stop_strings:
        # Special tokens keep their text, so that one can be a stop string.
        text_of = functools.partial(tokenizer.decode, skip_special=False)
        decoder.stop_strings = StopStrings(stop_strings, text_of)
    return decoder


def _conversation_lengths(config: Config, longest: int) -> tuple[int, ...]:
    """Prompt buckets of later turns, which begin with everything before them."""
    if not config.task.environment:
        return ()
    least = config.task.max_prompt_tokens
    lengths = length_buckets(longest, max(2, config.batch.num_length_buckets))
    return tuple(n for n in lengths if n > least)
