# SPDX-License-Identifier: Apache-2.0
"""The reward of red-teaming: what a victim model makes of an attack, and how toxic that is.

    r(attack) = mean over n victim responses of log p(target class | response)

A `RewardSource`: searchers and evaluation call it as they call the text rewards. The victim is
sampled by the project's own engine. Invariant: the same call gives the same rewards, whatever
thread or device serves it, so that a round done again after a resume is the same round.
"""

import hashlib
import queue
import threading
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.platform import Platform, platform_of
from tba_jax.devices.site import any_device
from tba_jax.flow.padding import length_buckets
from tba_jax.models import model as models
from tba_jax.models.transformer import TransformerConfig
from tba_jax.rewards.classifiers import ResponseClassifier
from tba_jax.rewards.config import ATTACK, CHAT_TEMPLATE, VictimSettings
from tba_jax.rewards.source import ScoreResult

# How long a call waits for a free replica before it says that something hangs.
_WAIT_S = 3600.0


class Victim:
    """A language model that answers attacks; its weights live on one or several devices.

    Args:
        path: model folder or hub id.
        settings: how it is asked; their own path is not read.
        devices: one copy of the weights each.

    Raises:
        ValueError: no usable model there, or one without enough positions or chat template.
    """

    def __init__(self, path: str, settings: VictimSettings, *, devices: Sequence[Any]) -> None:
        with jax.default_device(devices[0]):
            config, params, self._tokenizer = models.load(
                path, param_dtype=jnp.dtype(settings.dtype)
            )
        if config.num_labels:
            raise ValueError(
                f"the victim at {path} is a classifier with {config.num_labels} labels; "
                "victim.path needs a language model"
            )
        self._settings = settings
        self.format("a")  # a template that cannot be used is refused now
        longest = settings.max_prompt_tokens + settings.max_new_tokens
        if longest > config.max_positions:
            raise ValueError(
                f"victim.max_prompt_tokens and victim.max_new_tokens are {longest} tokens "
                f"together, the victim at {path} was made for {config.max_positions}; lower them"
            )
        self._decoder = make_victim_decoder(
            config,
            settings.max_prompt_tokens,
            settings.max_new_tokens,
            dtype=settings.dtype,
            eos_ids=self._tokenizer.eos_ids,
            pad_id=self._tokenizer.pad_id,
            platform=platform_of(devices[0]),
        )
        weights = self._decoder.weights(params)
        self.weights = {
            device: jax.device_put(weights, device) for device in dict.fromkeys(devices)
        }

    def format(self, attack: str) -> str:
        """The victim's prompt for an attack."""
        if self._settings.template == CHAT_TEMPLATE:
            return self._tokenizer.format_chat([{"role": "user", "content": attack}])
        return self._settings.template.replace(ATTACK, attack)

    def encode(self, attack: str) -> np.ndarray | None:
        """Token ids of the victim's prompt, None where they are none or too many."""
        tokens = self._tokenizer.encode(self.format(attack), add_bos=True)
        return tokens if 0 < len(tokens) <= self._settings.max_prompt_tokens else None

    def respond(self, prompts: Sequence[np.ndarray], weights: Any, key: jax.Array) -> list[str]:
        """`num_samples` responses to each prompt, one prompt after the other."""
        s = self._settings
        decoded = self._decoder.decode(
            weights,
            prompts,
            num_samples=s.num_samples,
            key=key,
            settings=SamplingSettings(s.max_new_tokens, temperature=s.temperature, top_p=s.top_p),
            num_slots=s.num_slots,
        )
        tokens = decoded.tokens.reshape(-1, decoded.tokens.shape[-1])
        lengths = decoded.lengths.reshape(-1)
        return self._tokenizer.batch_decode(
            [row[:n] for row, n in zip(tokens, lengths, strict=True)]
        )


def make_victim_decoder(
    config: TransformerConfig,
    max_prompt_tokens: int,
    max_new_tokens: int,
    *,
    dtype: str,
    eos_ids: Sequence[int],
    pad_id: int,
    platform: Platform = "any",
) -> Decoder:
    """The victim's decoder; arguments as in `VictimSettings` and `Decoder`."""
    return Decoder(
        config,
        compute_dtype=jnp.dtype(dtype),
        eos_ids=eos_ids,
        pad_id=pad_id,
        prompt_buckets=length_buckets(max_prompt_tokens, 2),
        max_length=max_prompt_tokens + max_new_tokens,
        site=any_device(platform),
    )


class VictimReward:
    """Scores attacks; implements `RewardSource`. Calls beside one another use different devices.

    Args:
        victim: the model under attack.
        classifiers: device -> classifier, for every device the victim is on.
        replicas: devices that serve calls; one that is named twice serves two at a time.
        num_samples: the victim's responses per attack.
        seed: of the run.
    """

    def __init__(
        self,
        victim: Victim,
        classifiers: Mapping[Any, ResponseClassifier],
        *,
        replicas: Sequence[Any],
        num_samples: int,
        seed: int,
    ) -> None:
        self._victim = victim
        self._classifiers = dict(classifiers)
        self._num_samples = num_samples
        self._seed = seed
        self._free: queue.SimpleQueue[Any] = queue.SimpleQueue()
        for device in replicas:
            self._free.put(device)
        self._closed = threading.Event()

    def check(self) -> None:
        """Nothing to wait for: the models were loaded and checked when this was made."""

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[np.ndarray],
        has_eos: Sequence[bool],
    ) -> ScoreResult:
        """Mean log-prob of the target class over the victim's responses to each attack.

        Parts: `toxicity`, the mean probability of the class. An attack whose prompt is longer than
        victim.max_prompt_tokens is rejected as `attack_too_long`; one that makes no prompt at all
        counts too.

        Raises:
            RuntimeError: the source was closed.
        """
        if self._closed.is_set():
            raise RuntimeError("the victim's rewards were asked for after they were closed")
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
        """[attacks samples] log-probs of the target class."""
        digest = hashlib.sha256(str(self._seed).encode())
        for ids in completion_ids:
            digest.update(np.ascontiguousarray(ids, "<i4").tobytes() + b"|")
        # Of the call's content: an attack that comes up again meets other responses of the victim,
        # and a round that is done again meets the same ones.
        key = jax.random.key(int.from_bytes(digest.digest()[:4], "big"))
        device = self._free.get(timeout=_WAIT_S)
        try:
            texts = self._victim.respond(prompts, self._victim.weights[device], key)
            repeated = [attack for attack in attacks for _ in range(self._num_samples)]
            logprobs = self._classifiers[device].target_logprob(repeated, texts)
        finally:
            self._free.put(device)
        return logprobs.reshape(len(attacks), self._num_samples)

    def on(self, site: Any) -> "VictimReward":
        """Itself: it has a replica for every searcher."""
        return self

    def close(self) -> None:
        """Refuse further calls; one under way ends by itself."""
        self._closed.set()
