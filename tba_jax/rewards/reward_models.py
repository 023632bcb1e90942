# SPDX-License-Identifier: Apache-2.0
"""Learned rewards from a sequence classifier with one label.

The score of a prompt and its response is computed at the response's last token, on one or several
devices. Invariant: every response gets a finite number or a named reason.
"""

import copy
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import Array

from tba_jax.devices.sharding import hand_over
from tba_jax.devices.site import Site
from tba_jax.models import model as models
from tba_jax.models.classifier import classify
from tba_jax.models.shardings import ComputeSharding, on_mesh, param_shardings
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import Params, TransformerConfig
from tba_jax.rewards.batches import RowScorer, judge_dtype
from tba_jax.rewards.scores import Completions, RewardSource, Scores

# Row lengths are padded to a multiple of this number, so that few lengths are compiled.
_LENGTH_STEP = 64


class RewardModel(RewardSource):
    """A reward model, divided over the devices of a site.

    The model's own tokenizer encodes the prompt: a chat with its own chat template if it has one,
    otherwise the policy's text. If model and policy have the same vocabulary, the policy's response
    tokens are scored; otherwise the response text is encoded, with the model's end-of-sequence
    token.

    Args:
        path: Hugging Face folder or hub ID.
        policy_tokenizer: tokenizer of the responses.
        site: scoring devices, with the axis `model`.
        missing_eos: reward of a response that the length limit cut; None: the model's score.

    Raises:
        ValueError: the model does not exist, is not a classifier with one label, has no
            end-of-sequence token, or cannot be divided over the devices.
    """

    def __init__(
        self,
        path: str,
        *,
        policy_tokenizer: Tokenizer,
        site: Site,
        missing_eos: float | None = None,
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
        """Return the same model on the devices of `site`; self if it is already there."""
        if site == self._site:
            return self
        there = copy.copy(self)
        there._place(site, hand_over(self._scores.params, self._shardings(site)))
        return there

    def _place(self, site: Site, params: Params) -> None:
        program = site.locked(_score_program(self._config, self._dtype, site.program_site))
        most = self._config.max_positions
        lengths = [*range(_LENGTH_STEP, most, _LENGTH_STEP), most]
        self._site, pad_id = site, self._tokenizer.pad_id
        self._scores = RowScorer(program, params, lengths, pad_id)

    def _shardings(self, site: Site) -> Any:
        try:
            return on_mesh(site.mesh, param_shardings(self._config, site.mesh))
        except ValueError as error:
            raise ValueError(
                f"search.num_devices={site.mesh.size}: {self._where} cannot be divided over a "
                f"searcher's devices: {error}"
            ) from error

    async def score(self, completions: Completions) -> Scores:
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
        pairs = zip([encoded[x] for x in prompts], ids, strict=True)
        rows = [np.concatenate(pair) for pair in pairs]
        if (longest := max(map(len, rows), default=0)) > most:
            raise ValueError(
                f"{self._where} has {most} positions; a prompt with its response has {longest} "
                "tokens. Lower --config.task.max_prompt_tokens or --config.search.max_new_tokens"
            )
        scores = self._scores(rows)
        if self._missing_eos is not None:
            scores = np.where(has_eos, scores, self._missing_eos)
        is_finite = np.isfinite(scores).tolist()
        return Scores(
            [score if x else None for score, x in zip(scores.tolist(), is_finite, strict=True)],
            [None if x else "reward_nan" for x in is_finite],
        )


@functools.cache  # models on several devices share the program
def _score_program(config: TransformerConfig, dtype: str, site: Site) -> Callable[..., Array]:
    """Return jitted (params, tokens [b s], mask [b s]) -> scores [b]."""
    how: Any = {"config": config, "compute_dtype": jnp.dtype(dtype)}
    how["sharding"] = ComputeSharding(config, site)
    return jax.jit(lambda params, tokens, mask: classify(params, tokens, mask, **how)[:, 0])
