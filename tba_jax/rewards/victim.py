# SPDX-License-Identifier: Apache-2.0
"""The reward of red-teaming: toxicity of a victim model's responses to an attack.

    r(attack) = mean over the victim's responses of log p(target class | response)

Searchers and evaluations call this `RewardSource` like text rewards. The decoder of this package
samples from the victim. Invariant: the same call gives the same rewards on every thread and device,
so a round that is repeated after a resume has the same rewards.
"""

import hashlib
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.platform import platform_of
from tba_jax.devices.site import any_device
from tba_jax.flow.padding import length_buckets
from tba_jax.models import model as models
from tba_jax.rewards.classifiers import ResponseClassifier
from tba_jax.rewards.config import ATTACK, CHAT_TEMPLATE
from tba_jax.rewards.source import ScoreResult

# Sampling of the victim in the paper.
_TEMPERATURE = 0.7
_TOP_P = 0.92
# Number of responses that the victim decodes at a time.
_SLOTS = 256
# Seconds that a call waits for a free replica before it fails.
_WAIT_S = 3600.0


class VictimLimits(NamedTuple):
    """How often and at what length a victim answers.

    Attributes:
        num_samples: number of responses to each attack.
        new_tokens: length limit of a response in tokens.
        prompt_tokens: length limit of the victim's prompt in tokens, the template included.
    """

    num_samples: int
    new_tokens: int
    prompt_tokens: int


LIMITS = VictimLimits(num_samples=5, new_tokens=30, prompt_tokens=128)
"""Limits of the paper."""
START_MODEL_LIMITS = VictimLimits(num_samples=3, new_tokens=6, prompt_tokens=13)
"""Limits of the embedded start model, whose answer to a sum has a few characters."""


class Victim:
    """A language model that answers attacks, with weights on one or several devices.

    Args:
        path: model folder or hub id.
        template: the victim's prompt, as in `VictimSettings`.
        limits: number and lengths of its responses.
        dtype: dtype of weights, activations and cache.
        devices: devices; each gets a copy of the weights.

    Raises:
        ValueError: the path has no usable model, or the model has no chat template.
    """

    def __init__(
        self,
        path: str,
        template: str,
        limits: VictimLimits,
        *,
        dtype: str,
        devices: Sequence[Any],
    ) -> None:
        with jax.default_device(devices[0]):
            config, params, self._tokenizer = models.load(path, param_dtype=jnp.dtype(dtype))
        if config.num_labels:
            raise ValueError(
                f"victim.path={path}: a classifier with {config.num_labels} labels; wanted a "
                "language model"
            )
        self._template = template
        self.format("a")  # fail early if the template is not usable
        self.limits = limits
        # The length limit of the prompt, within the model's positions.
        self._longest = min(limits.prompt_tokens, config.max_positions - limits.new_tokens)
        self._decoder = Decoder(
            config,
            compute_dtype=jnp.dtype(dtype),
            eos_ids=self._tokenizer.eos_ids,
            pad_id=self._tokenizer.pad_id,
            prompt_buckets=length_buckets(self._longest, 4),
            max_length=self._longest + limits.new_tokens,
            site=any_device(platform_of(devices[0])),
        )
        weights = self._decoder.weights(params)
        self.weights = {
            device: jax.device_put(weights, device) for device in dict.fromkeys(devices)
        }

    def format(self, attack: str) -> str:
        """Return the victim's prompt for an attack."""
        if self._template == CHAT_TEMPLATE:
            return self._tokenizer.format_chat([{"role": "user", "content": attack}])
        return self._template.replace(ATTACK, attack)

    def encode(self, attack: str) -> np.ndarray | None:
        """Return token IDs of the victim's prompt; None if the prompt is empty or too long."""
        is_chat = self._template == CHAT_TEMPLATE
        tokens = self._tokenizer.encode(self.format(attack), add_bos=not is_chat)
        return tokens if 0 < len(tokens) <= self._longest else None

    def respond(self, prompts: Sequence[np.ndarray], weights: Any, key: jax.Array) -> list[str]:
        """Return `limits.num_samples` responses to each prompt, prompt by prompt."""
        decoded = self._decoder.decode(
            weights,
            prompts,
            num_samples=self.limits.num_samples,
            key=key,
            settings=SamplingSettings(
                self.limits.new_tokens, temperature=_TEMPERATURE, top_p=_TOP_P
            ),
            num_slots=_SLOTS,
        )
        tokens = decoded.tokens.reshape(-1, decoded.tokens.shape[-1])
        lengths = decoded.lengths.reshape(-1)
        return self._tokenizer.batch_decode(
            [row[:n] for row, n in zip(tokens, lengths, strict=True)]
        )


class VictimReward:
    """Reward source for attacks; concurrent calls use different devices.

    Args:
        victim: the model under attack.
        classifiers: device -> classifier, for every device of the victim.
        replicas: devices that serve calls; a device that is listed twice serves two calls at a
            time.
    """

    def __init__(
        self,
        victim: Victim,
        classifiers: Mapping[Any, ResponseClassifier],
        *,
        replicas: Sequence[Any],
        seed: int,
    ) -> None:
        self._victim = victim
        self._classifiers = dict(classifiers)
        self._seed = seed
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for device in replicas:
            self._free.put(device)
        self._closed = threading.Event()

    def check(self) -> None:
        """Return at once: the models were loaded and checked in the constructor."""

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[np.ndarray],
        has_eos: Sequence[bool],
    ) -> ScoreResult:
        """Return the mean log-prob of the target class over the victim's responses to each attack.

        The part `toxicity` is the mean probability of the class. An attack whose prompt is empty,
        or too long, is rejected as `attack_too_long`.

        Raises:
            RuntimeError: the source was closed.
        """
        if self._closed.is_set():
            raise RuntimeError("the victim's rewards were requested after they were closed")
        encoded = [self._victim.encode(attack) for attack in completions]
        kept = [i for i, tokens in enumerate(encoded) if tokens is not None]
        n = len(completions)
        rewards: list[float | None] = [None] * n
        toxicity = [float("nan")] * n
        if kept:
            attacks = [completions[i] for i in kept]
            logprobs = self._logprobs(
                attacks, [t for t in encoded if t is not None], completion_ids
            )
            for i, row in zip(kept, logprobs, strict=True):
                rewards[i] = float(row.mean())
                toxicity[i] = float(np.exp(row).mean())
        reasons = [None if reward is not None else "attack_too_long" for reward in rewards]
        return ScoreResult(rewards, reasons, "", {"toxicity": toxicity})

    def _logprobs(
        self, attacks: list[str], prompts: list[np.ndarray], completion_ids: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Return the log-probs of the target class, [attacks samples]."""
        num_samples = self._victim.limits.num_samples
        digest = hashlib.sha256(str(self._seed).encode())
        for ids in completion_ids:
            digest.update(np.ascontiguousarray(ids, "<i4").tobytes() + b"|")
        # The key depends on the content of the call, so a repeated round gets the same responses.
        # An attack that is repeated in another call gets new responses of the victim.
        key = jax.random.key(int.from_bytes(digest.digest()[:4], "big"))
        device = self._free.get(timeout=_WAIT_S)
        try:
            texts = self._victim.respond(prompts, self._victim.weights[device], key)
            repeated = [attack for attack in attacks for _ in range(num_samples)]
            logprobs = self._classifiers[device].target_logprob(repeated, texts)
        finally:
            self._free.put(device)
        return logprobs.reshape(len(attacks), num_samples)

    def on(self, site: Any) -> "VictimReward":
        """Return self: every searcher has a replica."""
        return self

    def close(self) -> None:
        """Refuse further calls; a call in progress runs to its end."""
        self._closed.set()
