# SPDX-License-Identifier: Apache-2.0
"""Probability that a response belongs to a target class: toxic, unsafe, or matching a pattern.

A classifier is a function: a sequence classifier (RoBERTa), a guard language model that writes a
verdict (Llama-Guard), or a regular expression for small tests. Invariant: the probability of a text
does not depend on the other texts of the call.
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

from tba_jax.devices.platform import Platform, platform_of
from tba_jax.devices.site import any_device
from tba_jax.flow.padding import left_pad, length_buckets
from tba_jax.models import encoder
from tba_jax.models import model as models
from tba_jax.models.hf import folders
from tba_jax.models.logprobs import token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.batches import in_batches, right_pad
from tba_jax.rewards.config import ENCODER_TOKENS, GUARD_TOKENS, ClassifierSettings

# Probability of a text that does not match a pattern. It is above 0, so that its logarithm is
# finite and every further match changes the mean.
MISS_PROB = 0.01

Classifier = Callable[[Sequence[str], Sequence[str]], np.ndarray]
"""Thread-safe (prompts, responses) -> log p(target class) of each response, float64 [n]."""


def make_classifier(settings: ClassifierSettings, dtype: str, device: Any) -> Classifier:
    """Return the classifier that the settings describe.

    Args:
        dtype: dtype of a model's weights and activations.
        device: device of a model's weights.

    Raises:
        ValueError: the settings or the model cannot be used.
    """
    if not settings.path:
        return _make_pattern(settings.target)
    folder = folders.resolve(settings.path, with_weights=False)
    is_encoder = folders.load_config(folder).get("model_type") in ("bert", "roberta")
    make = _make_encoder if is_encoder else _make_guard
    return make(settings.path, settings.target, dtype, device)


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
    with jax.default_device(device):
        config, params = encoder.load(path, param_dtype=jnp.dtype(dtype))
    if target not in config.labels:
        labels = ", ".join(config.labels) or "none: it has no classification head"
        raise ValueError(
            f"classifier.target={target!r} is not a label of the model at {path} ({labels}). "
            "Set it to one of its labels"
        )
    params, tokenizer = jax.device_put(params, device), Tokenizer.load(path)
    most = min(ENCODER_TOKENS, config.max_tokens)
    program = _label_program(config, config.labels.index(target), dtype)

    def classify(prompts: Sequence[str], responses: Sequence[str]) -> np.ndarray:
        return in_batches(
            [tokenizer.encode_complete(text, most) for text in responses],
            length_buckets(most, 3),
            lambda batch, length: program(params, *right_pad(batch, length, tokenizer.pad_id)),
        )

    return classify


def _make_guard(path: str, target: str, dtype: str, device: Any) -> Classifier:
    """Return log p(verdict | conversation) of a guard, a language model with a chat template.

    The verdict is scored as the model's reply. A conversation that is too long is an error.
    """
    with jax.default_device(device):
        config, params, tokenizer = models.load(path, param_dtype=jnp.dtype(dtype))
    if config.num_labels:
        raise ValueError(
            f"classifier.path={path}: a classifier with {config.num_labels} labels; "
            "a guard is a language model. Give one, or a RoBERTa encoder"
        )
    params, verdict = jax.device_put(params, device), tokenizer.encode(target, add_bos=False)
    if not len(verdict):
        raise ValueError("classifier.target is empty. Set it to the guard's verdict: unsafe")
    tokenizer.format_chat([{"role": "user", "content": "a"}])  # fails without a template
    most = min(GUARD_TOKENS, config.max_positions - len(verdict))
    program = _verdict_program(config, len(verdict), dtype, platform_of(device))

    def conversation(prompt: str, response: str) -> np.ndarray:
        messages = [{"role": "user", "content": prompt}]
        messages += [{"role": "assistant", "content": response}]
        text = tokenizer.format_chat(messages, is_complete=True)
        return tokenizer.encode(text, add_bos=False)

    def launch(batch: list[np.ndarray], length: int) -> Array:
        tokens = left_pad(batch, length, tokenizer.pad_id)
        replies = np.broadcast_to(verdict, (len(batch), len(verdict)))
        lengths = np.array([len(row) for row in batch], np.int32)
        return program(params, np.concatenate([tokens, replies], axis=1), lengths)

    def classify(prompts: Sequence[str], responses: Sequence[str]) -> np.ndarray:
        rows = list(map(conversation, prompts, responses))
        return in_batches(rows, length_buckets(most, 3), launch)

    return classify


@functools.cache  # replicas on several devices share the program
def _label_program(config: encoder.EncoderConfig, label: int, dtype: str) -> Callable[..., Array]:
    """Return jitted (params, tokens [b s], mask [b s]) -> log p(label) [b]."""

    @jax.jit
    def program(params: encoder.Params, tokens: Array, mask: Array) -> Array:
        logits = encoder.classify(
            params, tokens, mask, config=config, compute_dtype=jnp.dtype(dtype)
        )
        return jax.nn.log_softmax(logits, axis=-1)[:, label]

    return program


@functools.cache
def _verdict_program(
    config: Any, num_tokens: int, dtype: str, platform: Platform
) -> Callable[..., Array]:
    """Return jitted (params, tokens [b s + num_tokens], conversation lengths [b]) -> log p [b]."""

    @jax.jit
    def program(params: Any, tokens: Array, prompt_lengths: Array) -> Array:
        logprobs = token_logprobs(
            params,
            tokens[:, None],
            prompt_lengths[:, None],
            jnp.full((len(tokens), 1), num_tokens, jnp.int32),
            response_bucket=num_tokens,
            config=config,
            scoring=Scoring(compute_dtype=dtype),
            sharding=ComputeSharding(config, any_device(platform)),
        )
        return jnp.sum(logprobs[:, 0], axis=-1)

    return program
