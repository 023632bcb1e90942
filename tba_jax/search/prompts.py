# SPDX-License-Identifier: Apache-2.0
"""PromptStream: the endless, shuffled, resumable stream of a task's training prompts.

Grain shards, shuffles and keeps the position; this module converts a problem's index to a tokenized
Prompt. Invariants: a stream restored from `state()` continues with exactly the same prompts, and a
too long prompt is refused or skipped and counted, never truncated.

Prompts are tokenized when taken, independent of `prompt_survey`. Grain is imported with the first
stream, because many commands do not need it, or by `load_grain`.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, Literal, Protocol

import numpy as np

from tba_jax.flow.trajectory import Prompt
from tba_jax.tasks.chats import Messages
from tba_jax.tasks.registry import Task

Ownership = Literal["by_prompt", "any"]
LongPrompts = Literal["refuse", "skip"]


# Characters; tokenizing megabytes only to find them too long would take minutes.
_LONG_TEXT = 2**16


class Encoder(Protocol):
    """Methods of a tokenizer that prompt streams need."""

    @property
    def longest_token(self) -> int:
        """Number of characters of the longest token."""
        ...

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        """Return the token IDs of a text, int32 [s]."""
        ...

    def knows(self, character: str) -> bool:
        """Return whether the tokenizer can represent this character."""
        ...

    def format_chat(self, messages: Sequence[Mapping[str, str]]) -> str:
        """Return chat messages as one text in the format of the chat template."""
        ...


Split = Literal["train", "eval"]


def load_grain() -> None:
    """Import Grain, before other threads import or trace anything.

    A module of Grain temporarily replaces Python's import function in all threads
    (`etils.epy.lazy_imports`), which breaks concurrent imports.
    """
    import grain  # noqa: F401


def text_of(
    task: Task, tokenizer: Encoder, split: Split, index: int
) -> tuple[str, Mapping[str, Any]]:
    """Return the text of a prompt, with chat messages formatted, and the columns of its problem.

    Raises:
        ValueError: the template refuses the chat messages.
    """
    problem = task.train_problem if split == "train" else task.eval_problem
    content, columns = problem(index)
    if isinstance(content, str):
        return content, columns
    return _formatted(content, tokenizer, _where(task, split, index)), columns


def is_long_text(text: str, tokenizer: Encoder, max_prompt_tokens: int) -> bool:
    """Return whether a text has more characters than `max_prompt_tokens` tokens can hold."""
    return len(text) > _LONG_TEXT and len(text) > max_prompt_tokens * tokenizer.longest_token


def _where(task: Task, split: Split, index: int) -> str:
    return f"{split} problem {index} of task {task.name}"


def read_prompt(
    task: Task,
    tokenizer: Encoder,
    split: Split,
    index: int,
    max_prompt_tokens: int,
    long_prompts: LongPrompts,
) -> Prompt | None:
    """Return the prompt; None if it is too long and such prompts are skipped."""
    text, columns = text_of(task, tokenizer, split, index)
    where = _where(task, split, index)
    if is_long_text(text, tokenizer, max_prompt_tokens):
        if long_prompts == "skip":
            return None
        raise ValueError(
            f"{where} has {len(text):,} characters, more than task.max_prompt_tokens = "
            f"{max_prompt_tokens} tokens can hold; shorten it, or leave such prompts out with "
            f"--config.task.long_prompts=skip. It begins: {text[:80]!r}"
        )
    tokens = tokenizer.encode(text, add_bos=True)
    if len(tokens) > max_prompt_tokens:
        if long_prompts == "skip":
            return None
        raise ValueError(
            f"{where} has {len(tokens)} tokens, more than "
            f"task.max_prompt_tokens = {max_prompt_tokens}; set --config.task.max_prompt_tokens to "
            f"{len(tokens)} or more, or leave such prompts out with "
            f"--config.task.long_prompts=skip. It begins: {text[:80]!r}"
        )
    return Prompt(prompt_id=index, text=text, tokens=tokens, columns=columns)


def _formatted(messages: Messages, tokenizer: Encoder, where: str) -> str:
    try:
        return tokenizer.format_chat(messages)
    except ValueError as error:
        raise ValueError(
            f"{where} is a chat (in the data, or by task.chat=True): {error}"
        ) from error


class PromptStream:
    """The endless prompts of one searcher, with a new seeded shuffle in every epoch.

    Args:
        searcher: searcher ID in [0, num_searchers).
        ownership: "by_prompt": searcher s of n draws the prompts whose id is s mod n; "any": every
            searcher draws all prompts, each in its own order.
        max_prompt_tokens: length in tokens above which prompts are refused or skipped.
        first_token_only: whether to keep only the first token of prompts, because agents write
            the others.

    Attributes:
        num_skipped: skipped prompts so far, with repeats; part of the state.

    Raises:
        ValueError: a searcher would own no prompt.
    """

    def __init__(
        self,
        task: Task,
        tokenizer: Encoder,
        *,
        searcher: int,
        num_searchers: int,
        ownership: Ownership,
        seed: int,
        max_prompt_tokens: int,
        long_prompts: LongPrompts,
        first_token_only: bool = False,
    ) -> None:
        import grain

        size = task.train_size()
        first, stride = (searcher, num_searchers) if ownership == "by_prompt" else (0, 1)
        if first >= size:
            raise ValueError(
                f"searcher {searcher} owns no prompt: task {task.name} has {size} training "
                f"problems for {num_searchers} searchers. Set "
                f"--config.num_searchers={size} or less"
            )
        self._task = task
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        self._long_prompts: LongPrompts = long_prompts
        self._num_tokens = 1 if first_token_only else None
        self._num_owned = len(range(first, size, stride))
        self.num_skipped = 0
        shuffle_seed = int(np.random.SeedSequence([seed, searcher]).generate_state(1)[0])
        indices = grain.MapDataset.range(first, size, stride).shuffle(seed=shuffle_seed).repeat()
        # No threads and no prefetching: the position is then the number of prompts drawn.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._indices = iter(indices.to_iter_dataset(options))

    def take(self, num_prompts: int) -> list[Prompt]:
        """Return the next prompts.

        Raises:
            ValueError: a prompt is too long (task.long_prompts=refuse), or all prompts are too long
                (skip).
        """
        prompts: list[Prompt] = []
        num_skipped_in_a_row = 0
        while len(prompts) < num_prompts:
            prompt = read_prompt(
                self._task,
                self._tokenizer,
                "train",
                int(next(self._indices)),
                self._max_prompt_tokens,
                self._long_prompts,
            )
            if prompt is not None:
                tokens = prompt.tokens[: self._num_tokens]
                prompts.append(dataclasses.replace(prompt, tokens=tokens))
                num_skipped_in_a_row = 0
                continue
            self.num_skipped += 1
            num_skipped_in_a_row += 1
            # Any sequence of two epochs' length contains one whole epoch.
            if num_skipped_in_a_row == 2 * self._num_owned:
                raise _all_too_long(self._task, "train", self._num_owned, self._max_prompt_tokens)
        return prompts

    def state(self) -> dict[str, Any]:
        """Return the stream's position and skip count, JSON-compatible; a copy."""
        return {"position": self._indices.get_state(), "num_skipped": self.num_skipped}

    def restore(self, state: Mapping[str, Any]) -> None:
        """Continue from the `state` of an equally configured stream."""
        self._indices.set_state(dict(state["position"]))
        self.num_skipped = state["num_skipped"]


def eval_prompts(
    task: Task, tokenizer: Encoder, limit: int, max_prompt_tokens: int, long_prompts: LongPrompts
) -> tuple[list[Prompt], int]:
    """Return the first `limit` held-out prompts (0: all), in the same order for every seed.

    The IDs of these prompts are indices in the evaluation split.

    Returns:
        The prompts, and the number of too long prompts that were skipped.

    Raises:
        ValueError: a prompt is too long (long_prompts=refuse), or all prompts are too long (skip).
    """
    size = task.eval_size()
    prompts: list[Prompt] = []
    num_skipped = 0
    for index in range(size):
        prompt = read_prompt(task, tokenizer, "eval", index, max_prompt_tokens, long_prompts)
        if prompt is None:
            num_skipped += 1
            continue
        prompts.append(prompt)
        if len(prompts) == limit:
            break
    if not prompts:
        raise _all_too_long(task, "eval", size, max_prompt_tokens)
    return prompts, num_skipped


def _all_too_long(task: Task, split: str, num_prompts: int, max_prompt_tokens: int) -> ValueError:
    return ValueError(
        f"task.long_prompts=skip leaves nothing: all {num_prompts} {split} prompts of task "
        f"{task.name} have more than task.max_prompt_tokens = {max_prompt_tokens} tokens. Raise "
        "--config.task.max_prompt_tokens"
    )
