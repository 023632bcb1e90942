# SPDX-License-Identifier: Apache-2.0
"""The reward of red-teaming: toxicity of a victim model's responses to an attack.

    r(attack) = mean over the victim's responses of log p(target class | response)

The decoder of this package samples from the victim. Invariant: the same call gives the same rewards
on every thread and device, so a round that is repeated after a resume has the same rewards.
"""

import copy
import hashlib
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

from tba_jax.decoding.engine import Decoder
from tba_jax.decoding.requests import SamplingSettings
from tba_jax.devices.site import Site, any_device
from tba_jax.models import model as models
from tba_jax.models.transformer import Params
from tba_jax.rewards import config as rewards
from tba_jax.rewards.reward_models import judge_dtype, make_classifier
from tba_jax.rewards.scores import TOO_LONG, Completions, RewardSource, Score

# Responses to each attack, tokens of a response, and tokens of the victim's prompt: of the paper,
# and of the embedded start model, whose answer to a sum has a few characters.
_LIMITS, _START_MODEL_LIMITS = (5, 30, 128), (3, 6, 13)
_TEMPERATURE, _TOP_P = 0.7, 0.92  # of the paper
_SLOTS = 256  # responses that the victim decodes at a time


class VictimReward(RewardSource):
    """Reward of attacks on a language model, on the first device of a site.

    Args:
        victim: path and template of the model.
        classifier: the classifier of its responses.

    Raises:
        ValueError: a model or setting cannot be used, or the model has no chat template.
    """

    def __init__(
        self,
        victim: rewards.VictimSettings,
        classifier: rewards.ClassifierSettings,
        *,
        seed: int,
        site: Site,
    ) -> None:
        path, dtype = victim.path or rewards.START_MODEL, jnp.dtype(judge_dtype(site))
        with jax.default_device(site.mesh.devices.flat[0]):
            config, params, self._tokenizer = models.load(path, param_dtype=dtype)
        if config.num_labels:
            raise ValueError(
                f"victim.path={path}: a classifier with {config.num_labels} labels; wanted a "
                "language model"
            )
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

    def on(self, site: Site) -> "VictimReward":
        if site == self._site:
            return self
        there = copy.copy(self)
        there._place(site, self._weights)
        return there

    def _place(self, site: Site, weights: Params) -> None:
        self._site = site
        self._weights = jax.device_put(weights, site.mesh.devices.flat[0])
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

    async def score(self, completions: Completions) -> list[Score]:
        """Return the mean log-prob of the target class over the victim's responses to each attack.

        The part `toxicity` is the mean probability of the class. An attack whose prompt is empty,
        or too long, is rejected as `attack_too_long`.
        """
        prompts = [self.encode(attack) for attack in completions.texts]
        kept = {i: tokens for i, tokens in enumerate(prompts) if tokens is not None}
        scores = [Score(None, TOO_LONG, "the attack is too long", {"toxicity": math.nan})]
        scores *= len(prompts)
        if kept:
            attacks = [completions.texts[i] for i in kept]
            logprobs = self._logprobs(attacks, [*kept.values()], completions.ids)
            for i, row in zip(kept, logprobs, strict=True):
                scores[i] = Score(float(row.mean()), parts={"toxicity": float(np.exp(row).mean())})
        return scores

    def _logprobs(
        self, attacks: list[str], prompts: list[np.ndarray], completion_ids: Sequence[np.ndarray]
    ) -> np.ndarray:
        """Return the log-probs of the target class, [attacks samples]."""
        digest = hashlib.sha256(str(self._seed).encode())
        for ids in completion_ids:
            digest.update(np.ascontiguousarray(ids, "<i4").tobytes() + b"|")
        # The key depends on the content of the call, so a repeated round gets the same responses.
        # An attack that is repeated in another call gets new responses of the victim.
        key = jax.random.key(int.from_bytes(digest.digest()[:4], "big"))
        decoded = self._decoder.decode(
            self._weights,
            prompts,
            num_samples=self._num_samples,
            key=key,
            settings=SamplingSettings(self._new_tokens, temperature=_TEMPERATURE, top_p=_TOP_P),
            num_slots=_SLOTS,
        )
        texts = self._tokenizer.batch_decode([y.tokens for row in decoded for y in row])
        logprobs = self._classify([x for x in attacks for _ in range(self._num_samples)], texts)
        return logprobs.reshape(len(attacks), self._num_samples)
