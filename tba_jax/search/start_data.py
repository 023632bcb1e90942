# SPDX-License-Identifier: Apache-2.0
"""Start data: given responses from a file, which the first tickets of a run carry.

They are graded, committed and merged like sampled responses. Their behavior log-probs are those of
the start policy. Invariants: no response is truncated or omitted, and the policy could have sampled
each response (tests/search/test_prompts.py).
"""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import numpy as np
from jaxtyping import Array

from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.environments.episode import Episode
from tba_jax.flow.padding import Padding, left_pad
from tba_jax.flow.tickets import Ticket
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.logprobs import Scoring, row_token_logprobs
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.tokenizer import Tokenizer
from tba_jax.models.transformer import Params, TransformerConfig
from tba_jax.search.config import SearchSettings
from tba_jax.search.prompts import PromptReader
from tba_jax.search.sampler import SampledGroup
from tba_jax.tasks.rows import read_rows


def load_start_tickets(
    path: str, reader: PromptReader, tokenizer: Tokenizer, settings: SearchSettings
) -> list[Ticket]:
    """Return tickets with given responses; prompts are in the order of their first row.

    Args:
        path: JSON lines (or Parquet) with "response" and, for a task of several prompts,
            "prompt_id", the index of the training problem.
        reader: reader that skips too long prompts.
        settings: has the limits of a response without and with its end-of-sequence token, and the
            number of responses of a ticket.

    Raises:
        ValueError: the file or a row is unusable; the message names it.
    """
    if not tokenizer.eos_ids:
        raise ValueError(
            "task.start_path: this model has no end-of-sequence token, so no given response could "
            "end. Leave task.start_path empty"
        )
    prompts: dict[int, Prompt] = {}
    responses: dict[int, list[np.ndarray]] = {}
    for where, row in read_rows(path, "train"):
        index = _index_of(row, where, reader)
        if index not in prompts:
            prompt = reader.read("train", index)
            if prompt is None:
                raise ValueError(
                    f"{where}: the prompt of training problem {index} has more than "
                    f"task.max_prompt_tokens = {reader.max_prompt_tokens} tokens. Raise that "
                    "setting, or leave the row out"
                )
            prompts[index] = prompt
        tokens = _response_of(row, where, tokenizer, settings)
        responses.setdefault(index, []).append(tokens)
    most = settings.samples_per_prompt
    groups = [
        (prompts[index], tuple(rows[i : i + most]))
        for index, rows in responses.items()
        for i in range(0, len(rows), most)
    ]
    return [Ticket(number, *group) for number, group in enumerate(groups)]


def _index_of(row: Mapping[str, Any], where: str, reader: PromptReader) -> int:
    """Return the training problem of a row."""
    size = reader.task.size("train")
    index = row.get("prompt_id", 0 if size == 1 else None)
    if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < size:
        raise ValueError(
            f"{where}: prompt_id = {index!r:.80}, want the index of a training problem of task "
            f"{reader.task.name}, a whole number from 0 to {size - 1}"
        )
    return index


def _response_of(
    row: Mapping[str, Any], where: str, tokenizer: Tokenizer, settings: SearchSettings
) -> np.ndarray:
    """Return the tokens of a row's response with an end-of-sequence token, int32 [t]."""
    text = row.get("response")
    if not isinstance(text, str):
        raise ValueError(f"{where}: want an object with text under 'response'; got {row!r:.80}")
    tokens = tokenizer.encode(text, add_bos=False)
    if np.isin(tokens, tokenizer.eos_ids).any():
        raise ValueError(
            f"{where}: the response contains an end-of-sequence token: {text!r:.80}. Remove that "
            "token; a run appends one to every response"
        )
    if not settings.min_new_tokens <= len(tokens) < settings.max_new_tokens:
        raise ValueError(
            f"{where}: the response has {len(tokens)} tokens; wanted {settings.min_new_tokens} "
            f"(search.min_new_tokens) to {settings.max_new_tokens - 1} (search.max_new_tokens "
            "- 1). Change these settings, or leave the row out"
        )
    return np.append(tokens, tokenizer.eos_ids[0]).astype(np.int32)


class GivenScorer:
    """Scores given responses as if the policy had sampled them.

    Args:
        scoring: as of `make_start_program`; its temperature is that of the start policy.
        padding: padded lengths; every call has the largest lengths.
        num_samples: S; every call has room for S responses.
    """

    def __init__(
        self,
        config: TransformerConfig,
        scoring: Scoring,
        padding: Padding,
        num_samples: int,
        site: Site = ANY_DEVICE,
    ) -> None:
        self._temperature, self._padding = scoring.temperature, padding
        self._num_samples = num_samples
        self._logprobs = make_start_program(config, scoring, padding.response_buckets[-1], site)

    def __call__(self, params: Params, ticket: Ticket, version: int) -> SampledGroup:
        """Return the group of a ticket with given responses.

        Args:
            params: the policy's weights in the decoder's layout.
        """
        t, pad_id = self._padding.response_buckets[-1], self._padding.pad_id
        responses = np.full((self._num_samples, t), pad_id, np.int32)
        lengths = np.zeros((1, self._num_samples), np.int32)
        for j, response in enumerate(ticket.responses):
            lengths[0, j] = len(response)
            responses[j, : len(response)] = response
        prompt = ticket.prompt.tokens
        padded = left_pad([prompt], self._padding.prompt_buckets[-1], pad_id)
        tokens = np.concatenate([padded, responses.reshape(1, -1)], axis=1)
        sizes = np.array([len(prompt)], np.int32)
        logprobs = np.asarray(self._logprobs(params, tokens, sizes, lengths))[0]
        end = (None, "eos", version, version, self._temperature)
        episodes = [
            Episode(0, j, y, logprobs[j, : len(y)].copy(), *end)
            for j, y in enumerate(ticket.responses)
        ]
        return SampledGroup(ticket.prompt, tuple(episodes))


def make_start_program(
    config: TransformerConfig, scoring: Scoring, max_new_tokens: int, site: Site = ANY_DEVICE
) -> Callable[..., Array]:
    """Return jitted (params, tokens, prompt_lengths, response_lengths) -> log-probs [p S t].

    Args:
        scoring: scoring settings of the run, with the dtype of the weights.
    """
    program = functools.partial(
        row_token_logprobs,
        response_bucket=max_new_tokens,
        config=config,
        scoring=scoring,
        sharding=ComputeSharding(config, site, gathers=False),
    )
    return site.locked(jax.jit(program))
