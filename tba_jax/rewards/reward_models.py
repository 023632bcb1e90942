# SPDX-License-Identifier: Apache-2.0
"""Learned rewards from a sequence classifier with one label.

A jitted program computes the score of a prompt and its response at the response's last token, on
one or several devices. Invariant: the score of a response does not depend on the other responses of
the call, up to float32 rounding, and every item gets a finite number or a named reason.
"""

import copy
import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.models import model as models
from tba_jax.models.classifier import classify
from tba_jax.models.model import Model
from tba_jax.models.shardings import ComputeSharding, on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import Params, TransformerConfig
from tba_jax.rewards.batches import in_batches, right_pad
from tba_jax.rewards.source import RewardSource, ScoreResult

# Row lengths are padded to a multiple of this number, so that few lengths are compiled.
_LENGTH_STEP = 64


class RewardModel(RewardSource):
    """A reward model.

    The model's own tokenizer encodes the prompt: a chat with its own chat template if it has one,
    otherwise the policy's text. If model and policy have the same vocabulary, the policy's response
    tokens are scored; otherwise the response text is encoded, with the model's end-of-sequence
    token.

    Args:
        model: architecture with one label, and its weights on the scoring devices.
        policy_tokenizer: tokenizer of the responses.
        missing_eos: reward of a response that the length limit cut; None: the model's score.
        site: devices that divide the weights.
        where: name of the model in error messages.

    Raises:
        ValueError: the model is not a classifier with one label, or its embedding lacks token IDs.
    """

    def __init__(
        self,
        model: Model,
        *,
        policy_tokenizer: Tokenizer,
        missing_eos: float | None = None,
        compute_dtype: Any = jnp.float32,
        site: Site = ANY_DEVICE,
        where: str = "the reward model",
    ) -> None:
        self._config, self._params, self._tokenizer = model
        if (num := self._config.num_labels) != 1:
            what = f"{num} labels" if num else "a language model's head"
            raise ValueError(
                f"{where} has {what}; wanted a *ForSequenceClassification checkpoint with one "
                "label (num_labels = 1 in config.json)"
            )
        if not self._tokenizer.eos_ids:
            raise ValueError(
                f"{where} has no end-of-sequence token, which must end a response. Set eos_token "
                "in its tokenizer_config.json"
            )
        self._keeps_ids = self._tokenizer.has_vocabulary_of(policy_tokenizer)
        self._missing_eos = missing_eos
        self._compute_dtype = str(jnp.dtype(compute_dtype))
        self._site, self._where = site, where

    @classmethod
    def load(
        cls, path_or_hub_id: str, *, site: Site, param_dtype: Any = jnp.float32, **options: Any
    ) -> "RewardModel":
        """Return the reward model of a Hugging Face folder or hub id, divided over a mesh.

        Args:
            site: scoring devices, with the axis `model`.
            param_dtype: dtype of the stored weights and of matmul inputs.

        Raises:
            ValueError: the model does not exist, is not a reward model, or cannot be divided over
                the mesh.
        """
        found = models.describe(path_or_hub_id)
        where = f"reward model {path_or_hub_id}"
        shardings = _shardings(found.config, site, where)
        params = found.load_params(param_dtype=param_dtype, shardings=shardings)
        model = Model(found.config, params, found.load_tokenizer())
        return cls(model, compute_dtype=param_dtype, site=site, where=where, **options)

    def on(self, site: Site) -> "RewardModel":
        """Return the same model on the devices of `site`; self if it is already there."""
        if site == self._site:
            return self
        there = copy.copy(self)
        there._site = site
        there._params = hand_over(self._params, _shardings(self._config, site, self._where))
        return there

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[np.ndarray],
        has_eos: Sequence[bool],
    ) -> ScoreResult:
        """Score responses; a score that is not finite is a failure named `reward_nan`.

        Args:
            columns: only `prompt` is used: the chat messages of each prompt, if the data has chats.

        Raises:
            ValueError: a prompt with its response exceeds the model's positions.
        """
        is_chat = "prompt" in columns and self._tokenizer.has_chat_template
        if is_chat:
            prompts = [self._tokenizer.format_chat(messages) for messages in columns["prompt"]]
        encoded = {text: self._tokenizer.encode(text, add_bos=not is_chat) for text in set(prompts)}
        if not self._keeps_ids:
            ends = (np.array(self._tokenizer.eos_ids[: int(x)], np.int32) for x in has_eos)
            own = (self._tokenizer.encode(text, add_bos=False) for text in completions)
            completion_ids = [np.concatenate(pair) for pair in zip(own, ends, strict=True)]
        pairs = zip([encoded[x] for x in prompts], completion_ids, strict=True)
        scores = self._scores([np.concatenate(pair) for pair in pairs]).tolist()
        if self._missing_eos is not None:
            pairs = zip(scores, has_eos, strict=True)
            scores = [score if is_ended else self._missing_eos for score, is_ended in pairs]
        is_finite = np.isfinite(scores).tolist()
        return ScoreResult(
            [score if x else None for score, x in zip(scores, is_finite, strict=True)],
            [None if x else "reward_nan" for x in is_finite],
            "",
        )

    def _scores(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return the raw score of each prompt with its response."""
        most, longest = self._config.max_positions, max(map(len, rows), default=0)
        if longest > most:
            raise ValueError(
                f"{self._where} has {most} positions; a prompt with its response has {longest} "
                "tokens. Lower --config.task.max_prompt_tokens or --config.search.max_new_tokens"
            )
        program = self._site.locked(
            _score_program(self._config, self._compute_dtype, self._site.program_site)
        )
        return in_batches(
            rows,
            [*range(_LENGTH_STEP, most, _LENGTH_STEP), most],
            lambda batch, length: program(
                self._params, *right_pad(batch, length, self._tokenizer.pad_id)
            ),
        )


@functools.cache  # models on several devices share the program
def _score_program(config: TransformerConfig, dtype: str, site: Site) -> Callable[..., Array]:
    """Return jitted (params, tokens [b s], mask [b s]) -> scores [b]."""
    sharding = ComputeSharding(config, site)

    @jax.jit
    def program(params: Params, tokens: Array, mask: Array) -> Array:
        return classify(
            params,
            tokens,
            mask,
            config=config,
            compute_dtype=jnp.dtype(dtype),
            sharding=sharding,
        )[:, 0]

    return program


def _shardings(config: TransformerConfig, site: Site, where: str) -> Any:
    try:
        return on_mesh(site.mesh, param_shardings(config, site.mesh))
    except ValueError as error:
        raise ValueError(
            f"search.num_devices={site.mesh.size}: {where} cannot be divided over a searcher's "
            f"devices: {error}"
        ) from error
