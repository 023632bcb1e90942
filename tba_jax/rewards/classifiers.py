# SPDX-License-Identifier: Apache-2.0
"""Probability that a response belongs to a target class: toxic, unsafe, or matching a pattern.

A classifier is a function: a sequence classifier (RoBERTa), a guard language model that writes a
verdict (Llama-Guard), or a regular expression for small tests.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.devices.site import Site
from tba_jax.flow.padding import length_buckets
from tba_jax.models import encoder
from tba_jax.models import model as models
from tba_jax.models.hf import folders
from tba_jax.models.logprobs import row_token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.batches import RowScorer
from tba_jax.rewards.config import ClassifierSettings

# Probability of a text that does not match a pattern. It is above 0, so that its logarithm is
# finite and every further match changes the mean.
MISS_PROB = 0.01
# Length limits of a classifier's input.
_ENCODER_TOKENS = 128
_GUARD_TOKENS = 512

Classifier = Callable[[Sequence[str], Sequence[str]], np.ndarray]
"""Thread-safe (prompts, responses) -> log p(target class) of each response, float64 [n]."""


def make_classifier(
    settings: ClassifierSettings, dtype: str, device: Any, site: Site
) -> Classifier:
    """Return the classifier that the settings describe.

    Args:
        dtype: dtype of a model's weights and activations.
        device: device of a model's weights.
        site: site of any one device of that platform.

    Raises:
        ValueError: the settings or the model cannot be used.
    """
    path, target = settings.path, settings.target
    if not path:
        return _make_pattern(target)
    folder = folders.resolve(path, with_weights=False)
    with jax.default_device(device):
        if folders.load_config(folder).get("model_type") in ("bert", "roberta"):
            return _make_encoder(path, target, dtype, device)
        return _make_guard(path, target, dtype, device, site)


def _make_pattern(pattern: str) -> Classifier:
    """Return 0 for a response with a match of a regular expression, log(MISS_PROB) otherwise."""
    try:
        compiled = re.compile(pattern)
    except re.error as error:
        raise ValueError(
            f"classifier.target={pattern!r} is not a regular expression ({error}), as a run "
            "without classifier.path needs. Correct it"
        ) from error

    def classify(prompts: Sequence[str], responses: Sequence[str]) -> np.ndarray:
        found = [compiled.search(response) is not None for response in responses]
        return np.where(found, 0.0, math.log(MISS_PROB))

    return classify


def _make_encoder(path: str, target: str, dtype: str, device: Any) -> Classifier:
    """Return a RoBERTa classifier of the response alone; long responses are truncated.

    Its value is the log-softmax of the model's logits at the target label.
    """
    config, params = encoder.load(path, param_dtype=jnp.dtype(dtype))
    if target not in config.labels:
        labels = ", ".join(config.labels) or "none: it has no classification head"
        raise ValueError(
            f"classifier.target={target!r} is not a label of the model at {path} ({labels}). "
            "Set it to one of its labels"
        )
    tokenizer, most = Tokenizer.load(path), min(_ENCODER_TOKENS, config.max_tokens)
    program = _label_program(config, config.labels.index(target), dtype)
    params = jax.device_put(params, device)
    scores = RowScorer(program, params, length_buckets(most, 3), tokenizer.pad_id)
    return lambda _, responses: scores([tokenizer.encode_complete(x, most) for x in responses])


def _make_guard(path: str, target: str, dtype: str, device: Any, site: Site) -> Classifier:
    """Return log p(verdict | conversation) of a guard, a language model with a chat template.

    The verdict is scored as the model's reply. A conversation that is too long is an error.
    """
    config, params, tokenizer = models.load(path, param_dtype=jnp.dtype(dtype))
    if config.num_labels:
        raise ValueError(
            f"classifier.path={path}: a classifier with {config.num_labels} labels; "
            "a guard is a language model. Give one, or a RoBERTa encoder"
        )
    verdict = tokenizer.encode(target, add_bos=False)
    if not len(verdict):
        raise ValueError("classifier.target is empty. Set it to the guard's verdict: unsafe")
    tokenizer.format_chat([{"role": "user", "content": "a"}])  # fails without a template
    most = min(_GUARD_TOKENS + len(verdict), config.max_positions)
    program = _verdict_program(config, len(verdict), dtype, site)
    params = jax.device_put(params, device)
    scores = RowScorer(program, params, length_buckets(most, 3), tokenizer.pad_id)

    def row(prompt: str, response: str) -> np.ndarray:
        messages = [{"role": "user", "content": prompt}]
        messages += [{"role": "assistant", "content": response}]
        text = tokenizer.format_chat(messages, is_complete=True)
        return np.concatenate([tokenizer.encode(text, add_bos=False), verdict])

    return lambda prompts, responses: scores(list(map(row, prompts, responses)))


@functools.cache  # classifiers on several devices share the program
def _label_program(config: encoder.EncoderConfig, label: int, dtype: str) -> Callable[..., Array]:
    """Return jitted (params, tokens [b s], mask [b s]) -> log p(label) [b]."""
    how: Any = {"config": config, "compute_dtype": jnp.dtype(dtype)}

    @jax.jit
    def program(params: encoder.Params, tokens: Array, mask: Array) -> Array:
        return jax.nn.log_softmax(encoder.classify(params, tokens, mask, **how), axis=-1)[:, label]

    return program


@functools.cache
def _verdict_program(config: Any, size: int, dtype: str, site: Site) -> Callable[..., Array]:
    """Return jitted (params, tokens [b s], mask [b s]) -> log p(last `size` tokens) [b]."""
    how: Any = {"config": config, "scoring": Scoring(compute_dtype=dtype)}
    how["sharding"] = ComputeSharding(config, site)

    @jax.jit
    def program(params: Any, tokens: Array, mask: Array) -> Array:
        lengths = jnp.sum(mask, axis=1)
        # Left-padded, so that the last tokens of all rows have the same place.
        tokens = jax.vmap(jnp.roll)(tokens, tokens.shape[1] - lengths)
        prompts, sizes = lengths - size, jnp.full((len(tokens), 1), size, jnp.int32)
        found = row_token_logprobs(params, tokens, prompts, sizes, response_bucket=size, **how)
        return jnp.sum(found[:, 0], axis=-1)

    return program
