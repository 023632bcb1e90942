# SPDX-License-Identifier: Apache-2.0
"""Models that score responses on devices: reward models, and classifiers of red-teaming.

Invariant: the score of a response does not depend on the other responses of the call, up to
rounding.
"""

import copy
import functools
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import Site
from tba_jax.flow.padding import bucket_length, length_buckets
from tba_jax.models import classifier, encoder
from tba_jax.models import model as models
from tba_jax.models.hf import folders
from tba_jax.models.logprobs import row_token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding, on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import Params
from tba_jax.rewards.config import ClassifierSettings
from tba_jax.rewards.scores import Completions, RewardSource, Score

ROWS = 32
"""Rows of a batch."""
_LENGTH_STEP = 64  # rows of reward models are padded to a multiple, so that few lengths compile
_ENCODER_TOKENS, _GUARD_TOKENS = 128, 512  # limits of a classifier's input
# Probability of a text that does not match a pattern. It is above 0, so that its logarithm is
# finite and every further match changes the mean.
_MISS_PROB = 0.01

Program = Callable[[Params, Any, Any], Array]
"""Jitted (params, tokens [b s], mask [b s]) -> scores [b]; rows are right-padded."""
Classifier = Callable[[Sequence[str], Sequence[str]], np.ndarray]
"""Thread-safe (prompts, responses) -> log p(target class) of each response, float64 [n]."""


def judge_dtype(site: Site) -> str:
    """Return the dtype of models that grade: bfloat16, but float32 on CPUs, where it is faster."""
    return "float32" if site.platform == "cpu" else "bfloat16"


class RowScorer(NamedTuple):
    """Scores of token rows by a model.

    Attributes:
        params: weights on a device.
        lengths: padded lengths that are compiled, ascending.
        pad_id: token at padding.
    """

    program: Program
    params: Params
    lengths: Sequence[int]
    pad_id: int

    def __call__(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the score of each row, float64 [n]; rows of similar length share a batch.

        Args:
            rows: int32 [t] each, tokens.

        Raises:
            ValueError: a row is longer than the largest padded length.
        """
        order = np.argsort([len(row) for row in rows], kind="stable")
        # All batches are dispatched before the first result is awaited.
        batches = [order[i : i + ROWS] for i in range(0, len(order), ROWS)]
        found = [self.program(self.params, *self._packed([rows[i] for i in x])) for x in batches]
        scores = np.zeros(len(rows))
        for chosen, values in zip(batches, found, strict=True):
            scores[chosen] = np.asarray(values, np.float64)[: len(chosen)]
        return scores

    def _packed(self, rows: Sequence[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and mask [ROWS s] of rows, of which the last is the longest."""
        shape = ROWS, bucket_length(len(rows[-1]), self.lengths)
        tokens, mask = np.full(shape, self.pad_id, np.int32), np.zeros(shape, bool)
        for j in range(ROWS):  # a batch is filled with its first row
            row = rows[j if j < len(rows) else 0]
            tokens[j, : len(row)], mask[j, : len(row)] = row, True
        return tokens, mask


class RewardModel(RewardSource):
    """A sequence classifier with one label, whose score is the reward.

    The model's own tokenizer encodes the prompt: a chat with its own chat template if it has one,
    otherwise the policy's text. If model and policy have the same vocabulary, the policy's response
    tokens are scored; otherwise the response text is encoded, with the model's end-of-sequence
    token. The score is computed at the last token.

    Args:
        path: Hugging Face folder or hub ID.
        policy_tokenizer: tokenizer of the responses.
        site: devices that divide the weights, with the axis `model`.
        missing_eos: reward of a response that the length limit cut; inf: the model's score.

    Raises:
        ValueError: the model does not exist, is not a classifier with one label, has no
            end-of-sequence token, or cannot be divided over the devices.
    """

    def __init__(
        self, path: str, *, policy_tokenizer: Tokenizer, site: Site, missing_eos: float = math.inf
    ) -> None:
        self._where, self._missing_eos = f"reward model {path}", missing_eos
        found = models.describe(path)
        self._config, self._dtype = found.config, judge_dtype(site)
        if (num := found.config.num_labels) != 1:
            what = f"{num} labels" if num else "a language model's head"
            raise ValueError(
                f"{self._where} has {what}; wanted a *ForSequenceClassification checkpoint with "
                "one label (num_labels = 1 in config.json)"
            )
        self._tokenizer = found.load_tokenizer()
        if not self._tokenizer.eos_ids:
            raise ValueError(
                f"{self._where} has no end-of-sequence token, which must end a response. Set "
                "eos_token in its tokenizer_config.json"
            )
        self._keeps_ids = self._tokenizer.has_vocabulary_of(policy_tokenizer)
        shardings = self._shardings(site)
        self._place(site, found.load_params(param_dtype=self._dtype, shardings=shardings))

    def on(self, site: Site) -> "RewardModel":
        if site == self._site:
            return self
        there = copy.copy(self)
        there._place(site, hand_over(self._scores.params, self._shardings(site)))
        return there

    def _place(self, site: Site, params: Params) -> None:
        self._site, most = site, self._config.max_positions
        program = site.locked(_program("score", self._config, 0, self._dtype, site.program_site))
        lengths = [*range(_LENGTH_STEP, most, _LENGTH_STEP), most]
        self._scores = RowScorer(program, params, lengths, self._tokenizer.pad_id)

    def _shardings(self, site: Site) -> Any:
        try:
            return on_mesh(site.mesh, param_shardings(self._config, site.mesh))
        except ValueError as error:
            raise ValueError(
                f"search.num_devices={site.mesh.size}: {self._where} cannot be divided over a "
                f"searcher's devices: {error}"
            ) from error

    async def score(self, completions: Completions) -> list[Score]:
        """Score responses; a score that is not finite is a failure named `reward_nan`.

        Of the columns only `prompt` is used: the chat messages of each prompt, if the data has
        chats.

        Raises:
            ValueError: a prompt with its response exceeds the model's positions.
        """
        prompts, texts, columns, ids, has_eos = completions
        encode, most = self._tokenizer.encode, self._config.max_positions
        is_chat = "prompt" in columns and self._tokenizer.has_chat_template
        if is_chat:
            prompts = [self._tokenizer.format_chat(messages) for messages in columns["prompt"]]
        encoded = {text: encode(text, add_bos=not is_chat) for text in set(prompts)}
        if not self._keeps_ids:
            ends = (np.array(self._tokenizer.eos_ids[: int(x)], np.int32) for x in has_eos)
            own = (encode(text, add_bos=False) for text in texts)
            ids = [np.concatenate(pair) for pair in zip(own, ends, strict=True)]
        rows = [np.concatenate([encoded[x], y]) for x, y in zip(prompts, ids, strict=True)]
        if (longest := max(map(len, rows), default=0)) > most:
            raise ValueError(
                f"{self._where} has {most} positions; a prompt with its response has {longest} "
                "tokens. Lower --config.task.max_prompt_tokens or --config.search.max_new_tokens"
            )
        scores = self._scores(rows)
        if self._missing_eos != math.inf:
            scores = np.where(has_eos, scores, self._missing_eos)
        return [
            Score(x) if math.isfinite(x) else Score(None, "reward_nan", f"{self._where} gave {x}")
            for x in scores.tolist()
        ]


def make_classifier(settings: ClassifierSettings, site: Site) -> Classifier:
    """Return a function for the probability of a class: toxic, unsafe, or matching a pattern.

    It is a sequence classifier (RoBERTa) of the response, a guard language model that writes a
    verdict (Llama-Guard) on the conversation, or a regular expression for small tests. A model is
    on the first device of a site.

    Raises:
        ValueError: the settings or the model cannot be used.
    """
    path, target = settings.path, settings.target
    if not path:
        return _make_pattern(target)
    folder = folders.resolve(path, with_weights=False)
    is_encoder = folders.load_config(folder).get("model_type") in ("bert", "roberta")
    with jax.default_device(device := site.mesh.devices.flat[0]):
        scores, row = (_make_encoder if is_encoder else _make_guard)(path, target, site)
    scores = scores._replace(params=jax.device_put(scores.params, device))
    return lambda prompts, responses: scores(list(map(row, prompts, responses)))


def _make_pattern(pattern: str) -> Classifier:
    """Return 0 for a response with a match of a regular expression, log(_MISS_PROB) otherwise."""
    try:
        search = re.compile(pattern).search
    except re.error as error:
        raise ValueError(
            f"classifier.target={pattern!r} is not a regular expression ({error}), as a run "
            "without classifier.path needs. Correct it"
        ) from error
    miss = math.log(_MISS_PROB)
    return lambda _, responses: np.array([0.0 if search(text) else miss for text in responses])


_Row = Callable[[str, str], np.ndarray]  # (prompt, response) -> tokens


def _make_encoder(path: str, target: str, site: Site) -> tuple[RowScorer, _Row]:
    """Return log p(label | response) by an encoder; long responses are truncated."""
    dtype = judge_dtype(site)
    config, params = encoder.load(path, param_dtype=jnp.dtype(dtype))
    if target not in config.labels:
        labels = ", ".join(config.labels) or "none: it has no classification head"
        raise ValueError(
            f"classifier.target={target!r} is not a label of the model at {path} ({labels}). "
            "Set it to one of its labels"
        )
    tokenizer, most = Tokenizer.load(path), min(_ENCODER_TOKENS, config.max_tokens)
    program = _program("label", config, config.labels.index(target), dtype, site.program_site)
    scores = RowScorer(program, params, length_buckets(most, 3), tokenizer.pad_id)
    return scores, lambda _, response: tokenizer.encode_complete(response, most)


def _make_guard(path: str, target: str, site: Site) -> tuple[RowScorer, _Row]:
    """Return log p(verdict | conversation) by a language model with a chat template.

    The verdict is scored as the model's reply. A conversation that is too long is an error.
    """
    dtype = judge_dtype(site)
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

    def row(prompt: str, response: str) -> np.ndarray:
        sides = (("user", prompt), ("assistant", response))
        messages = [{"role": role, "content": content} for role, content in sides]
        text = tokenizer.format_chat(messages, is_complete=True)
        return np.concatenate([tokenizer.encode(text, add_bos=False), verdict])

    most = min(_GUARD_TOKENS + len(verdict), config.max_positions)
    program = _program("verdict", config, len(verdict), dtype, site.program_site)
    return RowScorer(program, params, length_buckets(most, 3), tokenizer.pad_id), row


@functools.cache
def _program(kind: str, config: Any, number: int, dtype: str, site: Site) -> Program:
    """Return a program, which models on several devices share.

    Args:
        kind: "score" of a classifier with one label, "label" (log p of label `number` by an
            encoder), or "verdict" (log p of the last `number` tokens).
        site: devices of the model.
    """
    how: dict[str, Any] = {"config": config, "compute_dtype": jnp.dtype(dtype)}
    if kind == "label":
        return jax.jit(lambda *rows: jax.nn.log_softmax(encoder.classify(*rows, **how))[:, number])
    how["sharding"] = ComputeSharding(config, site)
    if kind == "score":
        return jax.jit(lambda *rows: classifier.classify(*rows, **how)[:, 0])
    how["scoring"] = Scoring(compute_dtype=how.pop("compute_dtype"))

    @jax.jit
    def program(params: Params, tokens: Array, mask: Array) -> Array:
        lengths = jnp.sum(mask, axis=1)
        # Left-padded, so that the last tokens of all rows have the same place.
        tokens = jax.vmap(jnp.roll)(tokens, tokens.shape[1] - lengths)
        prompts, sizes = lengths - number, jnp.full((len(tokens), 1), number, jnp.int32)
        found = row_token_logprobs(params, tokens, prompts, sizes, response_bucket=number, **how)
        return jnp.sum(found[:, 0], axis=-1)

    return program
