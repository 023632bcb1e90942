# SPDX-License-Identifier: Apache-2.0
"""RewardPool: runs a reward function in worker processes, and accounts for every item.

A reward function is user code: it may hang, raise, crash its process or return an invalid value.
Each call has a deadline, and every item gets either a finite number or a named reason.

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
from typing import Any

import numpy as np

from tba_jax import workers
from tba_jax.rewards.functions import (
    UNUSABLE,
    Outcome,
    load_error,
    make_handler,
    run,
    score_chunk,
    split_functions,
)
from tba_jax.rewards.source import RewardFailure, RewardSource, ScoreResult
from tba_jax.workers import WorkerFailed, WorkerPool

# Seconds for the trial on one row before training; the run itself shows whether a function hangs.
TRIAL_S = 10.0
# Maximum number of responses in a call of several prompts that have one response each.
CALL_ITEMS = 16

Columns = Mapping[str, Sequence[Any]]
"""Arguments of a reward function; each has one value per item."""


def start_workers(function: str, num_workers: int, logs: Path | None = None) -> WorkerPool:
    """Return the processes of reward functions, whose names are separated by commas.

    Args:
        num_workers: maximum number of processes; 0: functions are called in this process.
        logs: folder of the log files; None: the processes write to the output of this process.
    """
    functions = split_functions(function)
    if not num_workers:
        make_handler(functions)
    return WorkerPool("reward", make_handler, (functions,), num_workers=num_workers, logs=logs)


class RewardPool(RewardSource):
    """A reward function in processes, which serve all searchers.

    Starting takes no time here: a process imports the function in the background, and `check` or
    the first `score` waits for it.

    Args:
        function: "package.module:function" or "path/to/file.py:function" with TRL's signature,
            `f(prompts, completions, **columns) -> list[float | None]`. A module may lie in the
            working directory.
        timeout_s: seconds that a call may take.
        row: prompt text and columns of one row of the data, on which `check` tries the function
            with the row's answer as the completion; None: no trial.
        workers: processes, which several functions may share; None: one process.
    """

    def __init__(
        self,
        function: str,
        *,
        timeout_s: float,
        row: tuple[str, Mapping[str, Any]] | None = None,
        workers: WorkerPool | None = None,
    ) -> None:
        self.function = function
        self._timeout_s, self._row = timeout_s, row
        self._workers = workers or start_workers(function, 1)
        self._is_ready = False
        # Whether a call met the deadline, and the number of items that did not.
        self._has_met, self._missed = False, 0
        self._loading = self._workers.run(self._load(None if row is None else tuple(row[1])))

    def check(self) -> None:
        """Wait until the workers can run the function, then try it on `row`.

        Raises:
            ValueError: the function cannot be imported, needs a column that the data lacks, or
                fails on the row.
            RewardFailure: an import takes too long, or the process died during its start.
            RuntimeError: the pool was closed.
        """
        if self._is_ready:
            return
        if error := self._result(self._loading):
            raise ValueError(error)
        if self._row is not None:
            self._result(self._workers.run(self._try(*self._row)))
        self._is_ready = True

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Columns,
        *,
        completion_ids: Sequence[np.ndarray] = (),
        has_eos: Sequence[bool] = (),
    ) -> ScoreResult:
        """Score the responses; the parts are the values of `log_metric`.

        Args:
            prompts: texts; neighbouring items with the same prompt are a group.
            columns: keyword arguments for a function that takes them. The column `prompt` is not
                passed on: it holds the chat messages of each prompt, and the function then gets
                `prompts` and `completions` as message lists.

        Raises:
            RewardFailure: the first items, as many as there are workers, all missed the deadline.
            ValueError: the function cannot be loaded, a column has another length, or a result is
                not a list with a number or None per completion.
            RuntimeError: the pool was closed during the call.
        """
        arguments = _arguments(prompts, completions, columns, completion_ids)
        self.check()
        return self._result(self._workers.run(self._score(arguments, _groups(prompts))))

    def close(self) -> None:
        """Kill all workers, even during a call; a concurrent `score` raises RuntimeError."""
        self._workers.close()

    def _result(self, future: "futures.Future[Any]") -> Any:
        """Return the result of a coroutine on the workers' loop."""
        try:
            return future.result()
        except (WorkerFailed, futures.CancelledError) as error:
            if getattr(error, "name", "closed") == "closed":
                raise RuntimeError("the reward pool was closed") from None
            raise RewardFailure(f"reward function {self.function}: {error}") from None

    # Coroutines of the workers' loop.

    async def _call(self, timeout_s: float, function: Callable[..., Any], *arguments: Any) -> Any:
        """Call a function of `functions` in an idle worker, or in this process."""
        if self._workers.num_workers:
            return await self._workers._call((function, *arguments), timeout_s, "a call")
        return await run(function, *arguments)

    async def _load(self, columns: Sequence[str] | None) -> str:
        return await self._call(workers.START_TIMEOUT_S, load_error, self.function, columns)

    async def _try(self, prompt: str, columns: Mapping[str, Any]) -> None:
        """Raise ValueError if the function fails on the trial row; a late one does not fail."""
        answer = columns.get("answer", columns.get("reference_answer"))
        listed = {name: [value] for name, value in columns.items()}
        completion = answer if isinstance(answer, str) else ""
        arguments = _arguments([prompt], [completion], listed, [np.zeros(1, np.int32)])
        outcome = await self._outcome(arguments, [0], min(TRIAL_S, self._timeout_s))
        if outcome.failure in ("reward_crash", "reward_error"):
            *_, reason = outcome.text.rstrip().splitlines()
            if "prompt" in columns:
                reason += ". Prompts are chats, so a completion is a list of messages, as in "
                reason += "TRL: its text is completion[0]['content']"
            raise ValueError(
                f"reward function {self.function!r} fails on the first row, with its answer as the "
                f"completion: {reason}\n{outcome.text.rstrip()}"
            )

    async def _score(self, columns: Columns, groups: Sequence[list[int]]) -> ScoreResult:
        """Score all groups at the same time."""
        tasks = [asyncio.ensure_future(self._score_group(columns, group)) for group in groups]
        try:
            found = list(itertools.chain(*await asyncio.gather(*tasks)))
        finally:
            for task in tasks:
                task.cancel()
        n = len(columns["completions"])
        result, metrics = ScoreResult([None] * n, [None] * n, ""), {}
        for items, outcome in found:
            for place, item in enumerate(items):
                result.rewards[item] = None if outcome.failure else outcome.rewards[place]
                reason = outcome.failure or outcome.reasons[place]
                result.reasons[item] = reason
                if reason and not result.first_traceback:
                    prompt, completion = columns["prompts"][item], columns["completions"][item]
                    text = f"prompt: {prompt!r:.500}\ncompletion: {completion!r:.500}"
                    result = result._replace(first_traceback=f"{outcome.text}\n{text}")
                for name, value in outcome.metrics.items():
                    metrics.setdefault(name, [math.nan] * n)[item] = value
        return result._replace(parts=metrics)

    async def _score_group(
        self, columns: Columns, group: list[int]
    ) -> list[tuple[list[int], Outcome]]:
        """Score items together; if the call fails, without those that fail alone."""
        outcome = await self._outcome(columns, group, self._timeout_s)
        if not outcome.failure or len(group) == 1:
            return [(group, outcome)]
        alone = await asyncio.gather(*(self._outcome(columns, [i], self._timeout_s) for i in group))
        found = [([i], each) for i, each in zip(group, alone, strict=True) if each.failure]
        if rest := [i for i, each in zip(group, alone, strict=True) if not each.failure]:
            limit_s = self._timeout_s * len(rest)
            found.append((rest, await self._outcome(columns, rest, limit_s)))
        return found

    async def _outcome(self, columns: Columns, items: Sequence[int], timeout_s: float) -> Outcome:
        """Call the function once.

        Raises:
            ValueError: the function can never succeed, or broke its contract.
            RewardFailure: the first items, one per process, all missed the deadline.
        """
        chosen = {name: [column[i] for i in items] for name, column in columns.items()}
        try:
            outcome = Outcome(*await self._call(timeout_s, score_chunk, self.function, chosen))
        except WorkerFailed as error:
            if error.name not in ("timeout", "crash"):
                raise
            text = f"the process for {self.function} died: {error}"
            if error.name == "timeout":
                text = f"{self.function} took longer than {timeout_s} s and was stopped"
                self._note_late(text, len(items))
            return Outcome([], [], text, f"reward_{error.name}")
        self._has_met = True
        if outcome.failure == UNUSABLE:
            raise ValueError(f"reward function {self.function} {outcome.text}")
        return outcome

    def _note_late(self, text: str, num_items: int) -> None:
        self._missed += num_items == 1
        if not self._has_met and self._missed >= max(2, self._workers.num_workers):
            raise RewardFailure(
                f"reward function {self.function} is too slow: each of the first {self._missed} "
                f"items took longer than reward.timeout_s = {self._timeout_s} s. Raise "
                f"--config.reward.timeout_s. First failure:\n{text}"
            )


def _arguments(
    prompts: Sequence[str],
    completions: Sequence[str],
    columns: Columns,
    completion_ids: Sequence[np.ndarray],
) -> Columns:
    """Return the arguments of the function; prompts and completions of chats are messages.

    As in TRL, a last message of the assistant is the beginning of the completion.
    """
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
        if len(column) != len(completions):
            n = len(completions)
            raise ValueError(f"{name} holds {len(column)} values for {n} completions")
    return found


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
