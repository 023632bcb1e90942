# SPDX-License-Identifier: Apache-2.0
"""RewardPool: runs text rewards in worker processes, and accounts for every item.

A reward function is user code: it may hang, raise, crash its process or return an invalid value.
Each call has a deadline, and every item gets either a finite number or a named reason. Several
functions share the workers; their weighted sum is the reward, and an item on which a function fails
has no reward.

A call has one whole group (all responses to a prompt). If it fails, each item is tried alone to
find the items that fail, and the others are scored together in one more call, whose deadline is as
long as all of them may take. So the rewards of a function that compares responses depend on no
measured time. Responses that are alone share calls.

Functions that exist only in this process, such as functions of a notebook, are called in the
calling thread: a call that hangs is not stopped, and a call that crashes ends the run.

Invariant: a failure is never a reward of 0, and results depend on no measured time, except for an
item that misses its deadline.
"""

import contextlib
import itertools
import math
from collections.abc import Generator, Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax import workers
from tba_jax.rewards.functions import (
    Missing,
    Outcome,
    load_error,
    make_handler,
    part_names,
    run_here,
    score_chunk,
    split_functions,
)
from tba_jax.rewards.source import ScoreResult, summed
from tba_jax.workers import WorkerFailed, WorkerPool

# Seconds for the trial on one row before training; the run itself shows whether a function hangs.
TRIAL_S = 10.0
# Maximum number of responses in a call of several prompts that have one response each.
CALL_ITEMS = 16
_LARGEST = float(np.finfo(np.float32).max)  # rewards are float32
_MOST_TEXT = 4000  # characters of a traceback: an exception may carry megabytes
_STOPPED = ("reward_timeout", "reward_crash")
_CLOSED = "the reward pool was closed"


class RewardFailure(RuntimeError):
    """Reward functions cannot start, or fail too often; the message has the cause."""


class _Task(NamedTuple):
    """One call of a function, with the items that it scores together and its deadline."""

    function: int
    items: Sequence[int]
    timeout_s: float


class _Call:
    """Items of one `score` call, with each function's rewards and failures so far."""

    def __init__(
        self,
        functions: Sequence[str],
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        completion_ids: Sequence[np.ndarray],
    ) -> None:
        n = len(completions)
        keywords = {name: column for name, column in columns.items() if name != "prompt"}
        if len(completion_ids):
            keywords["completion_ids"] = completion_ids
        for name, column in {"prompts": prompts, **columns, **keywords}.items():
            if len(column) != n:
                raise ValueError(f"{name} holds {len(column)} values for {n} completions")
        self._prompts, self._completions = prompts, completions
        self._keywords = keywords
        self._chats: Sequence[Any] | None = columns.get("prompt")
        self._results = [ScoreResult([None] * n, [None] * n, "") for _ in functions]
        self._metrics: dict[str, list[float]] = {}

    @classmethod
    def on_row(cls, functions: Sequence[str], prompt: str, columns: Mapping[str, Any]) -> "_Call":
        """Return a trial call: one row of the data, with its reference answer as the response."""
        answer = columns.get("answer", columns.get("reference_answer"))
        completion = answer if isinstance(answer, str) else ""
        listed = {name: [value] for name, value in columns.items()}
        return cls(functions, [prompt], [completion], listed, [np.zeros(1, np.int32)])

    @property
    def has_chats(self) -> bool:
        """Return whether prompts and completions are lists of messages."""
        return self._chats is not None

    @property
    def groups(self) -> list[list[int]]:
        """Return the items of each call: one group, or up to CALL_ITEMS groups of one item."""
        found: list[list[int]] = []
        is_joined = False
        start = 0
        for _, group in itertools.groupby(self._prompts):
            items = list(range(start, start + len(list(group))))
            start += len(items)
            if is_joined and len(items) == 1 and len(found[-1]) < CALL_ITEMS:
                found[-1] += items
            else:
                found.append(items)
            is_joined = len(items) == 1
        return found

    def arguments(self, items: Sequence[int]) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
        """Return the arguments of the function: texts, or chat messages for chat data.

        As in TRL, a last message of the assistant is the beginning of the completion.
        """
        keywords = {name: [column[i] for i in items] for name, column in self._keywords.items()}
        if "completion_ids" in keywords:
            keywords["completion_ids"] = [ids.tolist() for ids in keywords["completion_ids"]]
        if self._chats is None:
            prompts = [self._prompts[i] for i in items]
            return prompts, [self._completions[i] for i in items], keywords
        prompts, completions = [], []
        for i in items:
            messages, begun = self._chats[i], ""
            if messages[-1]["role"] == "assistant":
                *messages, last = messages
                begun = last["content"]
            prompts.append(messages)
            completions.append([{"role": "assistant", "content": begun + self._completions[i]}])
        return prompts, completions, keywords

    def accept(self, function: int, items: Sequence[int], outcome: Outcome) -> None:
        """Record the rewards and metrics of a call."""
        result = self._results[function]
        for item, reward in zip(items, outcome.rewards, strict=True):
            if isinstance(reward, list):  # a `Missing` that was written as JSON
                reward = Missing(*reward)
            if isinstance(reward, Missing):
                self.fail(function, item, *reward)
            elif reward is None:
                self.fail(function, item, "reward_none", "the function returned None")
            elif not abs(reward) <= _LARGEST:
                self.fail(function, item, "reward_nan", f"the function returned {reward}")
            else:
                result.rewards[item] = reward
        for name, value in outcome.metrics.items():
            values = self._metrics.setdefault(name, [math.nan] * len(self._completions))
            for item in items:
                values[item] = value

    def fail(self, function: int, item: int, reason: str, text: str) -> None:
        """Record the failure of an item."""
        result = self._results[function]
        result.reasons[item] = reason
        if not result.first_traceback:
            text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... (cut)"
            traceback = (
                f"{text}\nprompt: {self._prompts[item]!r:.500}\n"
                f"completion: {self._completions[item]!r:.500}"
            )
            self._results[function] = result._replace(first_traceback=traceback)

    def without_failure(self, task: _Task) -> _Task:
        """Return the call of the items that have not failed."""
        reasons = self._results[task.function].reasons
        return task._replace(items=[i for i in task.items if reasons[i] is None])

    def result(self, names: Sequence[str], weights: Sequence[float]) -> ScoreResult:
        """Return the weighted sum; an item that waits for a result has no reason."""
        found = summed(names, self._results, weights)
        return found._replace(parts={**found.parts, **self._metrics})


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
        max_memory_bytes: memory limit of each process; 0: no limit.
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
        max_memory_bytes: int = 0,
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
        self._is_ready = self._is_closed = False
        # For each function, whether an item met the deadline, and the number that missed it before.
        self._has_met = [False] * len(self._functions)
        self._missed = [0] * len(self._functions)
        self._num_workers = num_workers
        self._workers = WorkerPool(
            "reward",
            make_handler,
            (self._functions,),
            num_workers=num_workers,
            max_memory_bytes=max_memory_bytes,
            logs=logs,
        )
        if not num_workers:
            make_handler(self._functions)
        columns = None if row is None else tuple(row[1])
        limit_s = workers.START_TIMEOUT_S
        self._load_error = self._submit(limit_s, load_error, self._functions, columns)

    def _submit(self, timeout_s: float, function: Any, *arguments: Any) -> "futures.Future[Any]":
        """Call a function in an idle worker, or without workers in this thread."""
        if self._is_closed:
            raise RuntimeError(_CLOSED)
        if self._num_workers:
            return self._workers.call((function, arguments), timeout_s, "a call")
        future: futures.Future[Any] = futures.Future()
        future.set_result(run_here(function, *arguments))
        return future

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
        try:
            error = self._load_error.result()
        except WorkerFailed as failed:
            raise self._fatal(failed) from None
        if error:
            raise ValueError(error)
        if self._row is not None:
            self._try(_Call.on_row(self._functions, *self._row))
        self._is_ready = True

    def _fatal(self, error: WorkerFailed) -> Exception:
        """Return the error that ends a run whose workers do not start or were closed."""
        if error.name == "closed":
            return RuntimeError(_CLOSED)
        return RewardFailure(f"reward function {self.function}: {error}")

    def _try(self, call: _Call) -> None:
        """Raise ValueError if a function fails on the trial row; a late function does not fail."""
        limit_s = min(TRIAL_S, self._timeout_s)
        tasks = [_Task(function, [0], limit_s) for function in range(len(self._functions))]
        for task, outcome in self._outcomes(call, tasks):
            name = f"reward function {self._functions[task.function]!r}"
            if outcome.reason == "reward_crash":
                raise ValueError(
                    f"{name}: its process died on the first row; its output shows the cause"
                )
            if outcome.reason == "reward_error":
                *_, reason = outcome.text.rstrip().splitlines()
                if call.has_chats:
                    reason += ". Prompts are chats, so a completion is a list of messages, as in "
                    reason += "TRL: its text is completion[0]['content']"
                raise ValueError(
                    f"{name} fails on the first row, with its answer as the completion: {reason}\n"
                    f"{outcome.text.rstrip()}"
                )

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
        call = _Call(self._functions, prompts, completions, columns, completion_ids)
        self.check()
        functions, limit_s = range(len(self._functions)), self._timeout_s
        tasks = [_Task(function, items, limit_s) for function in functions for items in call.groups]
        if broken := self._run(call, tasks):
            alone = [_Task(task.function, [i], limit_s) for task in broken for i in task.items]
            self._run(call, alone, is_trial=True)
            rest = [call.without_failure(task) for task in broken]
            rest = [task._replace(timeout_s=limit_s * len(task.items)) for task in rest]
            self._run(call, [task for task in rest if task.items], is_last=True)
        return call.result(self._names, self._weights)

    def _run(
        self, call: _Call, tasks: Sequence[_Task], *, is_trial: bool = False, is_last: bool = False
    ) -> list[_Task]:
        """Run tasks and record their results; return the failed tasks of several items.

        Args:
            is_trial: whether to record failures alone.
            is_last: whether a failure of several items is final for each of them.
        """
        broken = []
        with contextlib.closing(self._outcomes(call, tasks)) as outcomes:
            for task, outcome in outcomes:
                self._has_met[task.function] |= outcome.reason not in _STOPPED
                if not outcome.reason and not is_trial:
                    call.accept(task.function, task.items, outcome)
                elif outcome.reason and len(task.items) > 1 and not is_last:
                    broken.append(task)
                elif outcome.reason:
                    for item in task.items:
                        call.fail(task.function, item, outcome.reason, outcome.text)
                    self._note_deadline(task.function, outcome)
                self._check_failures(call.result(self._names, self._weights))
        return broken

    def _outcomes(
        self, call: _Call, tasks: Sequence[_Task]
    ) -> Generator[tuple[_Task, Outcome], None, None]:
        """Run tasks at the same time, and yield their outcomes in the order of the tasks.

        Raises:
            ValueError: a function can never succeed, or broke its contract.
        """
        pending = []
        for task in tasks:
            name, arguments = self._functions[task.function], call.arguments(task.items)
            pending.append(self._submit(task.timeout_s, score_chunk, name, *arguments))
        try:
            for task, future in zip(tasks, pending, strict=True):
                name = self._functions[task.function]
                try:
                    outcome = Outcome(*future.result())
                except WorkerFailed as error:
                    if error.name == "timeout":
                        text = f"{name} took longer than {task.timeout_s} s and was stopped"
                        outcome = Outcome([], "reward_timeout", text)
                    elif error.name == "crash":
                        text = f"the process for {name} died: {error}"
                        outcome = Outcome([], "reward_crash", text)
                    else:
                        raise self._fatal(error) from None
                if outcome.unusable:
                    raise ValueError(f"reward function {name} {outcome.unusable}")
                yield task, outcome
        finally:
            for future in pending:
                future.cancel()

    def _check_failures(self, result: ScoreResult) -> None:
        """Raise RewardFailure if more than `max_failure_rate` of the items failed."""
        reasons, n = result.reasons, len(result.reasons)
        num_failed = n - sum(map(reasons.count, self._harmless))
        if num_failed > self._max_failure_rate * n:
            counts = {r: reasons.count(r) for r in dict.fromkeys(reasons) if r}
            raise RewardFailure(
                f"reward function {self.function} failed on {num_failed} of {n} items {counts}, "
                f"above reward.max_failure_rate = {self._max_failure_rate}. First failure:\n"
                f"{result.first_traceback}"
            )

    def _note_deadline(self, function: int, outcome: Outcome) -> None:
        """Raise RewardFailure if the first items of a function, one per process, all timed out."""
        if outcome.reason != "reward_timeout" or self._has_met[function]:
            return
        self._missed[function] += 1
        if self._missed[function] >= max(2, self._num_workers):  # one item alone may be hard
            raise RewardFailure(
                f"reward function {self._functions[function]} is too slow: each of the first "
                f"{self._missed[function]} items took longer than reward.timeout_s = "
                f"{self._timeout_s} s. Raise --config.reward.timeout_s. First failure:\n"
                f"{outcome.text}"
            )

    def on(self, site: Any) -> "RewardPool":
        """Return self: its workers serve all searchers."""
        return self

    def close(self) -> None:
        """Kill all workers, even during a call; a concurrent `score` raises RuntimeError."""
        self._is_closed = True
        self._workers.close()
