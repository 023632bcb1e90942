# SPDX-License-Identifier: Apache-2.0
"""RewardPool: runs text rewards in processes that can be killed, and accounts for every item.

A reward function is user code: it may hang, raise, crash its process or return an invalid value.
The pool gives each call a deadline, kills a process that exceeds it, and returns for every item
either a finite number or a named reason. Several functions share the processes; their weighted sum
is the reward, and an item on which a function fails has no reward. The processes import neither jax
nor transformers. Invariant: a failure is never a reward of 0, and a failing item does not change
the rewards of other items.

A call has the whole groups of its prompts. The items of a failed call are sent again one by one, to
find the item that fails. Functions that exist only in this process, such as functions of a
notebook, are called in the calling thread: a call that hangs is not stopped, and a call that
crashes ends the run.
"""

import itertools
import multiprocessing
import os
import queue
import threading
from collections.abc import Mapping, Sequence
from concurrent import futures
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from tba_jax.rewards import processes
from tba_jax.rewards.functions import (
    LoadError,
    Missing,
    Outcome,
    forget_loaded,
    load_error,
    part_names,
    preload,
    score_chunk,
    split_functions,
    trial_error,
)
from tba_jax.rewards.source import ScoreResult, summed

# Seconds for the start of a process and the import of the reward's module, also on a busy machine.
START_TIMEOUT_S = 60.0
# Seconds for the trial on one row before training; the run itself shows whether a function hangs.
TRIAL_S = 10.0
# Groups are sent together until a call has this number of items.
CALL_ITEMS = 16
_LARGEST = float(np.finfo(np.float32).max)  # rewards are float32
_MOST_TEXT = 4000  # characters of a traceback: an exception may carry megabytes
_CLOSED = "the reward pool was closed"


class RewardFailure(RuntimeError):
    """Reward functions cannot start, or fail too often; the message has the cause."""


class _Crashed(Exception):
    """The process ended during a call."""


# --- in the reward process ---------------------------------------------------------------------


def _serve(
    connection: Any, functions: Sequence[str], folder: str, max_memory_bytes: int, log: str
) -> None:
    """Answer calls (function, arguments) until the parent process closes the connection."""
    processes.enter_process(connection, folder, max_memory_bytes, log)
    preload(functions)  # before the deadline of the first call runs
    connection.send(None)
    try:
        while True:
            function, arguments = connection.recv()
            connection.send(function(*arguments))
    except (EOFError, OSError):
        processes.leave()


# --- in the parent -----------------------------------------------------------------------------


class _Worker:
    """A reward process and the private pipe to it; one thread at a time calls it.

    Args:
        closed: set when no further process may start.
    """

    def __init__(self, arguments: Sequence[Any], log: str, closed: threading.Event) -> None:
        self._arguments, self._closed = (*arguments, log), closed
        self._process: Any = None
        self._connection: Any = None

    def call(self, timeout_s: float, function: Any, *arguments: Any) -> Any:
        """Call a function in the process; start the process if there is none.

        Raises:
            TimeoutError: the call took longer; the process was killed.
            _Crashed: the process ended. RuntimeError: the pool was closed.
            RewardFailure: the process did not start.
        """
        if self._process is None or not self._process.is_alive():
            self._start()
        process = self._process
        try:
            self._connection.send((function, arguments))
            if self._connection.poll(timeout_s):
                return self._connection.recv()
        except (EOFError, OSError):
            self.kill()
            if self._closed.is_set():
                raise RuntimeError(_CLOSED) from None
            raise _Crashed(f"exit code {process and process.exitcode}") from None
        self.kill()
        raise TimeoutError

    def kill(self) -> None:
        """Kill the process and its children, if there is one."""
        if self._process is not None:
            processes.kill(self._process)

    def _start(self) -> None:
        self.kill()  # also children of a process that has ended
        if self._closed.is_set():
            raise RuntimeError(_CLOSED)
        context = multiprocessing.get_context("spawn")
        if self._connection is not None:
            self._connection.close()
        self._connection, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs, *self._arguments), daemon=True)
        self._process.start()
        theirs.close()
        if self._closed.is_set():  # `close` may not have seen this process
            self.kill()
        try:
            if self._connection.poll(START_TIMEOUT_S):
                self._connection.recv()
                return
            text = (
                f"its module was not imported within {START_TIMEOUT_S:.0f} s. Move slow work from "
                "the module's top level into the function"
            )
        except (EOFError, OSError):
            output = self._arguments[-1] or "standard error"
            text = (
                f"its process died while it was starting; see {output} "
                '(a script that starts one needs `if __name__ == "__main__":`)'
            )
        self.kill()
        if self._closed.is_set():
            raise RuntimeError(_CLOSED)
        raise RewardFailure(f"reward function {', '.join(self._arguments[0])}: {text}")


class _Task(NamedTuple):
    """Items that are scored together by one function."""

    function: int
    items: range


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

    @classmethod
    def on_row(cls, functions: Sequence[str], prompt: str, columns: Mapping[str, Any]) -> "_Call":
        """Return a trial call: one row of the data, with its reference answer as the response."""
        answer = columns.get("answer", columns.get("reference_answer"))
        completion = answer if isinstance(answer, str) else ""
        listed = {name: [value] for name, value in columns.items()}
        return cls(functions, [prompt], [completion], listed, [np.zeros(1, np.int32)])

    @property
    def parts(self) -> list[range]:
        """Return the items of each call: neighbouring groups, up to CALL_ITEMS if they fit."""
        parts: list[range] = []
        start = 0
        for _, group in itertools.groupby(self._prompts):
            stop = start + len(list(group))
            if parts and stop - parts[-1].start <= CALL_ITEMS:
                parts[-1] = range(parts[-1].start, stop)
            else:
                parts.append(range(start, stop))
            start = stop
        return parts

    def arguments(self, items: range) -> tuple[list[Any], list[Any], dict[str, list[Any]]]:
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

    def accept(self, task: _Task, rewards: Sequence[float | Missing | None]) -> None:
        """Record the rewards of a task."""
        for item, reward in zip(task.items, rewards, strict=True):
            if isinstance(reward, Missing):
                self.fail(task.function, item, *reward)
            elif reward is None:
                self.fail(task.function, item, "reward_none", "the function returned None")
            elif not abs(reward) <= _LARGEST:
                self.fail(task.function, item, "reward_nan", f"the function returned {reward}")
            else:
                self._results[task.function].rewards[item] = reward

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

    def result(self, names: Sequence[str], weights: Sequence[float]) -> ScoreResult:
        """Return the weighted sum; an item that waits for a result has no reason."""
        return summed(names, self._results, weights)


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
        self._is_ready = False
        self._closed = threading.Event()
        # For each function, whether an item met the deadline, and the number that missed it before.
        self._has_met = [False] * len(self._functions)
        self._missed = [0] * len(self._functions)
        arguments = (self._functions, os.getcwd(), max_memory_bytes)
        self._workers = [
            _Worker(arguments, processes.log_file(logs, "reward", i), self._closed)
            for i in range(num_workers)
        ]
        self._idle: queue.SimpleQueue[_Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        if num_workers:
            self._threads = futures.ThreadPoolExecutor(num_workers, "reward")
        else:
            # Running a notebook cell again defines another function of the same name.
            forget_loaded()
        columns = None if row is None else tuple(row[1])
        self._load_error = self._submit(START_TIMEOUT_S, load_error, self._functions, columns)

    def _submit(self, timeout_s: float, function: Any, *arguments: Any) -> "futures.Future[Any]":
        """Call a function in an idle process, or with no processes in this thread."""
        if self._closed.is_set():
            raise RuntimeError(_CLOSED)
        if self._workers:
            return self._threads.submit(self._on_worker, timeout_s, function, *arguments)
        future: futures.Future[Any] = futures.Future()
        future.set_result(function(*arguments))
        return future

    def _on_worker(self, timeout_s: float, function: Any, *arguments: Any) -> Any:
        worker = self._idle.get()
        try:
            return worker.call(timeout_s, function, *arguments)
        finally:
            self._idle.put(worker)

    def check(self) -> None:
        """Wait until the processes can run the functions, then try the functions on `row`.

        Raises:
            ValueError: a function cannot be imported, needs a column that the data lacks, or fails
                on the row.
            RewardFailure: an import takes too long, or the process died during its start.
            RuntimeError: the pool was closed.
        """
        if self._is_ready:
            return
        error = self._load_error.result() or self._trial_error()
        if error is not None:
            raise ValueError("\n".join(filter(None, error)))
        self._is_ready = True

    def _trial_error(self) -> LoadError | None:
        """Return why a function fails on the trial row; None on success or on a timeout."""
        if self._row is None:
            return None
        arguments = _Call.on_row(self._functions, *self._row).arguments(range(1))
        limit_s = min(TRIAL_S, self._timeout_s * len(self._functions))
        try:
            return self._submit(limit_s, trial_error, self._functions, arguments).result()
        except TimeoutError:
            return None
        except _Crashed:
            text = f"reward function {self.function}: its process died on the first row"
            return LoadError(f"{text}; its output shows the cause", "")

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
                there are processes, all missed the deadline.
            ValueError: the function cannot be loaded, a column has another length, or a result is
                not a list with a number or None per completion.
            RuntimeError: the pool was closed during the call.
        """
        call = _Call(self._functions, prompts, completions, columns, completion_ids)
        self.check()
        pending: dict[futures.Future[Outcome], _Task] = {}

        def send(task: _Task) -> None:
            name, arguments = self._functions[task.function], call.arguments(task.items)
            pending[self._submit(self._timeout_s, score_chunk, name, *arguments)] = task

        try:
            for function in range(len(self._functions)):
                for items in call.parts:
                    send(_Task(function, items))
            while pending:
                done, _ = futures.wait(pending, return_when=futures.FIRST_COMPLETED)
                # In the order of the items, so that the first failure is always the same one.
                for future in [future for future in pending if future in done]:
                    task = pending.pop(future)
                    rewards, reason, text = self._outcome(future, task.function)
                    if not reason:
                        call.accept(task, rewards)
                    elif len(task.items) > 1:
                        for item in task.items:
                            send(_Task(task.function, range(item, item + 1)))
                    else:
                        call.fail(task.function, task.items[0], reason, text)
                        self._note_deadline(task.function, reason, text)
                self._check_failures(call.result(self._names, self._weights))
        finally:
            for future in pending:
                future.cancel()
        return call.result(self._names, self._weights)

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

    def _note_deadline(self, function: int, reason: str, text: str) -> None:
        """Raise RewardFailure if the first items of a function, one per process, all timed out."""
        if reason != "reward_timeout" or self._has_met[function]:
            return
        self._missed[function] += 1
        if self._missed[function] >= max(2, len(self._workers)):  # one item alone may be hard
            raise RewardFailure(
                f"reward function {self._functions[function]} is too slow: each of the first "
                f"{self._missed[function]} items took longer than reward.timeout_s = "
                f"{self._timeout_s} s. Raise --config.reward.timeout_s. First failure:\n{text}"
            )

    def _outcome(
        self, future: "futures.Future[Outcome]", function: int
    ) -> tuple[Sequence[Any], str, str]:
        """Return (rewards, "", "") of a task, or ((), reason, text).

        Raises:
            ValueError: the function can never succeed, or broke its contract.
        """
        name = self._functions[function]
        try:
            outcome = future.result()
        except TimeoutError:
            text = f"{name} took longer than {self._timeout_s} s and was stopped"
            return (), "reward_timeout", text
        except _Crashed as error:
            return (), "reward_crash", f"the process for {name} died: {error}"
        if outcome.unusable:
            raise ValueError(f"reward function {name} {outcome.unusable}")
        self._has_met[function] = True
        return outcome.rewards, "reward_error" if outcome.traceback else "", outcome.traceback

    def on(self, site: Any) -> "RewardPool":
        """Return self: its processes serve all searchers."""
        return self

    def close(self) -> None:
        """Kill all processes, even during a call; a concurrent `score` raises RuntimeError."""
        if self._closed.is_set():
            return
        self._closed.set()
        for worker in self._workers:
            worker.kill()
        if self._workers:
            self._threads.shutdown()
