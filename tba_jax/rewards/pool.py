# SPDX-License-Identifier: Apache-2.0
"""RewardPool: runs text rewards in processes that can be killed, and accounts for every item.

A reward function is user code: it may hang, raise, crash its process or return an invalid value.
The pool gives each item a deadline, kills a process that exceeds it, and returns for every item
either a finite number or a named reason. Several functions share the processes; their weighted sum
is the reward, and an item on which a function fails has no reward. The processes import neither jax
nor transformers. Invariant: a failure is never a reward of 0, and a failing item does not change
the rewards of other items.

Items are sent in chunks, for throughput. The items of a failed chunk are sent again one by one, to
find the item that fails. Pebble stops a process at its deadline (SIGTERM, then SIGKILL 3 s later)
and replaces it. If a process without a task dies, pebble stops its whole pool; `RewardPool` then
starts a new pool and sends the unfinished tasks again.
"""

import math
import multiprocessing
import os
import threading
import time
from collections.abc import Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessPool

from tba_jax.rewards import containment, output
from tba_jax.rewards.functions import (
    LoadError,
    Missing,
    Outcome,
    load_error,
    part_names,
    preload,
    score_chunk,
    split_functions,
    trial_error,
    weighted_sum,
)
from tba_jax.rewards.processes import enter_process
from tba_jax.rewards.source import ScoreResult

# Seconds for the start of a process and the import of the reward's module, also on a busy machine.
START_TIMEOUT_S = 60.0
# Seconds for the trial on one row before training; the run itself shows whether a function hangs.
TRIAL_S = 10.0
# A first chunk is small because the function's speed is not known. Later chunks have a size that
# takes this share of the deadline, so that a long chunk does not exceed the deadline.
FIRST_CHUNK_ITEMS = 16
CHUNK_DEADLINE_SHARE = 0.1
CHUNKS_PER_WORKER = 2
# Least seconds of work in one message. All processes read one pipe, a message at a time, so single
# items of a fast function would wait for the pipe.
CHUNK_S = 0.01
# Seconds between two checks of a waiting thread whether the pool still runs.
POLL_S = 0.2
# Number of times that a task is sent again after its pool broke; then the task itself has failed.
MAX_RESENDS = 3
_LARGEST = float(np.finfo(np.float32).max)  # rewards are float32
_MOST_TEXT = 4000  # characters of a traceback: an exception may carry megabytes


class RewardFailure(RuntimeError):
    """Reward functions cannot start, cannot stop, or fail too often; the message has the cause."""


# --- in the reward process ---------------------------------------------------------------------


def _start_process(
    functions: Sequence[str], folder: str, parent: int, groups: str, max_memory_bytes: int
) -> None:
    """Prepare a new process: import the functions before the deadline of the first task runs."""
    enter_process(folder, parent, groups, max_memory_bytes)
    preload(functions)


# --- in the parent -----------------------------------------------------------------------------


class _Task(NamedTuple):
    """Items that one process scores together: function, pool and start time."""

    function: int
    items: range
    resends: int
    pool: ProcessPool
    sent_s: float


class Call:
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
        self.values: list[list[float | None]] = [[None] * n for _ in functions]
        self.reasons: list[list[str | None]] = [[None] * n for _ in functions]
        self.first_traceback = ""

    @classmethod
    def on_row(cls, functions: Sequence[str], prompt: str, columns: Mapping[str, Any]) -> "Call":
        """Return a trial call: one row of the data, with its reference answer as the response."""
        answer = columns.get("answer", columns.get("reference_answer"))
        completion = answer if isinstance(answer, str) else ""
        listed = {name: [value] for name, value in columns.items()}
        return cls(functions, [prompt], [completion], listed, [np.zeros(1, np.int32)])

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

    def accept(
        self, function: int, items: range, rewards: Sequence[float | Missing | None]
    ) -> None:
        for item, reward in zip(items, rewards, strict=True):
            if isinstance(reward, Missing):
                self.fail(function, item, *reward)
            elif reward is None:
                self.fail(function, item, "reward_none", "the function returned None")
            elif not abs(reward) <= _LARGEST:
                self.fail(function, item, "reward_nan", f"the function returned {reward}")
            else:
                self.values[function][item] = reward

    def fail(self, function: int, item: int, reason: str, text: str) -> None:
        self.reasons[function][item] = reason
        text = text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ... (cut)"
        self.first_traceback = self.first_traceback or (
            f"{text}\nprompt: {self._prompts[item]!r:.500}\n"
            f"completion: {self._completions[item]!r:.500}"
        )

    def failures(self) -> list[str | None]:
        """Return the failure of each item; None for an item with a reward from every function."""
        if len(self.reasons) == 1:
            return self.reasons[0]
        failures: list[str | None] = []
        for reasons in zip(*self.reasons, strict=True):
            hard = [r for r in reasons if r not in (None, "reward_none")]
            failures.append(hard[0] if hard else None if None in reasons else "reward_none")
        return failures

    def result(self, names: Sequence[str], weights: Sequence[float]) -> ScoreResult:
        reasons = self.failures()
        rewards = [
            weighted_sum(values, weights) if reason is None else None
            for reason, values in zip(reasons, zip(*self.values, strict=True), strict=True)
        ]
        parts: dict[str, list[float]] = {}
        if len(names) > 1:
            for name, values in zip(names, self.values, strict=True):
                parts[name] = [math.nan if v is None else v for v in values]
        # A function that does not apply to some items needs no traceback.
        traceback = self.first_traceback if any(reasons) else ""
        return ScoreResult(rewards, reasons, traceback, parts)


class RewardPool:
    """Processes that score responses with reward functions; safe to share between threads.

    Starting takes no time here: the processes import the functions in the background, and `check`
    or the first `score` waits for them.

    Args:
        function: "package.module:function" or "path/to/file.py:function" with TRL's signature,
            `f(prompts, completions, **columns) -> list[float | None]`; or several with commas
            between them, whose weighted sum is the reward. A module may lie in the working
            directory.
        num_workers: processes; each can run every function.
        weights: weight of each function; empty: 1 each.
        row: prompt text and columns of one row of the data, on which `check` tries the functions
            with the row's answer as the completion; None: no trial.
        timeout_s: seconds that an item may take. The deadline is checked every 0.1 s, and a
            process in C code is killed 3 s later. A process that ends itself with status 0 during
            an item looks like a process that hangs.
        max_failure_rate: share of one call's items that may fail before `score` raises.
        max_memory_bytes: memory limit of each process; 0: no limit.
        is_part: whether another source adds its rewards; items to which no function applies are
            then no failures.
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
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._max_failure_rate = max_failure_rate
        self._harmless = (None, "reward_none") if is_part else (None,)
        self._lock = threading.Lock()
        self._closed = False
        self._ready = False
        # Measured seconds per item of each function.
        self._item_s: list[float | None] = [None] * len(self._functions)
        self._progress_s = 0.0  # last time at which a task of any thread ended
        # Number of single items that missed the deadline before any item met it.
        self._missed = [0] * len(self._functions)
        self._groups = containment.Groups()
        self._output = output.Output(self._groups.folder)
        self._max_memory_bytes = max_memory_bytes
        self._pool = self._new_pool()
        self._row = row
        columns = None if row is None else tuple(row[1])
        self._warm_up = self._pool.schedule(load_error, args=(self._functions, columns))

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=_start_process,
            initargs=(
                self._functions,
                os.getcwd(),
                os.getpid(),
                self._groups.folder,
                self._max_memory_bytes,
            ),
            context=multiprocessing.get_context("spawn"),
        )

    def check(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the processes can run the functions, then try the functions on `row`.

        Raises:
            ValueError: a function cannot be imported, needs a column that the data lacks, or fails
                on the row.
            RewardFailure: an import takes longer than `timeout_s`, or the process died during its
                start.
            RuntimeError: the pool was closed.
        """
        if self._ready:
            return
        try:
            error = self._warm_up.result(timeout=timeout_s)
        except futures.CancelledError:
            raise RuntimeError(f"the reward pool of {self.function} was closed") from None
        except futures.TimeoutError:
            raise RewardFailure(
                f"reward function {self.function}: its module was not imported within "
                f"{timeout_s:.0f} s. Move slow work from the module's top level into the function"
            ) from None
        except BrokenProcessPool:
            raise RewardFailure(
                f"the process for reward function {self.function} died while it was starting; see "
                'standard error (a script that starts one needs `if __name__ == "__main__":`)'
            ) from None
        error = error or self._trial_error()
        if error is not None:
            raise ValueError("\n".join(filter(None, error)))
        self._ready = True

    def _trial_error(self) -> LoadError | None:
        """Return why a function fails on the trial row; None on success or on a timeout."""
        if self._row is None:
            return None
        call = Call.on_row(self._functions, *self._row).arguments(range(1))
        limit_s = min(TRIAL_S, self._timeout_s * len(self._functions))
        future = self._pool.schedule(trial_error, args=(self._functions, call), timeout=limit_s)
        try:
            return future.result()
        except futures.TimeoutError:
            return None
        except (BrokenProcessPool, ProcessExpired):
            return LoadError(
                f"reward function {self.function}: its process died on the first row; see "
                "standard error",
                "",
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
        call = Call(self._functions, prompts, completions, columns, completion_ids)
        self.check()
        n = len(completions)
        pending: dict[futures.Future[Outcome], _Task] = {}
        try:
            for function in range(len(self._functions)):
                size = self._chunk_items(function, n)
                for start in range(0, n, size):
                    self._send(call, function, range(start, min(n, start + size)), pending)
            while pending:
                self._collect(call, pending)
                failures = call.failures()
                num_failed = n - sum(map(failures.count, self._harmless))
                if num_failed > self._max_failure_rate * n:
                    counts = {r: failures.count(r) for r in dict.fromkeys(failures) if r}
                    raise RewardFailure(
                        f"reward function {self.function} failed on {num_failed} of {n} items "
                        f"{counts}, above reward.max_failure_rate = "
                        f"{self._max_failure_rate}. First failure:\n{call.first_traceback}"
                    )
        finally:
            for future in pending:
                future.cancel()
        return call.result(self._names, self._weights)

    def _chunk_items(self, function: int, n: int) -> int:
        share = -(-n // (self._num_workers * CHUNKS_PER_WORKER))
        item_s = self._item_s[function]
        if item_s is None:
            return max(1, min(share, FIRST_CHUNK_ITEMS))
        item_s = max(item_s, 1e-9)
        worth, fits = CHUNK_S / item_s, CHUNK_DEADLINE_SHARE * self._timeout_s / item_s
        return max(1, min(n, max(share, int(worth)), int(fits)))

    def _send(
        self,
        call: Call,
        function: int,
        items: range,
        pending: "dict[futures.Future[Outcome], _Task]",
        resends: int = 0,
    ) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the reward pool of {self.function} was closed")
            if not self._pool.active:
                self._dispose(self._pool)
                self._pool = self._new_pool()
            future = self._pool.schedule(
                score_chunk,
                args=(self._functions[function], *call.arguments(items)),
                timeout=self._timeout_s,
            )
            pending[future] = _Task(function, items, resends, self._pool, time.monotonic())

    def _collect(self, call: Call, pending: "dict[futures.Future[Outcome], _Task]") -> None:
        """Wait at most POLL_S for tasks to end; record their results, or send items again."""
        ended, _ = futures.wait(pending, timeout=POLL_S, return_when=futures.FIRST_COMPLETED)
        self._groups.sweep()
        if ended:
            self._progress_s = time.monotonic()
        else:
            ended = {future for future, task in pending.items() if self._is_lost(task)}
        for future in ended:
            task = pending.pop(future)
            outcome, reason, text = self._outcome(future, task.function)
            if outcome is not None:
                call.accept(task.function, task.items, outcome.rewards)
            elif reason == "resend" and task.resends < MAX_RESENDS:
                self._send(call, task.function, task.items, pending, task.resends + 1)
            elif len(task.items) > 1:
                for item in task.items:
                    self._send(call, task.function, range(item, item + 1), pending)
            else:
                reason = "reward_crash" if reason == "resend" else reason
                call.fail(task.function, task.items[0], reason, text)
                self._note_deadline(call, task.function, reason)

    def _note_deadline(self, call: Call, function: int, reason: str) -> None:
        """Raise RewardFailure if the first items of a function, one per process, all timed out."""
        if reason != "reward_timeout" or self._item_s[function] is not None:
            return
        self._missed[function] += 1
        if self._missed[function] >= max(2, self._num_workers):  # one item alone may be hard
            raise RewardFailure(
                f"reward function {self._functions[function]} is too slow: each of the first "
                f"{self._missed[function]} items took longer than reward.timeout_s = "
                f"{self._timeout_s} s. Raise --config.reward.timeout_s. First failure:\n"
                f"{call.first_traceback}"
            )

    def _outcome(
        self, future: "futures.Future[Outcome]", function: int
    ) -> tuple[Outcome | None, str, str]:
        """Return (outcome, reason, text) of a task; reason "resend" means that the pool failed.

        Raises:
            ValueError: the function can never succeed, or broke its contract.
        """
        name = self._functions[function]
        if not future.done():
            return None, "resend", f"the processes for {name} keep dying"
        error = future.exception(timeout=0)
        if isinstance(error, BrokenProcessPool):
            return None, "resend", f"the processes for {name} keep dying"
        if isinstance(error, futures.TimeoutError):
            text = f"{name} took longer than {self._timeout_s} s and was stopped"
            return None, "reward_timeout", text
        if isinstance(error, ProcessExpired):
            return None, "reward_crash", f"the process for {name} died: {error}"
        outcome = future.result(timeout=0)  # raises anything else: unpicklable arguments, ...
        if outcome.unusable:
            raise ValueError(f"reward function {name} {outcome.unusable}")
        if outcome.traceback:
            return None, "reward_error", outcome.traceback
        item_s, before = outcome.seconds / len(outcome.rewards), self._item_s[function]
        self._item_s[function] = item_s if before is None else 0.5 * before + 0.5 * item_s
        return outcome, "", ""

    def _is_lost(self, task: _Task) -> bool:
        """Return whether a task will never end, because its pool was stopped or is deadlocked.

        If a process is killed while it sends a message, pebble's lock is never released. Then no
        task of any thread ends, deadlines have no effect, and the pool must be replaced.
        """
        if not task.pool.active:
            return True
        stalled_s = time.monotonic() - max(self._progress_s, task.sent_s)
        if stalled_s < self._timeout_s + START_TIMEOUT_S:
            return False
        with self._lock:
            if self._pool is task.pool:
                self._dispose(task.pool)  # the next `_send` starts another pool
        return True

    def _dispose(self, pool: ProcessPool, timeout_s: float = 10.0) -> bool:
        """Kill a pool's processes; return whether they ended in time."""
        pool.stop()
        thread = threading.Thread(
            target=pool.join, args=(timeout_s,), name="reward-pool-stop", daemon=True
        )
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()

    def on(self, site: Any) -> "RewardPool":
        """Return self: its processes serve all searchers."""
        return self

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop all processes, even during a call; a concurrent `score` raises RuntimeError.

        Raises:
            RewardFailure: the processes have not ended within `timeout_s`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._warm_up.cancel()
            is_gone = self._dispose(self._pool, timeout_s)
            self._groups.close()
            self._output.close()
            if not is_gone:
                raise RewardFailure(
                    f"the processes of reward function {self.function} did not stop within "
                    f"{timeout_s:.0f} s. Look for processes that wait for storage (state D in ps)"
                )
