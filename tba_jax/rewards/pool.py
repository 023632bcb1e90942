# SPDX-License-Identifier: Apache-2.0
"""RewardPool: runs text rewards in worker processes, and accounts for every item.

A reward function is user code: it may hang, raise, crash its process or return an invalid value.
Each call has a deadline, and every item gets either a finite number or a named reason. Several
functions share the workers; their weighted sum is the reward, and an item on which a function fails
has no reward.

A call has one whole group (all responses to a prompt). If it fails, each item is tried alone to
find the items that fail, and the others are scored together in one more call, whose deadline is as
long as all of them may take. Responses that are alone share calls.

Functions that exist only in this process, such as functions of a notebook, are called in a thread
of the pool: a call that hangs is not stopped, and a call that crashes ends the run.

Invariant: a failure is never a reward of 0, and results depend on no measured time, except for an
item that misses its deadline.
"""

import asyncio
import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax import workers
from tba_jax.rewards.functions import (
    UNUSABLE,
    Outcome,
    load_error,
    make_handler,
    part_names,
    run,
    score_chunk,
    split_functions,
)
from tba_jax.rewards.source import ScoreResult, summed
from tba_jax.workers import WorkerFailed, WorkerPool

# Seconds for the trial on one row before training; the run itself shows whether a function hangs.
TRIAL_S = 10.0
# Maximum number of responses in a call of several prompts that have one response each.
CALL_ITEMS = 16


class RewardFailure(RuntimeError):
    """Reward functions cannot start, or fail too often; the message has the cause."""


class _Items(NamedTuple):
    """Items of one `score` call, with the results so far.

    Attributes:
        columns: arguments of the functions; each has one value per item.
        results: rewards and failures of each function; an item that waits has neither.
        metrics: values of `log_metric` of each item, by name.
    """

    columns: Mapping[str, Sequence[Any]]
    results: list[ScoreResult]
    metrics: dict[str, list[float]]


class RewardPool:
    """Processes that score responses with reward functions; safe to share between threads.

    Starting takes no time here: a process imports the functions in the background, and `check` or
    the first `score` waits for it.

    Args:
        function: "package.module:function" or "path/to/file.py:function" with TRL's signature,
            `f(prompts, completions, **columns) -> list[float | None]`; or several with commas
            between them, whose weighted sum is the reward. A module may lie in the working
            directory.
        num_workers: processes; each can run every function. 0: functions are called in this
            process, without deadlines.
        weights: weight of each function; empty: 1 each.
        row: prompt text and columns of one row of the data, on which `check` tries the functions
            with the row's answer as the completion; None: no trial.
        timeout_s: seconds that a call may take.
        max_failure_rate: share of one call's items that may fail before `score` raises.
        is_part: whether another source adds its rewards; items to which no function applies are
            then no failures.
        logs: folder of the processes' log files; None: their output is that of this process.
    """

    def __init__(
        self,
        function: str,
        *,
        num_workers: int,
        timeout_s: float,
        max_failure_rate: float,
        weights: Sequence[float] = (),
        row: tuple[str, Mapping[str, Any]] | None = None,
        is_part: bool = False,
        logs: Path | None = None,
    ) -> None:
        self.function = function
        self._functions = split_functions(function)
        self._names = part_names(self._functions)
        self._weights = tuple(weights) or (1.0,) * len(self._functions)
        if len(self._weights) != len(self._functions):
            raise ValueError(
                f"{len(self._weights)} weights {self._weights} for {len(self._functions)} reward "
                f"functions {function}; wanted one weight for each function"
            )
        self._timeout_s = timeout_s
        self._max_failure_rate = max_failure_rate
        self._harmless = (None, "reward_none") if is_part else (None,)
        self._row = row
        self._is_ready = False
        # For each function, whether a call met the deadline, and the number of items that did not.
        self._has_met = [False] * len(self._functions)
        self._missed = [0] * len(self._functions)
        self._num_workers = num_workers
        self._workers = WorkerPool(
            "reward", make_handler, (self._functions,), num_workers=num_workers, logs=logs
        )
        if not num_workers:
            make_handler(self._functions)
        columns = None if row is None else tuple(row[1])
        loading = self._call(workers.START_TIMEOUT_S, load_error, self._functions, columns)
        self._load_error = self._workers.run(loading)

    def check(self) -> None:
        """Wait until the workers can run the functions, then try the functions on `row`.

        Raises:
            ValueError: a function cannot be imported, needs a column that the data lacks, or fails
                on the row.
            RewardFailure: an import takes too long, or the process died during its start.
            RuntimeError: the pool was closed.
        """
        if self._is_ready:
            return
        if error := self._await(self._load_error):
            raise ValueError(error)
        if self._row is not None:
            self._await(self._workers.run(self._try(*self._row)))
        self._is_ready = True

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[np.ndarray] = (),
        has_eos: Sequence[bool] = (),
    ) -> ScoreResult:
        """Score the responses; every item gets a reward or a reason.

        Args:
            prompts: texts; neighbouring items with the same prompt are a group.
            columns: keyword arguments for the functions that take them, each with one value per
                prompt. The column `prompt` is not passed on: it holds the chat messages of each
                prompt, and the functions then get `prompts` and `completions` as message lists.
            completion_ids: tokens of the responses, for functions that take token lists.
            has_eos: as in `RewardSource.score`; text rewards do not receive it.

        Raises:
            RewardFailure: more than `max_failure_rate` of the items failed (raised as soon as that
                is certain, with the first traceback); or the first items of a function, as many as
                there are workers, all missed the deadline.
            ValueError: the function cannot be loaded, a column has another length, or a result is
                not a list with a number or None per completion.
            RuntimeError: the pool was closed during the call.
        """
        items = self._items(prompts, completions, columns, completion_ids)
        self.check()
        self._await(self._workers.run(self._score(items, _groups(prompts))))
        return self._sum(items)

    def on(self, site: Any) -> "RewardPool":
        """Return self: its workers serve all searchers."""
        return self

    def close(self) -> None:
        """Kill all workers, even during a call; a concurrent `score` raises RuntimeError."""
        self._workers.close()

    def _await(self, future: "futures.Future[Any]") -> Any:
        """Return the result of a coroutine on the workers' loop."""
        try:
            return future.result()
        except (WorkerFailed, futures.CancelledError) as error:
            if getattr(error, "name", "closed") == "closed":
                raise RuntimeError("the reward pool was closed") from None
            raise RewardFailure(f"reward function {self.function}: {error}") from None

    def _items(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        completion_ids: Sequence[np.ndarray],
    ) -> _Items:
        """Return items without results; prompts and completions of chats are messages.

        As in TRL, a last message of the assistant is the beginning of the completion.
        """
        n = len(completions)
        found: dict[str, Sequence[Any]] = {"prompts": prompts, "completions": completions}
        if chats := columns.get("prompt"):
            begun = [m[-1]["content"] if m[-1]["role"] == "assistant" else "" for m in chats]
            found["prompts"] = [m[:-1] if m[-1]["role"] == "assistant" else m for m in chats]
            found["completions"] = [
                [{"role": "assistant", "content": start + text}]
                for start, text in zip(begun, completions, strict=True)
            ]
        if len(completion_ids):
            found["completion_ids"] = [ids.tolist() for ids in completion_ids]
        found |= {name: column for name, column in columns.items() if name != "prompt"}
        for name, column in found.items():
            if len(column) != n:
                raise ValueError(f"{name} holds {len(column)} values for {n} completions")
        return _Items(found, [ScoreResult([None] * n, [None] * n, "") for _ in self._functions], {})

    def _sum(self, items: _Items) -> ScoreResult:
        found = summed(self._names, items.results, self._weights)
        return found._replace(parts={**found.parts, **items.metrics})

    # Coroutines of the workers' loop.

    async def _call(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of `functions` in an idle worker, or in this process."""
        if self._num_workers:
            return await self._workers.call((function, *arguments), timeout_s, "a call")
        return await run(function, *arguments)

    async def _try(self, prompt: str, columns: Mapping[str, Any]) -> None:
        """Raise ValueError if a function fails on the trial row; a late function does not fail."""
        answer = columns.get("answer", columns.get("reference_answer"))
        listed = {name: [value] for name, value in columns.items()}
        completion = answer if isinstance(answer, str) else ""
        items = self._items([prompt], [completion], listed, [np.zeros(1, np.int32)])
        for function, name in enumerate(self._functions):
            outcome = await self._outcome(items, function, [0], min(TRIAL_S, self._timeout_s))
            if outcome.failure not in ("reward_crash", "reward_error"):
                continue
            *_, reason = outcome.text.rstrip().splitlines()
            if "prompt" in columns:
                reason += ". Prompts are chats, so a completion is a list of messages, as in "
                reason += "TRL: its text is completion[0]['content']"
            raise ValueError(
                f"reward function {name!r} fails on the first row, with its answer as the "
                f"completion: {reason}\n{outcome.text.rstrip()}"
            )

    async def _score(self, items: _Items, groups: Sequence[Sequence[int]]) -> None:
        pairs = itertools.product(range(len(self._functions)), groups)
        tasks = [asyncio.ensure_future(self._score_group(items, *pair)) for pair in pairs]
        try:
            await asyncio.gather(*tasks)
        finally:
            for task in tasks:
                task.cancel()

    async def _score_group(self, items: _Items, function: int, group: Sequence[int]) -> None:
        """Score the items of a group together; if the call fails, without those that fail alone."""
        outcome = await self._outcome(items, function, group, self._timeout_s)
        if outcome.failure and len(group) > 1:
            alone = [self._is_sound(items, function, item) for item in group]
            sound = await asyncio.gather(*alone)
            group = list(itertools.compress(group, sound))
            outcome = await self._outcome(items, function, group, self._timeout_s * len(group))
        self._accept(items, function, group, outcome)

    async def _is_sound(self, items: _Items, function: int, item: int) -> bool:
        """Return whether an item can be scored alone; record the failure otherwise."""
        outcome = await self._outcome(items, function, [item], self._timeout_s)
        if outcome.failure:
            self._accept(items, function, [item], outcome)
        return not outcome.failure

    async def _outcome(
        self, items: _Items, function: int, chosen: Sequence[int], timeout_s: float
    ) -> Outcome:
        """Call a function once.

        Raises:
            ValueError: the function can never succeed, or broke its contract.
        """
        if not chosen:
            return Outcome([], [])
        name = self._functions[function]
        columns = {key: [column[i] for i in chosen] for key, column in items.columns.items()}
        try:
            outcome = Outcome(*await self._call(timeout_s, score_chunk, name, columns))
        except WorkerFailed as error:
            if error.name not in ("timeout", "crash"):
                raise
            text = f"the process for {name} died: {error}"
            if error.name == "timeout":
                text = f"{name} took longer than {timeout_s} s and was stopped"
            return Outcome([], [], text, f"reward_{error.name}")
        self._has_met[function] = True
        if outcome.failure == UNUSABLE:
            raise ValueError(f"reward function {name} {outcome.text}")
        return outcome

    def _accept(
        self, items: _Items, function: int, chosen: Sequence[int], outcome: Outcome
    ) -> None:
        """Record an outcome.

        Raises:
            RewardFailure: too many items failed, or the first items of the function, one per
                process, all timed out.
        """
        result, n = items.results[function], len(items.columns["completions"])
        rewards = outcome.rewards or [None] * len(chosen)
        reasons = outcome.reasons or [outcome.failure] * len(chosen)
        for item, reward, reason in zip(chosen, rewards, reasons, strict=True):
            result.rewards[item], result.reasons[item] = reward, reason
            if reason and not result.first_traceback:
                prompt, completion = (items.columns[x][item] for x in ("prompts", "completions"))
                text = f"{outcome.text}\nprompt: {prompt!r:.500}\ncompletion: {completion!r:.500}"
                result = items.results[function] = result._replace(first_traceback=text)
            for name, value in outcome.metrics.items():
                items.metrics.setdefault(name, [math.nan] * n)[item] = value
        if outcome.failure == "reward_timeout" and not self._has_met[function]:
            self._missed[function] += 1
            if self._missed[function] >= max(2, self._num_workers):  # one item alone may be hard
                raise RewardFailure(
                    f"reward function {self._functions[function]} is too slow: each of the first "
                    f"{self._missed[function]} items took longer than reward.timeout_s = "
                    f"{self._timeout_s} s. Raise --config.reward.timeout_s. First failure:\n"
                    f"{outcome.text}"
                )
        whole = self._sum(items)
        num_failed = n - sum(map(whole.reasons.count, self._harmless))
        if num_failed > self._max_failure_rate * n:
            counts = {r: whole.reasons.count(r) for r in dict.fromkeys(whole.reasons) if r}
            raise RewardFailure(
                f"reward function {self.function} failed on {num_failed} of {n} items {counts}, "
                f"above reward.max_failure_rate = {self._max_failure_rate}. First failure:\n"
                f"{whole.first_traceback}"
            )


def _groups(prompts: Sequence[str]) -> list[list[int]]:
    """Return the items of each call: one group, or up to CALL_ITEMS groups of one item."""
    found: list[list[int]] = []
    is_joined = False
    for _, group in itertools.groupby(range(len(prompts)), lambda i: prompts[i]):
        items = list(group)
        if is_joined and len(items) == 1 and len(found[-1]) < CALL_ITEMS:
            found[-1] += items
        else:
            found.append(items)
        is_joined = len(items) == 1
    return found
