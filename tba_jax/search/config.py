# SPDX-License-Identifier: Apache-2.0
"""Settings of searchers: sampling, decoding, and lag behind the trainer."""

from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field, need


@dataclass(frozen=True)
class SearchSettings(Section):
    """Settings of searchers: sampling and decoding."""

    engine: str = field(
        "devices",
        "devices: searchers decode on their devices; or the URL of a server that samples, with "
        "vLLM's routes for adapters, or for all weights; its key is the environment variable "
        "OPENAI_API_KEY",
        on_resume=True,
    )
    samples_per_prompt: int = field(
        16, "S >= K = objective.group_size: responses sampled per prompt", at_least=1
    )
    max_new_tokens: int = field(
        48,
        "maximum number of tokens of a response; with task.environment, of an episode with its "
        "observations",
        at_least=1,
    )
    max_turns: int = field(
        8, "with task.environment: maximum number of the policy's turns in an episode", at_least=1
    )
    num_devices: int = field(
        1,
        "devices of each searcher, which divide its weights and cache",
        at_least=1,
        on_resume=True,
    )
    num_slots: int = field(
        0,
        "responses that a searcher decodes at a time; 0: those of 16 prompts, or as many as fit",
        at_least=0,
    )
    quantization: Literal["none", "int8"] = field(
        "none",
        "format of the searchers' layer matrices: int8 values with a scale per "
        "output channel; applied at publication, or after a searcher has merged adapters; also in "
        "evaluations during the run",
    )
    sampling_temperature: float = field(
        1.0, "divides the logits of searchers, and of policy and reference", above=0
    )
    top_p: float = field(
        1.0,
        "sample from the likeliest tokens of this total probability; 1: all",
        above=0,
        at_most=1,
    )
    min_new_tokens: int = field(
        0, "minimum length of a response in tokens, in sampling and in log-probs", at_least=0
    )
    stop_strings: tuple[str, ...] = field(
        (), "texts that end a response, at the first token that completes one of them"
    )
    stop_ids: tuple[int, ...] = field(
        (), "token IDs that end a response, besides the model's end-of-sequence tokens"
    )
    explore: tuple[float, ...] = field(
        (),
        "SHARE,LOW,HIGH: this share of responses is sampled at random temperatures in [LOW, HIGH]; "
        "log-probs still use sampling_temperature; empty: none",
    )
    initial_fill: int = field(
        0, "number of responses that searchers sample before the first training step", at_least=0
    )
    exact_lag: int = field(
        0,
        "with driver=sync: fixed staleness of all training data, in publications; 0: none",
        at_least=0,
    )

    @property
    def server(self) -> str:
        """URL of the server that samples; "" if the searchers decode."""
        return "" if self.engine == "devices" else self.engine

    @property
    def slots(self) -> int:
        """Number of responses that a searcher decodes at a time."""
        return self.num_slots or 16 * self.samples_per_prompt

    def check(self) -> None:
        need(
            not self.server or self.server.startswith(("http://", "https://")),
            "search.engine",
            self.engine,
            "must be devices or a URL",
            "For example --config.search.engine=http://127.0.0.1:8000/v1.",
        )
        need(
            self.min_new_tokens <= self.max_new_tokens,
            "search.min_new_tokens",
            self.min_new_tokens,
            f"must not exceed search.max_new_tokens = {self.max_new_tokens}",
            f"Set --config.search.min_new_tokens={self.max_new_tokens} or less.",
        )
        need(
            all(self.stop_strings),
            "search.stop_strings",
            self.stop_strings,
            "an empty text would end every response at its first token",
            "Leave it out.",
        )
        need(
            not (self.stop_strings and self.min_new_tokens),
            "search.stop_strings",
            self.stop_strings,
            f"a stop string may appear before search.min_new_tokens = {self.min_new_tokens} tokens "
            "and cannot be prevented",
            "Set --config.search.min_new_tokens=0, or use search.stop_ids.",
        )
        need(
            min(self.stop_ids, default=0) >= 0,
            "search.stop_ids",
            self.stop_ids,
            "token ids are not negative",
            "Give ids of the model's tokenizer.",
        )
        share, low, high = self.explore if len(self.explore) == 3 else (-1.0, 0.0, 0.0)
        need(
            not self.explore or (0 <= share <= 1 and 0 < low <= high),
            "search.explore",
            self.explore,
            "must be a share in [0, 1] and two ascending temperatures above 0",
            "Set --config.search.explore=0.5,0.7,2.0, for example.",
        )
