# SPDX-License-Identifier: Apache-2.0
"""PromptStream: the endless, shuffled, resumable stream of a task's training prompts.

Grain does the sharding, the shuffling and the position; this module turns a problem's index into a
tokenized Prompt. It does not know rewards, models or who consumes the prompts. Invariants: a
stream restored from `state()` continues with exactly the prompts that would have come, and a
prompt that does not fit is refused, never cut.

Prompts are tokenized when they are taken, so that starting costs nothing. Grain is imported when
the first stream is made, for the sake of commands that need none.
"""

from collections.abc import Mapping
from typing import Any, Literal, Protocol

import numpy as np

from tba_jax.tasks import Task
from tba_jax.trajectory import Prompt

Ownership = Literal["by_prompt", "any"]


class Encoder(Protocol):
    """The part of the tokenizer that is needed here."""

    def encode(self, text: str, add_bos: bool) -> np.ndarray:
        """int32 [s]."""
        ...


def _prompt(
    task: Task,
    tokenizer: Encoder,
    split: Literal["train", "eval"],
    index: int,
    max_prompt_tokens: int,
) -> Prompt:
    problem = task.train_problem if split == "train" else task.eval_problem
    text, columns = problem(index)
    tokens = tokenizer.encode(text, add_bos=True)
    if len(tokens) > max_prompt_tokens:
        raise ValueError(
            f"{split} problem {index} of task {task.name} has {len(tokens)} tokens, more than "
            f"task.max_prompt_tokens = {max_prompt_tokens}; raise that, or take the row out. "
            f"It begins: {text[:80]!r}"
        )
    return Prompt(prompt_id=index, text=text, tokens=tokens, columns=columns)


class PromptStream:
    """The prompts of one searcher, for ever: a new seeded shuffle in every pass over the data.

    Args:
        task: the task.
        tokenizer: turns prompt texts into ids.
        searcher: whose stream, in [0, num_searchers).
        num_searchers: streams of the run.
        ownership: "by_prompt": searcher s of n draws the prompts whose id is s mod n; "any": every
            searcher draws all prompts, each in its own order.
        seed: of the run.
        max_prompt_tokens: longer prompts are refused.

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
    ) -> None:
        import grain

        size = task.train_size()
        first, stride = (searcher, num_searchers) if ownership == "by_prompt" else (0, 1)
        if first >= size:
            raise ValueError(
                f"searcher {searcher} owns no prompt: task {task.name} has {size} training "
                f"problems for {num_searchers} searchers; lower num_searchers, or set "
                "search.ownership=any"
            )
        self._task = task
        self._tokenizer = tokenizer
        self._max_prompt_tokens = max_prompt_tokens
        shuffle_seed = int(np.random.SeedSequence([seed, searcher]).generate_state(1)[0])
        indices = grain.MapDataset.range(first, size, stride).shuffle(seed=shuffle_seed).repeat()
        # No threads and no prefetching: the position is then the number of prompts taken.
        options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
        self._indices = iter(indices.to_iter_dataset(options))

    def take(self, num_prompts: int) -> list[Prompt]:
        """The next prompts.

        Raises:
            ValueError: a prompt of more than `max_prompt_tokens` tokens; says which.
        """
        return [
            _prompt(
                self._task,
                self._tokenizer,
                "train",
                int(next(self._indices)),
                self._max_prompt_tokens,
            )
            for _ in range(num_prompts)
        ]

    def state(self) -> dict[str, Any]:
        """The position, JSON-compatible; later calls of `take` do not change it."""
        return self._indices.get_state()

    def set_state(self, state: Mapping[str, Any]) -> None:
        """Continue from a position that `state` of an equally configured stream returned."""
        self._indices.set_state(dict(state))


def eval_prompts(
    task: Task, tokenizer: Encoder, limit: int, max_prompt_tokens: int
) -> list[Prompt]:
    """The first `limit` held-out prompts (0: all of them), in the same order for every seed.

    Their ids are indices in the evaluation split, a number space of its own.

    Raises:
        ValueError: a prompt of more than `max_prompt_tokens` tokens; says which.
    """
    size = task.eval_size()
    return [
        _prompt(task, tokenizer, "eval", index, max_prompt_tokens)
        for index in range(min(limit, size) if limit else size)
    ]
