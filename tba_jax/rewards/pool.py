# SPDX-License-Identifier: Apache-2.0
"""RewardPool: runs a text reward in processes that can be killed, and accounts for every item.

A reward function is user code: it may hang, raise, crash its process or return nonsense. The pool
gives each item a deadline that really ends it, and returns for every item either a finite number or
a named reason why there is none. It does not know tasks, tokenizers or arrays, and its processes
import neither jax nor transformers. Invariant: a failure is never a reward of 0, and a failing
item costs no other item its reward.

How: items travel in chunks, for throughput. A chunk that fails in any way is sent again item by
item, which finds the culprit. Pebble stops a process at its deadline (SIGTERM, SIGKILL 3 s later)
and replaces it; when a process dies without a task pebble gives its whole pool up, and then this
class starts another one and sends again what was under way.
"""

import dataclasses
import functools
import importlib
import math
import multiprocessing
import numbers
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from concurrent.futures.process import BrokenProcessPool
from typing import Any, NamedTuple

import numpy as np
from pebble import ProcessExpired, ProcessPool

from tba_jax.rewards.source import ScoreResult

REASONS = ("reward_timeout", "reward_error", "reward_crash", "reward_nan", "reward_none")

# Starting a process and importing the reward's module: seconds, generous for a loaded machine.
START_TIMEOUT_S = 60.0
# A first chunk is small because the function's speed is not known; later chunks are sized to take
# this share of the deadline, so that a chunk does not reach it by being long.
FIRST_CHUNK_ITEMS = 16
CHUNK_DEADLINE_SHARE = 0.1
CHUNKS_PER_WORKER = 2
# How often a waiting thread looks whether the pool still lives.
POLL_S = 0.2
# Times a task is sent again because the pool around it broke; after that the task is to blame.
MAX_RESENDS = 3


class RewardFailure(RuntimeError):
    """More items of a round failed than `max_failure_rate` allows."""


class _Outcome(NamedTuple):
    """What a process sends back; `malformed` says how the function broke its contract."""

    rewards: list[float | None]
    traceback: str
    malformed: str
    seconds: float


# --- in the reward process ---------------------------------------------------------------------


def _attempt(call: Callable[..., Any], *args: Any) -> tuple[Any, str]:
    """The call's value, or the traceback of what it raised as text.

    Text, because an exception of a user's class may not survive the way back to the parent.
    """
    try:
        return call(*args), ""
    except BaseException as error:  # a boundary: user code, even sys.exit(); carried, not swallowed
        # Without the frames of this module and of the import system: the user's are the news.
        report = traceback.TracebackException.from_exception(error)
        users = [
            f for f in report.stack if f.filename != __file__ and "importlib" not in f.filename
        ]
        report.stack = traceback.StackSummary.from_list(users)
        return None, "".join(report.format() if users else report.format_exception_only())


@functools.cache
def _load(function: str) -> Callable[..., Any]:
    module_name, _, name = function.partition(":")
    target = functools.reduce(getattr, name.split("."), importlib.import_module(module_name))
    if not callable(target):
        raise TypeError(f"{function} is a {type(target).__name__}, not a function")
    return target


def _start_process(function: str, folder: str, parent: int) -> None:
    """Make a new process ready: its import is over before the clock of its first task starts."""

    def exit_with_parent() -> None:
        # A parent that was killed cannot stop a process that hangs in user code.
        while os.getppid() == parent:
            time.sleep(1.0)
        os._exit(1)

    threading.Thread(target=exit_with_parent, name="exit-with-parent", daemon=True).start()
    if folder not in sys.path:
        sys.path.append(folder)  # last: a user's file must not hide a module of the library
    _attempt(_load, function)  # a failure is reported by the first task, which tries again


def _load_error(function: str) -> str:
    """Empty when the function can be used."""
    return _attempt(_load, function)[1]


def _score_chunk(
    function: str, prompts: list[str], completions: list[str], columns: dict[str, list[Any]]
) -> _Outcome:
    start = time.perf_counter()

    def outcome(
        rewards: Sequence[float | None] = (), error: str = "", malformed: str = ""
    ) -> _Outcome:
        return _Outcome(list(rewards), error, malformed, time.perf_counter() - start)

    def call() -> list[Any]:
        return list(_load(function)(prompts=prompts, completions=completions, **columns))

    values, error = _attempt(call)
    if error:
        return outcome(error=error)
    if len(values) != len(completions):
        return outcome(malformed=f"{len(values)} rewards for {len(completions)} completions")
    for value in values:
        if value is not None and not isinstance(value, numbers.Real):
            return outcome(malformed=f"{value!r:.80}, a {type(value).__name__}, as a reward")
    return outcome([None if value is None else float(value) for value in values])


# --- in the parent -----------------------------------------------------------------------------


class _Task(NamedTuple):
    """Items under way together, in which pool, since when."""

    items: range
    resends: int
    pool: ProcessPool
    sent_s: float


@dataclasses.dataclass
class _Call:
    """The items of one `score` call and what is known about them so far."""

    prompts: Sequence[str]
    completions: Sequence[str]
    columns: Mapping[str, Sequence[Any]]

    def __post_init__(self) -> None:
        n = len(self.completions)
        for name, column in {"prompts": self.prompts, **self.columns}.items():
            if len(column) != n:
                raise ValueError(f"{name} holds {len(column)} values for {n} completions")
        self.rewards: list[float | None] = [None] * n
        self.reasons: list[str | None] = [None] * n
        self.first_traceback = ""

    def arguments(self, items: range) -> tuple[list[str], list[str], dict[str, list[Any]]]:
        return (
            [self.prompts[i] for i in items],
            [self.completions[i] for i in items],
            {name: [column[i] for i in items] for name, column in self.columns.items()},
        )

    def accept(self, items: range, rewards: Sequence[float | None]) -> None:
        for item, reward in zip(items, rewards, strict=True):
            if reward is None:
                self.fail(item, "reward_none", "the function returned None")
            elif not math.isfinite(reward):
                self.fail(item, "reward_nan", f"the function returned {reward}")
            else:
                self.rewards[item] = reward

    def fail(self, item: int, reason: str, text: str) -> None:
        self.reasons[item] = reason
        self.first_traceback = self.first_traceback or (
            f"{text}\nprompt: {self.prompts[item]!r:.500}\n"
            f"completion: {self.completions[item]!r:.500}"
        )

    def counts(self) -> dict[str, int]:
        return {reason: self.reasons.count(reason) for reason in REASONS if reason in self.reasons}


class RewardPool:
    """Processes that score responses with one reward function; safe to share between threads.

    Starting takes no time here: the processes import the function in the background, and `check`
    or the first `score` waits for them.

    Args:
        function: "package.module:function" with TRL's signature, `f(prompts, completions,
            **columns) -> list[float | None]`. The module may lie in the working directory.
        num_workers: processes.
        timeout_s: seconds an item may take. The deadline is looked at every 0.1 s, and a process
            stuck in C code needs another 3 s to be killed. A process that ends itself with status
            0 in the middle of an item looks like one that hangs.
        max_failure_rate: share of one call's items that may fail before `score` raises.
    """

    def __init__(
        self, function: str, *, num_workers: int, timeout_s: float, max_failure_rate: float
    ) -> None:
        module_name, _, name = function.partition(":")
        if not module_name or not name:
            raise ValueError(
                f"reward function {function!r}: want package.module:function, "
                "for example tba_jax.rewards.numeric:gsm8k_reward"
            )
        self.function = function
        self._num_workers = num_workers
        self._timeout_s = timeout_s
        self._max_failure_rate = max_failure_rate
        self._lock = threading.Lock()
        self._closed = False
        self._ready = False
        self._item_s: float | None = None  # measured seconds per item
        self._progress_s = 0.0  # when a task of any thread last ended
        self._pool = self._new_pool()
        self._warm_up = self._pool.schedule(_load_error, args=(function,))

    def _new_pool(self) -> ProcessPool:
        return ProcessPool(
            max_workers=self._num_workers,
            initializer=_start_process,
            initargs=(self.function, os.getcwd(), os.getpid()),
            context=multiprocessing.get_context("spawn"),
        )

    def check(self, timeout_s: float = START_TIMEOUT_S) -> None:
        """Wait until the processes can run the function.

        Raises:
            ValueError: the function cannot be imported; with the traceback.
            TimeoutError: its import takes longer than `timeout_s`.
            RuntimeError: the process died while it was starting, or the pool was closed.
        """
        if self._ready:
            return
        try:
            error = self._warm_up.result(timeout=timeout_s)
        except futures.CancelledError:
            raise RuntimeError(f"the reward pool of {self.function} was closed") from None
        except futures.TimeoutError:
            raise TimeoutError(
                f"reward function {self.function}: its module was not imported within "
                f"{timeout_s:.0f} s; move slow work from its top level into the function"
            ) from None
        except BrokenProcessPool:
            raise RuntimeError(
                f"the process for reward function {self.function} died while it was starting; see "
                'standard error (a script that starts one needs `if __name__ == "__main__":`)'
            ) from None
        if error:
            *where, reason = error.rstrip().splitlines()
            raise ValueError(
                f"reward function {self.function!r} cannot be loaded: {reason}. Want "
                f"package.module:function importable from {os.getcwd()} or the environment"
                + (f"\n{error.rstrip()}" if where else "")
            )
        self._ready = True

    def score(
        self,
        prompts: Sequence[str],
        completions: Sequence[str],
        columns: Mapping[str, Sequence[Any]],
        *,
        completion_ids: Sequence[np.ndarray] = (),
        has_eos: Sequence[bool] = (),
    ) -> ScoreResult:
        """Score the responses; every item comes back with a reward or with a reason.

        Args:
            prompts: prompt texts.
            completions: response texts, one per prompt.
            columns: the function's keyword arguments, each with one value per prompt.
            completion_ids, has_eos: as for every RewardSource; a text reward does not see them.

        Raises:
            RewardFailure: more than `max_failure_rate` of the items failed; with the first
                traceback. Raised as soon as that is certain.
            ValueError: the function cannot be loaded, columns of other lengths, or a result that
                is not a list of numbers or None, one per completion.
            RuntimeError: the pool was closed meanwhile.
        """
        call = _Call(prompts, completions, columns)
        self.check()
        n = len(completions)
        size = self._chunk_items(n)
        pending: dict[futures.Future[_Outcome], _Task] = {}
        try:
            for start in range(0, n, size):
                self._send(call, range(start, min(n, start + size)), pending)
            while pending:
                self._collect(call, pending)
                num_failed = n - call.reasons.count(None)
                if num_failed > self._max_failure_rate * n:
                    raise RewardFailure(
                        f"reward function {self.function} failed on {num_failed} of {n} items "
                        f"{call.counts()}, above reward.max_failure_rate = "
                        f"{self._max_failure_rate}. First failure:\n{call.first_traceback}"
                    )
        finally:
            for future in pending:
                future.cancel()
        return ScoreResult(call.rewards, call.reasons, call.first_traceback)

    def _chunk_items(self, n: int) -> int:
        share = -(-n // (self._num_workers * CHUNKS_PER_WORKER))
        if self._item_s is None:
            return max(1, min(share, FIRST_CHUNK_ITEMS))
        fits = int(CHUNK_DEADLINE_SHARE * self._timeout_s / max(self._item_s, 1e-9))
        return max(1, min(share, fits))

    def _send(
        self,
        call: _Call,
        items: range,
        pending: "dict[futures.Future[_Outcome], _Task]",
        resends: int = 0,
    ) -> None:
        with self._lock:
            if self._closed:
                raise RuntimeError(f"the reward pool of {self.function} was closed")
            if not self._pool.active:
                self._dispose(self._pool)
                self._pool = self._new_pool()
            future = self._pool.schedule(
                _score_chunk,
                args=(self.function, *call.arguments(items)),
                timeout=self._timeout_s,
            )
            pending[future] = _Task(items, resends, self._pool, time.monotonic())

    def _collect(self, call: _Call, pending: "dict[futures.Future[_Outcome], _Task]") -> None:
        """Wait a moment for tasks to end; note what they brought or send their items again."""
        ended, _ = futures.wait(pending, timeout=POLL_S, return_when=futures.FIRST_COMPLETED)
        if ended:
            self._progress_s = time.monotonic()
        else:
            ended = {future for future, task in pending.items() if self._is_lost(task)}
        for future in ended:
            task = pending.pop(future)
            outcome, reason, text = self._outcome(future)
            if outcome is not None:
                call.accept(task.items, outcome.rewards)
            elif reason == "resend" and task.resends < MAX_RESENDS:
                self._send(call, task.items, pending, task.resends + 1)
            elif len(task.items) > 1:
                for item in task.items:
                    self._send(call, range(item, item + 1), pending)
            else:
                call.fail(task.items[0], "reward_crash" if reason == "resend" else reason, text)

    def _outcome(self, future: "futures.Future[_Outcome]") -> tuple[_Outcome | None, str, str]:
        """(outcome, reason, text) of a task; the reason "resend" blames the pool, not the items.

        Raises:
            ValueError: the function broke its contract.
        """
        if not future.done():
            return None, "resend", f"the processes for {self.function} keep dying"
        error = future.exception(timeout=0)
        if isinstance(error, BrokenProcessPool):
            return None, "resend", f"the processes for {self.function} keep dying"
        if isinstance(error, futures.TimeoutError):
            text = f"{self.function} took longer than {self._timeout_s} s and was stopped"
            return None, "reward_timeout", text
        if isinstance(error, ProcessExpired):
            return None, "reward_crash", f"the process for {self.function} died: {error}"
        outcome = future.result(timeout=0)  # raises anything else: unpicklable arguments, ...
        if outcome.malformed:
            raise ValueError(
                f"reward function {self.function} returned {outcome.malformed}; want a list with "
                "one float or None per completion"
            )
        if outcome.traceback:
            return None, "reward_error", outcome.traceback
        item_s = outcome.seconds / len(outcome.rewards)
        self._item_s = item_s if self._item_s is None else 0.5 * self._item_s + 0.5 * item_s
        return outcome, "", ""

    def _is_lost(self, task: _Task) -> bool:
        """Whether a task will never end: its pool was given up, or stands still.

        A process killed from outside in the middle of a message takes pebble's lock with it; then
        no task of any thread ends although deadlines pass, and the pool has to go.
        """
        if not task.pool.active:
            return True
        stalled_s = time.monotonic() - max(self._progress_s, task.sent_s)
        if stalled_s < self._timeout_s + START_TIMEOUT_S:
            return False
        with self._lock:
            if self._pool is task.pool:
                self._dispose(task.pool)  # the next `_send` starts another one
        return True

    def _dispose(self, pool: ProcessPool, timeout_s: float = 10.0) -> bool:
        """Stop a pool's processes, whatever they are doing; whether they went in time."""
        pool.stop()
        thread = threading.Thread(
            target=pool.join, args=(timeout_s,), name="reward-pool-stop", daemon=True
        )
        thread.start()
        thread.join(timeout_s)
        return not thread.is_alive()

    def close(self, timeout_s: float = 10.0) -> None:
        """Stop the processes, whatever they are doing. A `score` under way raises RuntimeError.

        Raises:
            TimeoutError: they are not gone within `timeout_s`.
        """
        with self._lock:
            if self._closed:
                return
            self._closed = True
            self._warm_up.cancel()
            if not self._dispose(self._pool, timeout_s):
                raise TimeoutError(
                    f"the processes of reward function {self.function} did not stop within "
                    f"{timeout_s:.0f} s"
                )
