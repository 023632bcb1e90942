# SPDX-License-Identifier: Apache-2.0
"""Settings of searchers: what they draw, how, and how far ahead of the trainer."""

from dataclasses import dataclass
from typing import Literal

from tba_jax.settings import Section, field, need, share


@dataclass(frozen=True)
class SearchSettings(Section):
    """Searchers."""

    samples_per_prompt: int = field(
        16, "S >= K = objective.group_size: responses drawn per prompt", at_least=1
    )
    prompts_per_round: int = field(
        16, "prompts a searcher takes per round, and has under way with driver=async", at_least=1
    )
    max_new_tokens: int = field(
        48, "response limit in tokens; of an episode, observations included", at_least=1
    )
    max_turns: int = field(8, "with task.environment: the policy's turns in an episode", at_least=1)
    max_episodes: int = field(
        0,
        "with task.environment: episodes that a searcher has under way, each with a process of its "
        "own; 0: twice its slots, at most 64",
        at_least=0,
        on_resume=True,
    )
    num_devices: int = field(
        1,
        "devices of each searcher, which divide its weights and cache",
        at_least=1,
        on_resume=True,
    )
    num_slots: int = field(0, "unfinished responses at a time; 0: all of a round", at_least=0)
    chunk_steps: int = field(
        8,
        "decode steps between two looks of the host; a slot idles for half as many when its "
        "response ends, and each look costs a round trip to the device",
        at_least=1,
    )
    cache_dtype: Literal["", "float32", "bfloat16", "int8"] = field(
        "",
        "of cached keys and values; empty: model.rollout_dtype; int8: with a scale for each column "
        "and head, half the bytes of bfloat16; evaluations during the run too",
    )
    quantization: Literal["none", "int8", "fp8"] = field(
        "none",
        "matrices of the layers that searchers draw with, made at publication, or of adapters when "
        "a searcher has merged them: int8 or fp8 (e4m3) values with a scale for each output "
        "channel; evaluations during the run use them too",
    )
    swap: Literal["auto", "in_flight", "round"] = field(
        "auto",
        "driver=async: when newer weights are taken; in_flight: between decode chunks; round: when "
        "every response under way has ended; auto: in_flight where the objective permits it",
    )
    sampling_temperature: float = field(
        1.0, "divides the logits of searchers, and of policy and reference", above=0
    )
    top_p: float = field(
        1.0, "draw from the likeliest tokens of this total probability; 1: all", above=0, at_most=1
    )
    min_new_tokens: int = field(
        0, "no end before as many tokens, in sampling and in log-probs", at_least=0
    )
    stop_strings: tuple[str, ...] = field(
        (), "texts that end a response, with the first token after which it holds one of them"
    )
    stop_ids: tuple[int, ...] = field(
        (), "token ids that end a response beside the model's own end-of-sequence tokens"
    )
    explore_share: float = share(0.0, "share of responses drawn at a temperature of their own")
    explore_min_temperature: float = field(1.0, "of those: uniform from here", above=0)
    explore_max_temperature: float = field(1.0, "to here; log-probs keep sampling_temperature")
    ownership: Literal["auto", "by_prompt", "any"] = field(
        "auto",
        "by_prompt: searcher s owns prompts = s mod n; any: every prompt; auto: any in a fleet or "
        "with a single prompt, else by_prompt",
    )
    outbox_bytes: int = field(
        64 * 2**20, "a searcher waits when its outbox holds this much", at_least=1
    )
    vine_tokens: int = field(
        0, "vineppo: tokens between two states whose values are estimated; 0: none is", at_least=0
    )
    vine_samples: int = field(
        4, "vineppo: responses that are drawn on from a state for its value", at_least=1
    )
    initial_fill: int = field(0, "responses drawn before the first step", at_least=0)
    exact_lag: int = field(
        0,
        "train on data exactly this many publications old; driver=async: with overlap; 0: as old "
        "as it happens",
        at_least=0,
    )

    def check(self) -> None:
        need(
            self.min_new_tokens <= self.max_new_tokens,
            "search.min_new_tokens",
            self.min_new_tokens,
            f"is above search.max_new_tokens = {self.max_new_tokens}",
            "Lower it.",
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
            f"nothing can keep a text from appearing before search.min_new_tokens = "
            f"{self.min_new_tokens} tokens",
            "Set --config.search.min_new_tokens=0, or use search.stop_ids.",
        )
        need(
            min(self.stop_ids, default=0) >= 0,
            "search.stop_ids",
            self.stop_ids,
            "token ids are not negative",
            "Give ids of the model's tokenizer.",
        )
        need(
            self.explore_max_temperature >= self.explore_min_temperature,
            "search.explore_max_temperature",
            self.explore_max_temperature,
            f"is below search.explore_min_temperature = {self.explore_min_temperature}",
            "Raise it.",
        )
