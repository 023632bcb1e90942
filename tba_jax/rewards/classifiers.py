# SPDX-License-Identifier: Apache-2.0
"""Probability that a response belongs to a target class: toxic, unsafe, or matching a pattern.

Three classifiers have one interface: a sequence classifier (RoBERTa), a guard language model that
writes a verdict (Llama-Guard), and a regular expression for small tests. Invariant: the probability
of a text does not depend on the other texts of the call.
"""

import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array, Float

from tba_jax.devices.platform import Platform, platform_of
from tba_jax.devices.site import any_device
from tba_jax.flow.padding import bucket_length, left_pad, length_buckets
from tba_jax.models import encoder
from tba_jax.models import model as models
from tba_jax.models.hf import folders
from tba_jax.models.logprobs import token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.rewards.config import ENCODER_TOKENS, GUARD_TOKENS, JUDGE_ROWS, ClassifierSettings

# Probability of a text that does not match a pattern. It is above 0, so that its logarithm is
# finite and every further match changes the mean.
MISS_PROB = 0.01


class ResponseClassifier(Protocol):
    """Thread-safe classifier of responses to prompts."""

    def target_logprob(
        self, prompts: Sequence[str], responses: Sequence[str]
    ) -> Float[np.ndarray, " n"]:
        """Return log p(target class) of each response, at most 0."""
        ...


class PatternClassifier:
    """A response belongs to the class if `re.search(pattern, response)` matches.

    Raises:
        ValueError: the pattern is not a regular expression.
    """

    def __init__(self, pattern: str) -> None:
        try:
            self._pattern = re.compile(pattern)
        except re.error as error:
            raise ValueError(
                f"classifier.target={pattern!r} is not a regular expression ({error}), as "
                "a run without classifier.path needs. Correct it"
            ) from error

    def target_logprob(
        self, prompts: Sequence[str], responses: Sequence[str]
    ) -> Float[np.ndarray, " n"]:
        """Return 0 for a match, log(MISS_PROB) otherwise."""
        found = [self._pattern.search(response) is not None for response in responses]
        return np.where(found, 0.0, math.log(MISS_PROB))


class EncoderClassifier:
    """A RoBERTa sequence classifier of the response alone; long responses are truncated.

    Args:
        settings: settings of kind "encoder".

    Raises:
        ValueError: the path has no usable model, or the model has no such label.
    """

    def __init__(self, settings: ClassifierSettings, dtype: str, device: Any) -> None:
        path, target = settings.path, settings.target
        with jax.default_device(device):
            config, params = encoder.load(path, param_dtype=jnp.dtype(dtype))
        if target not in config.labels:
            labels = ", ".join(config.labels) or "none: it has no classification head"
            raise ValueError(
                f"classifier.target={target!r} is not a label of the model at {path} ({labels}). "
                "Set it to one of its labels"
            )
        self._target = config.labels.index(target)
        self._params = jax.device_put(params, device)
        self._tokenizer = Tokenizer.load(path)
        self._max_tokens = min(ENCODER_TOKENS, config.max_tokens)
        self._buckets = length_buckets(self._max_tokens, 3)
        self._program = classify_program(config, dtype)

    def target_logprob(
        self, prompts: Sequence[str], responses: Sequence[str]
    ) -> Float[np.ndarray, " n"]:
        """Return the log-softmax of the model's logits at the target label."""
        rows = [self._tokenizer.encode_complete(text, self._max_tokens) for text in responses]
        return _in_batches(rows, self._target_logprobs)

    def _target_logprobs(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        length = bucket_length(max(map(len, batch)), self._buckets)
        tokens = np.zeros((JUDGE_ROWS, length), np.int32)
        mask = np.zeros((JUDGE_ROWS, length), bool)
        for i, row in enumerate(batch):
            tokens[i, : len(row)], mask[i, : len(row)] = row, True
        mask[len(batch) :, 0] = True  # filler rows; their results are dropped
        return np.asarray(self._program(self._params, tokens, mask))[:, self._target]


class GuardClassifier:
    """A guard model: the log-prob of its verdict on a prompt and a response.

    The conversation is formatted with the model's chat template, and the verdict is scored as the
    model's reply. A conversation that is too long is refused.

    Args:
        settings: `path` is a language model whose tokenizer has a
            template.

    Raises:
        ValueError: the path has no usable model, or the verdict has no tokens.
    """

    def __init__(self, settings: ClassifierSettings, dtype: str, device: Any) -> None:
        path = settings.path
        with jax.default_device(device):
            model = models.load(path, param_dtype=jnp.dtype(dtype))
        if model.config.num_labels:
            raise ValueError(
                f"classifier.path={path}: a classifier with {model.config.num_labels} labels; "
                "a guard is a language model. Give one, or a RoBERTa encoder"
            )
        self._params = jax.device_put(model.params, device)
        self._tokenizer = model.tokenizer
        self._verdict = self._tokenizer.encode(settings.target, add_bos=False)
        if not len(self._verdict):
            raise ValueError("classifier.target is empty. Set it to the guard's verdict: unsafe")
        self._tokenizer.format_chat([{"role": "user", "content": "a"}])  # fails without a template
        self._max_tokens = min(GUARD_TOKENS, model.config.max_positions - len(self._verdict))
        self._buckets = length_buckets(self._max_tokens, 3)
        self._program = verdict_program(
            model.config, len(self._verdict), dtype, platform_of(device)
        )

    def target_logprob(
        self, prompts: Sequence[str], responses: Sequence[str]
    ) -> Float[np.ndarray, " n"]:
        """Return log p(verdict | conversation).

        Raises:
            ValueError: a conversation has more than max_tokens tokens.
        """
        rows = [self._conversation(*pair) for pair in zip(prompts, responses, strict=True)]
        return _in_batches(rows, self._verdict_logprobs)

    def _verdict_logprobs(self, batch: Sequence[np.ndarray]) -> np.ndarray:
        length = bucket_length(max(map(len, batch)), self._buckets)
        filled = [*batch, *[batch[0]] * (JUDGE_ROWS - len(batch))]
        tokens = left_pad(filled, length, self._tokenizer.pad_id)
        verdict = np.broadcast_to(self._verdict, (len(filled), len(self._verdict)))
        lengths = np.array([len(row) for row in filled], np.int32)
        rows_and_verdict = np.concatenate([tokens, verdict], axis=1)
        return np.asarray(self._program(self._params, rows_and_verdict, lengths))

    def _conversation(self, prompt: str, response: str) -> np.ndarray:
        messages = [
            {"role": "user", "content": prompt},
            {"role": "assistant", "content": response},
        ]
        text = self._tokenizer.format_chat(messages, is_complete=True)
        return self._tokenizer.encode(text, add_bos=False)


def make_classifier(settings: ClassifierSettings, dtype: str, device: Any) -> ResponseClassifier:
    """Return the classifier that the settings describe.

    Args:
        dtype: dtype of a model's weights and activations.
        device: device of a model's weights.

    Raises:
        ValueError: the settings or the model cannot be used.
    """
    if not settings.path:
        return PatternClassifier(settings.target)
    folder = folders.resolve(settings.path, with_weights=False)
    is_encoder = folders.load_config(folder).get("model_type") in ("bert", "roberta")
    return (EncoderClassifier if is_encoder else GuardClassifier)(settings, dtype, device)


@functools.cache  # replicas on several devices share the program
def classify_program(config: encoder.EncoderConfig, dtype: str) -> Any:
    """Return the jitted (params, tokens [b s], mask [b s]) -> log-probs of the labels [b n]."""

    @jax.jit
    def program(params: encoder.Params, tokens: Array, mask: Array) -> Array:
        logits = encoder.classify(
            params, tokens, mask, config=config, compute_dtype=jnp.dtype(dtype)
        )
        return jax.nn.log_softmax(logits, axis=-1)

    return program


@functools.cache
def verdict_program(config: Any, num_tokens: int, dtype: str, platform: Platform) -> Any:
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


def _in_batches(
    rows: Sequence[np.ndarray], score: Callable[[Sequence[np.ndarray]], np.ndarray]
) -> np.ndarray:
    """Return scores of all rows, computed in batches; scores of filler rows are dropped."""
    batches = [rows[i : i + JUDGE_ROWS] for i in range(0, len(rows), JUDGE_ROWS)]
    return np.concatenate([score(x)[: len(x)] for x in batches]).astype(np.float64)
