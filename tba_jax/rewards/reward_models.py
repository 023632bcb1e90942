# SPDX-License-Identifier: Apache-2.0
"""Models that score responses on devices: reward models, and victim and classifier of red-teaming.

The reward of red-teaming is the toxicity of a victim model's responses to an attack:

    r(attack) = mean over the victim's responses of log p(target class | response)

Invariants: the score of a response does not depend on the other responses of the call, up to
rounding. The same call of the victim gives the same rewards on every thread and device, so a round
that is repeated after a resume has the same rewards.
"""

import copy
import functools
import hashlib
import math
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import Site, any_device
from tba_jax.flow.padding import bucket_length, left_pad, length_buckets
from tba_jax.models import encoder, transformer
from tba_jax.models import model as models
from tba_jax.models.hf import folders
from tba_jax.models.logprobs import Scoring, row_token_logprobs
from tba_jax.models.shardings import ComputeSharding, on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import Params
from tba_jax.rewards import config as rewards
from tba_jax.rewards.config import ClassifierSettings, VictimSettings
from tba_jax.rewards.scores import TOO_LONG, Completion, RewardSource, Score

ROWS = 32  # of a batch
_LENGTH_STEP = 64  # rows of reward models are padded to a multiple, so that few lengths compile
_ENCODER_TOKENS, _GUARD_TOKENS = 128, 512  # limits of a classifier's input
# Probability of a text that does not match a pattern. It is above 0, so that its logarithm is
# finite and every further match changes the mean.
_MISS_PROB = 0.01
# Responses to each attack, tokens of a response, and tokens of the victim's prompt: of the paper,
# and of the embedded start model, whose answer to a sum has a few characters.
_LIMITS, _START_MODEL_LIMITS = (5, 30, 128), (3, 6, 13)
_TEMPERATURE, _TOP_P = 0.7, 0.92  # of the paper
_SLOTS = 256  # responses that the victim decodes at a time

Classifier = Callable[[Sequence[str], Sequence[str]], np.ndarray]
"""Thread-safe (prompts, responses) -> log p(target class) of each response, float64 [n]."""
_Row = Callable[[str, str], np.ndarray]  # (prompt, response) -> tokens


def judge_dtype(site: Site) -> str:
    """Return the dtype of models that grade: bfloat16, but float32 on CPUs, where it is faster."""
    return "float32" if site.platform == "cpu" else "bfloat16"


class RowScorer(NamedTuple):
    """Scores of token rows by a model.

    Attributes:
        program: jitted (params, tokens [b s], mask [b s]) -> scores [b]; rows are left-padded.
        params: weights on a device.
        lengths: padded lengths that are compiled, ascending.
        pad_id: token at padding.
    """

    program: Callable[[Params, Any, Any], Array]
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

    def _packed(self, rows: list[np.ndarray]) -> tuple[np.ndarray, np.ndarray]:
        """Return tokens and mask [ROWS s] of rows, of which the last is the longest."""
        length = bucket_length(len(rows[-1]), self.lengths)
        rows = rows + rows[:1] * (ROWS - len(rows))
        starts = length - np.array([len(row) for row in rows])
        return left_pad(rows, length, self.pad_id), np.arange(length) >= starts[:, None]


class _OnSite(RewardSource):
    """A source with a model; `_place(site, params)` moves it to the devices of a site."""

    _site: Site

    def on(self, site: Site) -> RewardSource:
        if site == self._site:
            return self
        there: Any = copy.copy(self)
        there._place(site, there._params)
        return there


class RewardModel(_OnSite):
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
        self._config = found.config
        if (num := found.config.num_labels) != 1:
            what = f"{num} labels" if num else "a language model's head"
            raise ValueError(f"{self._where} has {what}; wanted a classifier with one label")
        self._tokenizer = found.load_tokenizer()
        if not self._tokenizer.eos_ids:
            text = "has no end-of-sequence token. Set eos_token in its tokenizer_config.json"
            raise ValueError(f"{self._where} {text}")
        self._keeps_ids = self._tokenizer.has_vocabulary_of(policy_tokenizer)
        how: Any = {"param_dtype": judge_dtype(site), "shardings": self._shardings(site)}
        self._place(site, found.load_params(**how))

    def _place(self, site: Site, params: Params) -> None:
        self._site, most = site, self._config.max_positions
        self._params = params = hand_over(params, self._shardings(site))
        how: Any = {"config": self._config, "compute_dtype": jnp.dtype(judge_dtype(site))}
        how["sharding"] = ComputeSharding(self._config, site.program_site)
        program = jax.jit(lambda *rows: transformer.classify(*rows, **how)[:, 0])
        lengths = [*range(_LENGTH_STEP, most, _LENGTH_STEP), most]
        self._scores = RowScorer(site.locked(program), params, lengths, self._tokenizer.pad_id)

    def _shardings(self, site: Site) -> Any:
        try:
            return on_mesh(site.mesh, param_shardings(self._config, site.mesh))
        except ValueError as error:
            text = f"search.num_devices={site.mesh.size} cannot divide {self._where}: {error}"
            raise ValueError(text) from error

    def rate(self, completions: Sequence[Completion]) -> list[Score]:
        """Score responses; a score that is not finite is a failure named `reward_nan`.

        Raises:
            ValueError: a prompt with its response exceeds the model's positions.
        """
        encode = functools.cache(self._tokenizer.encode)  # responses share their prompt
        eos, rows = np.array(self._tokenizer.eos_ids, np.int32), list[np.ndarray]()
        for prompt, text, columns, ids, has_eos in completions:
            is_chat = "prompt" in columns and self._tokenizer.has_chat_template
            asked = self._tokenizer.format_chat(columns["prompt"]) if is_chat else prompt
            if ids is None or not self._keeps_ids:
                ids = np.concatenate([encode(text, add_bos=False), eos[: int(has_eos)]])
            rows.append(np.concatenate([encode(asked, add_bos=not is_chat), ids]))
        most = self._config.max_positions
        if (longest := max(map(len, rows), default=0)) > most:
            raise ValueError(
                f"{self._where} has {most} positions; a prompt with its response has {longest} "
                "tokens. Lower --config.task.max_prompt_tokens or --config.search.max_new_tokens"
            )
        scores = self._scores(rows)
        if self._missing_eos != math.inf:
            scores = np.where([x.has_eos for x in completions], scores, self._missing_eos)
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
    path, target, miss = settings.path, settings.target, math.log(_MISS_PROB)
    if not path:
        try:
            search = re.compile(target).search
        except re.error as error:
            raise ValueError(
                f"classifier.target={target!r} is not a regular expression ({error}). Correct it"
            ) from error
        return lambda _, responses: np.array([0.0 if search(x) else miss for x in responses])
    folder = folders.resolve(path, with_weights=False)
    is_encoder = folders.load_config(folder).get("model_type") in ("bert", "roberta")
    with jax.default_device(device := site.mesh.devices.flat[0]):
        scores, row = (_make_encoder if is_encoder else _make_guard)(path, target, site)
    scores = scores._replace(params=jax.device_put(scores.params, device))
    return lambda prompts, responses: scores(list(map(row, prompts, responses)))


def _make_encoder(path: str, target: str, site: Site) -> tuple[RowScorer, _Row]:
    """Return log p(label | response) by an encoder; long responses are truncated."""
    dtype = jnp.dtype(judge_dtype(site))
    config, params = encoder.load(path, param_dtype=dtype)
    if target not in config.labels:
        labels = ", ".join(config.labels) or "none: it has no classification head"
        raise ValueError(
            f"classifier.target={target!r} is not a label of the model at {path} ({labels}). "
            "Set it to one of its labels"
        )
    tokenizer, most = Tokenizer.load(path), min(_ENCODER_TOKENS, config.max_tokens)
    label, how = config.labels.index(target), {"config": config, "compute_dtype": dtype}
    program = jax.jit(lambda *rows: jax.nn.log_softmax(encoder.classify(*rows, **how))[:, label])
    scores = RowScorer(program, params, length_buckets(most, 3), tokenizer.pad_id)
    return scores, lambda _, response: tokenizer.encode_complete(response, most)


def _make_guard(path: str, target: str, site: Site) -> tuple[RowScorer, _Row]:
    """Return log p(verdict | conversation) by a language model with a chat template.

    The verdict is scored as the model's reply. A conversation that is too long is an error.
    """
    config, params, tokenizer = models.load(path, param_dtype=jnp.dtype(judge_dtype(site)))
    if config.num_labels:
        raise ValueError(f"classifier.path={path}: want a RoBERTa encoder or a language model")
    verdict = tokenizer.encode(target, add_bos=False)
    if not (n := len(verdict)):
        raise ValueError("classifier.target is empty. Set it to the guard's verdict: unsafe")

    def row(prompt: str, response: str) -> np.ndarray:
        sides = (("user", prompt), ("assistant", response))
        messages = [{"role": role, "content": content} for role, content in sides]
        text = tokenizer.format_chat(messages, is_complete=True)
        return np.concatenate([tokenizer.encode(text, add_bos=False), verdict])

    row("a", "b")  # fails without a template

    @jax.jit
    def program(params: Params, tokens: Array, mask: Array) -> Array:
        lengths = jnp.sum(mask, axis=1) - n, jnp.full((len(tokens), 1), n, jnp.int32)
        found = row_token_logprobs(params, tokens, *lengths, response_bucket=n, **how)
        return jnp.sum(found[:, 0], axis=-1)

    how: Any = {"config": config, "sharding": ComputeSharding(config, site.program_site)}
    how["scoring"] = Scoring(compute_dtype=judge_dtype(site))
    most = min(_GUARD_TOKENS + n, config.max_positions)
    return RowScorer(program, params, length_buckets(most, 3), tokenizer.pad_id), row


class VictimReward(_OnSite):
    """Reward of attacks on a language model, on the first device of a site.

    Args:
        victim: path and template of the model.
        classifier: the classifier of its responses.

    Raises:
        ValueError: a model or setting cannot be used, or the model has no chat template.
    """

    def __init__(
        self, victim: VictimSettings, classifier: ClassifierSettings, *, seed: int, site: Site
    ) -> None:
        path, dtype = victim.path or rewards.START_MODEL, jnp.dtype(judge_dtype(site))
        with jax.default_device(site.mesh.devices.flat[0]):
            config, params, self._tokenizer = models.load(path, param_dtype=dtype)
        if config.num_labels:
            raise ValueError(f"victim.path={path} is a classifier. Set it to a language model")
        limits = _START_MODEL_LIMITS if path == rewards.START_MODEL else _LIMITS
        self._num_samples, self._new_tokens, most = limits
        self._template, self._classifier, self._seed = victim.template, classifier, seed
        self.format("a")  # fail early if the template is not usable
        self._longest = min(most, config.max_positions - self._new_tokens)  # tokens of a prompt
        self._decoder = Decoder(
            config,
            compute_dtype=dtype,
            eos_ids=self._tokenizer.eos_ids,
            pad_id=self._tokenizer.pad_id,
            prompt_tokens=self._longest,
            max_length=self._longest + self._new_tokens,
            site=any_device(site.platform),
        )
        self._place(site, self._decoder.weights(params))

    def _place(self, site: Site, params: Params) -> None:
        self._site = site
        self._params = jax.device_put(params, site.mesh.devices.flat[0])
        self._classify = make_classifier(self._classifier, site)

    def format(self, attack: str) -> str:
        """Return the victim's prompt for an attack."""
        if self._template == rewards.CHAT_TEMPLATE:
            return self._tokenizer.format_chat([{"role": "user", "content": attack}])
        return self._template.replace(rewards.ATTACK, attack)

    def encode(self, attack: str) -> np.ndarray | None:
        """Return token IDs of the victim's prompt; None if the prompt is empty or too long."""
        is_chat = self._template == rewards.CHAT_TEMPLATE
        tokens = self._tokenizer.encode(self.format(attack), add_bos=not is_chat)
        return tokens if 0 < len(tokens) <= self._longest else None

    def rate(self, completions: Sequence[Completion]) -> list[Score]:
        """Return the mean log-prob of the target class over the victim's responses to each attack.

        The part `toxicity` is the mean probability of the class. An attack whose prompt is empty,
        or too long, is rejected as `attack_too_long`.
        """
        found = ((i, self.encode(x.text)) for i, x in enumerate(completions))
        prompts, n = {i: tokens for i, tokens in found if tokens is not None}, self._num_samples
        scores = [Score(None, TOO_LONG, "the attack is too long", {"toxicity": math.nan})]
        scores *= len(completions)
        if not prompts:
            return scores
        decoded = self._decoder.decode(
            self._params,
            [*prompts.values()],
            num_samples=n,
            key=self._key(completions),
            settings=SamplingSettings(self._new_tokens, temperature=_TEMPERATURE, top_p=_TOP_P),
            num_slots=_SLOTS,
        )
        texts = self._tokenizer.batch_decode([y.tokens for row in decoded for y in row])
        logprobs = self._classify([completions[i].text for i in prompts for _ in range(n)], texts)
        for i, row in zip(prompts, logprobs.reshape(-1, n), strict=True):
            scores[i] = Score(float(row.mean()), parts={"toxicity": float(np.exp(row).mean())})
        return scores

    def _key(self, completions: Sequence[Completion]) -> jax.Array:
        """Return the random key of a call, which depends on the content of the call.

        A repeated round gets the same responses, and an attack in another call gets new ones.
        """
        digest = hashlib.sha256(str(self._seed).encode())
        for x in completions:
            digest.update(np.ascontiguousarray(x.ids, "<i4").tobytes() + b"|")
        return jax.random.key(int.from_bytes(digest.digest()[:4], "big"))
