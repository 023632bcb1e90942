# SPDX-License-Identifier: Apache-2.0
"""Inputs and outputs of the decoding engine: settings, responses, statistics."""

import dataclasses
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

MAX_STOP_IDS = 32
"""Maximum number of `SamplingSettings.stop_ids`."""
# A suffix of a response may begin inside a character, or with a space that its tokenizer drops.
_SLACK = 8


class StopStrings:
    """The strings that end a response.

    Invariant: the result is the same as if the whole text were decoded after every token, whatever
    the number of tokens per call.

    Args:
        strings: one or more texts that are not empty.
        decode: function token ids -> text. Further tokens do not change the text of earlier tokens,
            except an unfinished character at its end.
    """

    def __init__(
        self, strings: Sequence[str], decode: Callable[[Sequence[int] | np.ndarray], str]
    ) -> None:
        self.strings = tuple(strings)
        self._decode = decode
        self._reach = max(map(len, self.strings)) + _SLACK

    def end(self, tokens: np.ndarray, num_read: int) -> int:
        """Return the number of tokens after which the text contains a stop string; 0 if none does.

        Args:
            tokens: int32 [t], the response so far.
            num_read: length of a prefix whose text is known to contain no stop string.
        """
        # Decode only a suffix: strings that the new tokens could complete begin in their text or
        # at most `_reach` characters before.
        size, read = self._reach, tokens[:num_read]
        while size < num_read and len(self._decode(read[-size:])) < self._reach:
            size *= 2
        if not self._is_in(tokens[max(0, num_read - size) :]):
            return 0
        ends = range(num_read + 1, len(tokens) + 1)
        return next((end for end in ends if self._is_in(tokens[:end])), 0)

    def _is_in(self, tokens: np.ndarray) -> bool:
        text = self._decode(tokens)
        return any(string in text for string in self.strings)


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
