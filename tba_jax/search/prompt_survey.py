# SPDX-License-Identifier: Apache-2.0
"""Survey of all training prompts before a run, for too long prompts and unknown characters.

Without the survey, a too long prompt would end a run when it is drawn, possibly after hours, and
unknown characters would be lost silently. Held-out prompts are read when the evaluator is made.
"""

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any

from tba_jax.search.prompts import Encoder, LongPrompts, is_long_text, text_of
from tba_jax.tasks.registry import Task

_MOST_SHOWN = 8  # characters


@dataclasses.dataclass(frozen=True)
class Survey:
    """Survey of a task's training prompts, for one tokenizer and one length limit.

    Attributes:
        num_long: prompts with more tokens than the limit.
        longest_tokens: tokens of the longest tokenized prompt.
        first_long: index of the first too long prompt; -1 if no prompt is too long.
        longest: index of the longest tokenized prompt.
        num_huge: number of prompts that were not tokenized, because they have too many characters.
        unknown: character that the tokenizer does not know -> number of occurrences.
    """

    num_prompts: int
    num_long: int
    longest_tokens: int
    first_long: int
    longest: int
    num_huge: int
    unknown: Mapping[str, int]

    @classmethod
    def of(cls, facts: Mapping[str, Any]) -> "Survey":
        """Return the survey from the fields that `dataclasses.asdict` returned."""
        return cls(**facts)


def survey(task: Task, tokenizer: Encoder, max_prompt_tokens: int) -> Survey:
    """Read and tokenize every training prompt once.

    Raises:
        ValueError: a prompt cannot be read; the message names the prompt and the reason.
    """
    num_long, longest_tokens, longest, first_long, num_huge = 0, 0, -1, -1, 0
    known: set[str] = set()
    unknown: collections.Counter[str] = collections.Counter()
    for index in range(task.train_size()):
        text, _ = text_of(task, tokenizer, "train", index)
        is_huge = is_long_text(text, tokenizer, max_prompt_tokens)
        num_huge += is_huge
        num_tokens = 0 if is_huge else len(tokenizer.encode(text, add_bos=True))
        if num_tokens > longest_tokens:
            longest_tokens, longest = num_tokens, index
        if is_huge or num_tokens > max_prompt_tokens:
            num_long += 1
            first_long = index if first_long < 0 else first_long
        for character in set(text) - known:
            if tokenizer.knows(character):
                known.add(character)
            else:
                unknown[character] += text.count(character)
    return Survey(
        task.train_size(), num_long, longest_tokens, first_long, longest, num_huge, dict(unknown)
    )


def judge(found: Survey, name: str, max_prompt_tokens: int, long_prompts: LongPrompts) -> list[str]:
    """Return lines to print before a run begins.

    Raises:
        ValueError: some prompts are too long, and such prompts are refused.
    """
    lines: list[str] = []
    if found.num_long:
        what = f"{found.num_long:,} of {found.num_prompts:,} training prompts of task {name}"
        limit = f"task.max_prompt_tokens = {max_prompt_tokens}"
        if long_prompts == "refuse":
            most = f"the longest has {found.longest_tokens:,} (train problem {found.longest})"
            remedy = f"Set --config.task.max_prompt_tokens to {found.longest_tokens} or more"
            if found.num_huge:
                most = f"{found.num_huge:,} of them are too long to be tokenized at all"
                remedy = "Shorten those"
            raise ValueError(
                f"{what} have more tokens than {limit}. The first is train problem "
                f"{found.first_long}; {most}. {remedy}, or leave these prompts out with "
                "--config.task.long_prompts=skip"
            )
        lines.append(f"{what} have more tokens than {limit} and are left out")
    if found.unknown:
        ordered = sorted(found.unknown.items(), key=lambda item: (-item[1], item[0]))
        shown = [f"{c!r} ({n:,} times)" for c, n in ordered[:_MOST_SHOWN]]
        rest = len(ordered) - len(shown)
        lines.append(
            f"the tokenizer does not know {len(ordered):,} of the characters in training prompts, "
            f"and loses them: {', '.join(shown)}" + (f" and {rest:,} others" if rest else "")
        )
    return lines
