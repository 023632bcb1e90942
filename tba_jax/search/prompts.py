# SPDX-License-Identifier: Apache-2.0
"""Prompts: the training prompt of each ticket, and the held-out prompts of evaluations.

Grain shuffles the indices of the training problems, with random access; this module converts a
problem to a tokenized Prompt. Invariant: a too long prompt is left out and counted, never truncated
(tests/search/test_prompts.py).
"""

import collections
from collections.abc import Mapping
from typing import Any

from tba_jax.flow.trajectory import Prompt
from tba_jax.models.tokenizer import DIVIDER, Tokenizer
from tba_jax.tasks.task import Split, Task

# Characters; tokenizing megabytes only to find them too long would take minutes.
_LONG_TEXT = 2**16
_MOST_SHOWN = 8  # unknown characters in a message


def text_of(
    task: Task, tokenizer: Tokenizer, split: Split, index: int
) -> tuple[str, bool, Mapping[str, Any]]:
    """Return the text of a prompt, whether it may need a BOS token, and the problem's columns.

    The text of a chat is complete: its template writes all special tokens.

    Raises:
        ValueError: the template refuses the chat messages.
    """
    content, columns = task.problem(split, index)
    if isinstance(content, str):
        return content, True, columns
    try:
        return tokenizer.format_chat(content, variables=task.chat_options), False, columns
    except ValueError as error:
        raise ValueError(
            f"{task.place(split, index)}: the prompt is a chat (in the data, or by task.chat): "
            f"{error}"
        ) from error


class PromptReader:
    """Reads and tokenizes the prompts of a task.

    Args:
        max_prompt_tokens: length in tokens above which a prompt is left out.
    """

    def __init__(self, task: Task, tokenizer: Tokenizer, max_prompt_tokens: int) -> None:
        self.task = task
        self.max_prompt_tokens = max_prompt_tokens
        self._tokenizer = tokenizer

    def read(self, split: Split, index: int) -> Prompt | None:
        """Return the prompt; None if it is too long.

        Raises:
            ValueError: the template refuses the chat messages, or the model lacks a token.
        """
        text, add_bos, columns = text_of(self.task, self._tokenizer, split, index)
        most, is_huge = self.max_prompt_tokens, len(text) > _LONG_TEXT
        if is_huge and len(text) > most * self._tokenizer.longest_token:
            return None
        try:
            tokens = self._tokenizer.encode(text, add_bos)
        except ValueError as error:  # a token without a row in the model's embedding
            raise ValueError(f"{self.task.place(split, index)}: {error}") from error
        if len(tokens) > most:
            return None
        return Prompt(index, text.replace(DIVIDER, ""), tokens, columns)

    def held_out(self, limit: int) -> tuple[list[Prompt], int]:
        """Return the first `limit` held-out prompts (0: all), in the same order for every seed.

        Their IDs are indices in the evaluation split.

        Returns:
            The prompts, and the number of too long prompts that were skipped.

        Raises:
            ValueError: a prompt is refused, or all prompts are too long.
        """
        prompts: list[Prompt] = []
        num_skipped = 0
        for index in range(self.task.size("eval")):
            prompt = self.read("eval", index)
            if prompt is None:
                num_skipped += 1
                continue
            prompts.append(prompt)
            if len(prompts) == limit:
                break
        if not prompts:
            raise self.all_too_long("eval", num_skipped)
        return prompts, num_skipped

    def check_all(self) -> list[str]:
        """Read every training prompt; return lines about prompts that are skipped or lose text.

        Without this check a refused prompt would end a run when it is drawn, possibly after hours.

        Raises:
            ValueError: a prompt is refused, or all prompts are too long.
        """
        size, num_skipped, lines = self.task.size("train"), 0, []
        unknown: collections.Counter[str] = collections.Counter()
        for index in range(size):
            prompt = self.read("train", index)
            num_skipped += prompt is None
            unknown.update({} if prompt is None else collections.Counter(prompt.text))
        if num_skipped == size:
            raise self.all_too_long("train", size)
        if num_skipped:
            lines.append(
                f"{num_skipped:,} of {size:,} training prompts of task {self.task.name} have more "
                f"tokens than task.max_prompt_tokens = {self.max_prompt_tokens} and are left out"
            )
        lost = [(c, n) for c, n in unknown.most_common() if not self._tokenizer.knows(c)]
        if lost:
            shown = ", ".join(f"{c!r} ({n:,} times)" for c, n in lost[:_MOST_SHOWN])
            lines.append(
                f"the tokenizer does not know {len(lost):,} of the characters in training prompts, "
                f"and loses them: {shown}" + (", ..." if len(lost) > _MOST_SHOWN else "")
            )
        return lines

    def all_too_long(self, split: str, num_prompts: int) -> ValueError:
        """Return the error of a split without a prompt that fits."""
        return ValueError(
            f"no prompt is left: all {num_prompts} {split} prompts of task "
            f"{self.task.name} have more than task.max_prompt_tokens = {self.max_prompt_tokens} "
            "tokens. Raise --config.task.max_prompt_tokens"
        )


class Prompts:
    """Training prompts in the order of tickets: a new seeded shuffle of all problems per epoch."""

    def __init__(self, reader: PromptReader, seed: int) -> None:
        import grain

        self.reader = reader
        self._size = reader.task.size("train")
        self._indices = grain.MapDataset.range(self._size).shuffle(seed=seed).repeat()

    def from_number(self, number: int) -> tuple[int, Prompt]:
        """Return the first prompt that fits, from a number on, with its own number.

        Raises:
            ValueError: the prompt is refused, or all prompts are too long.
        """
        # Any sequence of two epochs' length contains one whole epoch.
        for n in range(number, number + 2 * self._size):
            index = self._indices[n]
            assert index is not None, "a range of indices has no gap"
            prompt = self.reader.read("train", int(index))
            if prompt is not None:
                return n, prompt
        raise self.reader.all_too_long("train", self._size)
