# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of the decoding engine: settings, responses, statistics."""

import dataclasses
from typing import NamedTuple

import numpy as np

from tba_jax.decoding.stop_strings import StopStrings

MAX_STOP_IDS = 32
"""Maximum number of `SamplingSettings.stop_ids`."""


@dataclasses.dataclass(frozen=True)
class SamplingSettings:
    """Sampling settings of the responses to one prompt.

    Attributes:
        max_new_tokens: maximum number of tokens of a response.
        temperature: divides the logits; 0 is greedy.
        top_p: keep the most probable tokens of this total probability; 1 keeps all.
        top_k: number of most probable tokens to keep; 0 keeps all.
        min_new_tokens: minimum length; earlier, stop tokens have probability 0.
        stop_ids: tokens that end a response; None: the decoder's eos_ids.
        stop_strings: texts that also end a response; None: the decoder's stop strings.
    """

    max_new_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_new_tokens: int = 0
    stop_ids: tuple[int, ...] | None = None
    stop_strings: StopStrings | None = None

    def __post_init__(self) -> None:
        most, least = self.max_new_tokens, self.min_new_tokens
        for name, is_valid, wanted in (
            ("max_new_tokens", most >= 1, "at least 1"),
            ("temperature", 0 <= self.temperature < np.inf, "0 (greedy) or a positive number"),
            ("top_p", 0 < self.top_p <= 1, "a number in (0, 1]; 1 keeps every token"),
            ("top_k", self.top_k >= 0, "0 (off) or a positive number"),
            ("min_new_tokens", 0 <= least <= most, f"0 to max_new_tokens = {most}"),
            ("stop_ids", len(self.stop_ids or ()) <= MAX_STOP_IDS, f"at most {MAX_STOP_IDS}"),
        ):
            if not is_valid:
                raise ValueError(f"sampling got {name} = {getattr(self, name)}; wanted {wanted}")


class Response(NamedTuple):
    """One finished response, as host arrays.

    Attributes:
        request: number of the request, from `Session.submit`.
        sample: index of the response among the samples of the request.
        tokens: int32 [t], including the stop token, or the token that completes a stop string.
        token_logprobs: float32 [t], log-probs under the sampling distribution.
        has_eos: False if the length limit cut the response.
        version_min, version_max: oldest and newest weight version that read the prompt or drew a
            token.
        temperature: sampling temperature.
        token_versions: int32 [t], weight version that drew each token.
    """

    request: int
    sample: int
    tokens: np.ndarray = np.zeros(0, np.int32)
    token_logprobs: np.ndarray = np.zeros(0, np.float32)
    has_eos: bool = False
    version_min: int = 0
    version_max: int = 0
    temperature: float = 1.0
    token_versions: np.ndarray = np.zeros(0, np.int32)


@dataclasses.dataclass
class Statistics:
    """Counts of one session.

    Attributes:
        tokens: number of sampled tokens.
        steps: number of model steps.
        slot_steps: steps times slots; tokens / slot_steps is the share of slots in use.
        prompt_tokens: number of prompt tokens that were prefilled or found in kept caches.
        kept_tokens: number of prompt tokens that were found in kept caches.
        decode_s: wall time of the session's steps.
    """

    tokens: int = 0
    steps: int = 0
    slot_steps: int = 0
    prompt_tokens: int = 0
    kept_tokens: int = 0
    decode_s: float = 0.0
