# SPDX-License-Identifier: Apache-2.0
"""Start data: given responses from a file, as the first rounds of a searcher.

These responses are scored, committed and merged like sampled responses. Their behavior log-probs
are those of the start policy. Invariants: no response is truncated or omitted, the policy could
have sampled each response, and every round has the shape of a sampled round.
"""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import numpy as np
from jaxtyping import Array

from tba_jax.devices.site import ANY_DEVICE, Site
from tba_jax.environments.episode import Episode
from tba_jax.flow.padding import Padding
from tba_jax.flow.trajectory import Prompt
from tba_jax.models.logprobs import row_token_logprobs
from tba_jax.models.scoring import Scoring
from tba_jax.models.shardings import ComputeSharding
from tba_jax.models.transformer import Params, TransformerConfig
from tba_jax.search.prompts import Encoder, read_prompt
from tba_jax.search.sampler import SampledGroup
from tba_jax.tasks.registry import Task
from tba_jax.tasks.rows import read_rows


class PolicyTokenizer(Encoder, Protocol):
    """Methods of the policy's tokenizer that given responses need."""

    @property
    def eos_ids(self) -> tuple[int, ...]:
        """Tokens that end a response."""
        ...


class GivenGroup(NamedTuple):
    """A prompt and given responses to it.

    Attributes:
        prompt: the prompt.
        responses: int32 [t] each, with the end-of-sequence token.
    """

    prompt: Prompt
    responses: tuple[np.ndarray, ...]


def load_start_groups(
    path: str,
    task: Task,
    tokenizer: PolicyTokenizer,
    *,
    max_prompt_tokens: int,
    min_new_tokens: int,
    max_new_tokens: int,
    samples_per_prompt: int,
) -> list[GivenGroup]:
    """Return groups of at most S responses; prompts are in the order of their first row.

    Args:
        path: JSON lines (or Parquet) with "response" and, for a task of several prompts,
            "prompt_id", the index of the training problem.
        min_new_tokens: minimum length of a response without its end-of-sequence token.
        max_new_tokens: maximum length of a response with its end-of-sequence token.

    Raises:
        ValueError: the file or a row is unusable; the message names it.
    """
    if not tokenizer.eos_ids:
        raise ValueError(
            "task.start_path: this model has no end-of-sequence token, so no given response could "
            "end. Leave task.start_path empty"
        )
    size = task.train_size()
    prompts: dict[int, Prompt] = {}
    responses: dict[int, list[np.ndarray]] = {}
    for where, row in read_rows(path, "train"):
        text, index = row.get("response"), row.get("prompt_id", 0 if size == 1 else None)
        if not isinstance(text, str):
            raise ValueError(f"{where}: want an object with text under 'response'; got {row!r:.80}")
        if not isinstance(index, int) or isinstance(index, bool) or not 0 <= index < size:
            raise ValueError(
                f"{where}: prompt_id = {index!r:.80}, want the index of a training problem of task "
                f"{task.name}, a whole number from 0 to {size - 1}"
            )
        if index not in prompts:
            prompt = read_prompt(task, tokenizer, "train", index, max_prompt_tokens, "skip")
            if prompt is None:
                raise ValueError(
                    f"{where}: the prompt of training problem {index} has more than "
                    f"task.max_prompt_tokens = {max_prompt_tokens} tokens. Raise that setting, or "
                    "leave the row out"
                )
            prompts[index] = prompt
        tokens = tokenizer.encode(text, add_bos=False)
        if np.isin(tokens, tokenizer.eos_ids).any():
            raise ValueError(
                f"{where}: the response contains an end-of-sequence token: {text!r:.80}. Remove "
                "that token; a run appends one to every response"
            )
        if not min_new_tokens <= len(tokens) < max_new_tokens:
            raise ValueError(
                f"{where}: the response has {len(tokens)} tokens; wanted {min_new_tokens} "
                f"(search.min_new_tokens) to {max_new_tokens - 1} (search.max_new_tokens - 1). "
                "Change these settings, or leave the row out"
            )
        tokens = np.append(tokens, tokenizer.eos_ids[0]).astype(np.int32)
        responses.setdefault(index, []).append(tokens)
    return [
        GivenGroup(prompts[index], tuple(rows[i : i + samples_per_prompt]))
        for index, rows in responses.items()
        for i in range(0, len(rows), samples_per_prompt)
    ]


class StartData:
    """Given responses as rounds of p prompts with up to S responses each.

    Args:
        groups: return value of `load_start_groups`.
        logprobs: return value of `make_start_program`.
        prompts_per_round: p.
        samples_per_prompt: S.
        temperature: sampling temperature of the start policy.
        padding: padded lengths; every round has the largest length.

    Attributes:
        num_rounds: number of rounds for all responses.
        num_responses: responses in all rounds.
    """

    def __init__(
        self,
        groups: Sequence[GivenGroup],
        logprobs: Callable[..., Array],
        *,
        prompts_per_round: int,
        samples_per_prompt: int,
        temperature: float,
        padding: Padding,
    ) -> None:
        self._temperature = temperature
        self._groups = tuple(groups)
        self._logprobs = logprobs
        self._shape = (prompts_per_round, samples_per_prompt)
        self._padding = padding.largest
        self.num_rounds = -(-len(self._groups) // prompts_per_round)
        self.num_responses = sum(len(group.responses) for group in self._groups)

    def groups(self, params: Params, number: int, version: int) -> list[SampledGroup]:
        """Return the groups of a round, as if the start policy had sampled them.

        Args:
            params: the policy's weights in the decoder's layout.
            number: number of the round, in [0, num_rounds).
        """
        p, s = self._shape
        groups = self._groups[number * p : (number + 1) * p]
        # One shape for all rounds, so that log-probs and reference compile one program each.
        prompts = [groups[min(i, len(groups) - 1)].prompt for i in range(p)]
        tokens = np.full((p, s, self._padding.response_buckets[0]), self._padding.pad_id, np.int32)
        lengths = np.zeros((p, s), np.int32)
        for i, group in enumerate(groups):
            for j, response in enumerate(group.responses):
                lengths[i, j] = len(response)
                tokens[i, j, : len(response)] = response
        rows = self._padding.rows([x.tokens for x in prompts], tokens, lengths)
        token_logprobs = np.asarray(self._logprobs(params, *rows[:3]))

        def episode(i: int, j: int, response: np.ndarray) -> Episode:
            logprobs = np.array(token_logprobs[i, j, : len(response)])
            temperature = self._temperature
            return Episode(i, j, response, logprobs, None, "eos", version, version, temperature)

        return [
            SampledGroup(g.prompt, tuple(episode(i, j, y) for j, y in enumerate(g.responses)))
            for i, g in enumerate(groups)
        ]


def make_start_program(
    config: TransformerConfig,
    scoring: Scoring,
    *,
    max_new_tokens: int,
    site: Site = ANY_DEVICE,
) -> Callable[..., Array]:
    """Return jitted (params, tokens, prompt_lengths, response_lengths) -> log-probs [p S t].

    Args:
        scoring: scoring settings of the run, with the dtype of the weights.
    """

    sharding = ComputeSharding(config, site, gathers=False)

    def program(params: Any, *rows: Array) -> Array:
        return row_token_logprobs(
            params,
            *rows,
            response_bucket=max_new_tokens,
            config=config,
            scoring=scoring,
            sharding=sharding,
        )

    return site.locked(jax.jit(program))
