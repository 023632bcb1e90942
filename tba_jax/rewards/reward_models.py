# SPDX-License-Identifier: Apache-2.0
"""Learned rewards from a sequence classifier with one label.

A jitted program computes the score of a prompt and its response at the response's last token, on
one or several devices. Invariant: the score of a response does not depend on the other responses of
the call, up to float32 rounding, and every item gets a finite number or a named reason.
"""

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
from tba_jax.rewards.config import JUDGE_ROWS
from tba_jax.rewards.source import ScoreResult

# Row lengths are padded to a multiple of this number, so that few lengths are compiled.
LENGTH_STEP = 64


class RewardModel:
    """A reward model; a thread-safe `rewards.source.RewardSource`.

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
        program: return value of `make_score_program` for these devices; None: make it.

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
        program: Any = None,
    ) -> None:
        config, params, tokenizer = model
        if config.num_labels != 1:
            what = f"{config.num_labels} labels" if config.num_labels else "a language model's head"
            raise ValueError(
                f"{where} has {what}; wanted a *ForSequenceClassification checkpoint with one "
                "label (num_labels = 1 in config.json)"
            )
        if not tokenizer.eos_ids:
            raise ValueError(
                f"{where} has no end-of-sequence token, which must end a response. Set eos_token "
                "in its tokenizer_config.json"
            )
        self._config = config
        self._params = params
        self._tokenizer = tokenizer
        self._policy_tokenizer = policy_tokenizer
        self._keeps_ids = tokenizer.has_vocabulary_of(policy_tokenizer)
        self._missing_eos = missing_eos
        self._compute_dtype = jnp.dtype(compute_dtype)
        self._site = site
        self._where = where
        self._program = program or make_score_program(config, self._compute_dtype, site)

    @classmethod
    def load(
        cls,
        path_or_hub_id: str,
        *,
        site: Site,
        param_dtype: Any = jnp.float32,
        **options: Any,
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
        return cls(
            Model(found.config, params, found.load_tokenizer()),
            compute_dtype=param_dtype,
            site=site,
            where=where,
            **options,
        )

    def on(self, site: Site) -> "RewardModel":
        """Return the same model on the devices of `site`; self if it is already there."""
        if site == self._site:
            return self
        is_shared = site.program_site == self._site.program_site
        params = hand_over(self._params, _shardings(self._config, site, self._where))
        return RewardModel(
            Model(self._config, params, self._tokenizer),
            policy_tokenizer=self._policy_tokenizer,
            missing_eos=self._missing_eos,
            compute_dtype=self._compute_dtype,
            site=site,
            where=self._where,
            program=self._program if is_shared else None,
        )

    def check(self) -> None:
        """Return at once: the weights are loaded."""

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
            completion_ids: tokens of the responses, in the policy's vocabulary.
            has_eos: False if the length limit cut the response.

        Raises:
            ValueError: a prompt with its response exceeds the model's positions.
        """
        is_chat = "prompt" in columns and self._tokenizer.has_chat_template
        if is_chat:
            prompts = [self._tokenizer.format_chat(messages) for messages in columns["prompt"]]
        encoded = {text: self._tokenizer.encode(text, add_bos=not is_chat) for text in set(prompts)}
        rows = self._rows([encoded[x] for x in prompts], completions, completion_ids, has_eos)
        scores = self._score_rows(rows)
        rewards: list[float | None] = []
        reasons: list[str | None] = []
        for score, is_complete in zip(scores.tolist(), has_eos, strict=True):
            if self._missing_eos is not None and not is_complete:
                rewards.append(self._missing_eos)
                reasons.append(None)
            else:
                is_finite = bool(np.isfinite(score))
                rewards.append(score if is_finite else None)
                reasons.append(None if is_finite else "reward_nan")
        return ScoreResult(rewards, reasons, "")

    def close(self) -> None:
        """Do nothing: there is nothing to release."""

    def _rows(
        self,
        prompts: Sequence[np.ndarray],
        completions: Sequence[str],
        completion_ids: Sequence[np.ndarray],
        has_eos: Sequence[bool],
    ) -> list[np.ndarray]:
        """Return the tokens of prompt and response, in the model's vocabulary."""
        rows = []
        for prompt, text, ids, is_complete in zip(
            prompts, completions, completion_ids, has_eos, strict=True
        ):
            if not self._keeps_ids:
                ids = self._tokenizer.encode(text, add_bos=False)
                if is_complete:
                    ids = np.append(ids, np.int32(self._tokenizer.eos_ids[0]))
            row = np.concatenate([prompt, ids])
            if len(row) > self._config.max_positions:
                raise ValueError(
                    f"{self._where} has {self._config.max_positions} positions; a prompt with its "
                    f"response has {len(row)} tokens. Lower --config.task.max_prompt_tokens or "
                    "--config.search.max_new_tokens"
                )
            rows.append(row)
        return rows

    def _score_rows(self, rows: Sequence[np.ndarray]) -> np.ndarray:
        """Return raw scores, float32 [b]; rows of similar length share a batch."""
        scores = np.zeros(len(rows), np.float32)
        order = sorted(range(len(rows)), key=lambda i: len(rows[i]))
        pending: list[tuple[list[int], Array]] = []
        for start in range(0, len(order), JUDGE_ROWS):
            chosen = order[start : start + JUDGE_ROWS]
            longest = len(rows[chosen[-1]])
            width = min(-(-longest // LENGTH_STEP) * LENGTH_STEP, self._config.max_positions)
            tokens = np.full((JUDGE_ROWS, width), self._tokenizer.pad_id, np.int32)
            lengths = np.zeros(JUDGE_ROWS, np.int32)
            for i, row in enumerate(chosen):
                lengths[i] = len(rows[row])
                tokens[i, : lengths[i]] = rows[row]
            # Dispatched without waiting, so that the next batch is packed concurrently.
            pending.append((chosen, self._program(self._params, tokens, lengths)))
        for chosen, values in pending:
            scores[chosen] = np.asarray(values)[: len(chosen)]
        return scores


def judge_dtype(site: Site) -> str:
    """Return the dtype of models that grade: bfloat16, but float32 on CPUs, where it is faster."""
    return "float32" if site.platform == "cpu" else "bfloat16"


def make_score_program(
    config: TransformerConfig, compute_dtype: Any, site: Site = ANY_DEVICE
) -> Callable[..., Array]:
    """Return jitted (params, tokens [b s], lengths [b]) -> scores of right-padded rows [b]."""
    program = jax.jit(
        functools.partial(
            _scores,
            config=config,
            compute_dtype=jnp.dtype(compute_dtype),
            sharding=ComputeSharding(config, site),
        )
    )
    return site.locked(program)


def _scores(
    params: Params,
    tokens: Array,
    lengths: Array,
    *,
    config: TransformerConfig,
    compute_dtype: Any,
    sharding: ComputeSharding,
) -> Array:
    mask = jnp.arange(tokens.shape[1])[None] < lengths[:, None]
    scores = classify(
        params, tokens, mask, config=config, compute_dtype=compute_dtype, sharding=sharding
    )
    return scores[:, 0]


def _shardings(config: TransformerConfig, site: Site, where: str) -> Any:
    try:
        return on_mesh(site.mesh, param_shardings(config, site.mesh))
    except ValueError as error:
        raise ValueError(
            f"search.num_devices={site.mesh.size}: {where} cannot be divided over a searcher's "
            f"devices: {error}"
        ) from error
