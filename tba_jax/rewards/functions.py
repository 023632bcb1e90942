# SPDX-License-Identifier: Apache-2.0
"""Reward functions of users, called as TRL calls them, in worker processes.

A function is named "package.module:function" or "path/to/file.py:function". It receives, as lists,
those of `prompts`, `completions`, `completion_ids` and the columns of the data that its signature
names, and TRL's `log_metric`. It returns one float or None per completion. A function that exists
only in this process, as in a notebook, is called in a thread: a call that hangs is not stopped.

A call has one whole group (all responses to a prompt) and a deadline. If it fails, each response is
tried alone to find those that fail, and the others are scored together in one more call, whose
deadline is as long as all of them may take. Responses that are alone share calls.

Invariants: a failure is never a reward of 0. Results depend on no measured time, except for a
response that misses its deadline. This module imports neither jax nor transformers.
"""

import asyncio
import contextlib
import dataclasses
import functools
import importlib
import inspect
import itertools
import numbers
import operator
import os
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from tba_jax.rewards.scores import NONE, Completions, RewardFailure, RewardSource, Score
from tba_jax.settings import GIVEN, import_file
from tba_jax.workers import Handler, WorkerFailed, WorkerPool, start_loop

TRIAL_S = 10.0
"""Seconds for the trial on one row; the run itself shows whether a function hangs."""
_CALL_ITEMS = 16  # responses in a call of several prompts that have one response each
_ERROR, _CRASH = "reward_error", "reward_crash"
_FAILED = (_ERROR, _CRASH, "reward_timeout")  # reasons of all responses of a call that failed
_LARGEST = 3.4028234e38  # rewards are float32
_MOST_TEXT = 4000  # characters of a traceback: an exception may carry megabytes
# Arguments of TRL that are not passed, and what to do instead.
_HINTS = {
    "environments": "Objects of environments are in other processes. Give the class a method "
    "get_reward(): its value is added to the rewards of task.reward",
    "trainer_state": "Reward processes do not see the trainer. Leave the argument out",
    "log_extra": "No table of completions is logged. Leave the argument out, or use log_metric",
}
_CHATS = (
    "Prompts are chats, so a completion is a list of messages, as in TRL: its text is "
    "completion[0]['content']"
)

Row = tuple[str, Mapping[str, Any]]
"""Prompt text and columns of one row of the data, for a trial of a function."""
Arguments = Mapping[str, Any]
"""Arguments for one response; the function receives lists of them."""

# --- in the worker -------------------------------------------------------------------------------


def imported(name: str) -> Any:
    """Return the object package.module:NAME or path/to/file.py:NAME, or raise any exception."""
    module, _, own = name.strip().rpartition(":")
    found = import_file(module) if module.endswith(".py") else importlib.import_module(module)
    return operator.attrgetter(own)(found)


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments among `offered` that a function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    names = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    return {name: value for name, value in offered.items() if name in names}


class _Unusable(Exception):
    """No call can succeed: the function cannot be loaded, or its result breaks the contract."""


@functools.cache
def _load(function: str) -> Callable[..., Any]:
    try:
        found = GIVEN[function] if function in GIVEN else imported(function)
        found = found() if isinstance(found, type) else found  # its instances are the function
        if not callable(found):
            raise TypeError(f"it is a {type(found).__name__}, not a function")
        return found
    except BaseException as error:  # users' code may even call sys.exit()
        raise _Unusable(
            f"cannot be loaded: {type(error).__name__}: {error}. Want package.module:function that "
            f"can be imported from {os.getcwd()} or the environment, or path/to/file.py:function\n"
            f"{_report(error)}"
        ) from None


def make_handler(function: str) -> Handler:
    """Return the handler of a reward worker; it imports the function's module now."""
    with contextlib.suppress(_Unusable):
        _load(function)
    return lambda arguments, _: call(function, arguments)


async def call(function: str, arguments: Mapping[str, Sequence[Any]]) -> list[Score] | str:
    """Call a function once; return scores, or the reason why no call can succeed.

    Arguments that the function does not accept are left out. The parts are the means of the values
    of `log_metric`.
    """
    n, logged = len(arguments["completions"]), dict[str, list[float]]()

    def log_metric(name: str, value: Any) -> None:
        logged.setdefault(str(name), []).append(float(value))

    try:
        target, chosen = _load(function), dict[str, Any](arguments)
        if "log_metric" in inspect.signature(target).parameters:
            chosen["log_metric"] = log_metric
        result = target(**accepted(target, chosen))
        result = await result if inspect.isawaitable(result) else result
        got = type(result).__name__
        if not isinstance(result, str | bytes | Mapping | set | frozenset):
            scores = [_score(value) for value in result]
            if len(scores) == n:
                means = {name: statistics.fmean(values) for name, values in logged.items()}
                return [score._replace(parts=means) for score in scores]
            got = f"{len(scores)} rewards for {n} completions"
        return f"returned {got}; want a list with a number or None per completion"
    except asyncio.CancelledError:
        raise
    except _Unusable as error:
        return str(error)
    except BaseException as error:  # users' code may even call sys.exit()
        return [Score(None, _ERROR, _report(error))] * n


def _score(value: Any) -> Score:
    """Return the score for a value that a function returned."""
    if isinstance(value, Score):
        return value
    try:
        reward = as_number(value)
    except TypeError as error:
        raise _Unusable(f"returned {value!r:.80}, {error}, as a reward; want a number") from None
    if reward is None:
        return Score(None, NONE, "the function returned None")
    if not abs(reward) <= _LARGEST:
        return Score(None, "reward_nan", f"the function returned {reward}")
    return Score(reward)


def as_number(value: Any) -> float | None:
    """Return a user's number, boolean, numpy scalar or None as a float; others are TypeErrors."""
    number = value.item() if hasattr(value, "item") else value  # an array's element
    if number is not None and not isinstance(number, numbers.Real):
        raise TypeError(f"a {type(value).__name__}")
    return None if number is None else float(number)


def _report(error: BaseException) -> str:
    """Return the traceback of the user's frames, shortened."""
    report = traceback.TracebackException.from_exception(error)
    users = [f for f in report.stack if f.filename != __file__ and "importlib" not in f.filename]
    report.stack = traceback.StackSummary.from_list(users)
    text, half = "".join(report.format()).rstrip(), _MOST_TEXT // 2
    return text if len(text) <= _MOST_TEXT else f"{text[:half]}\n... (cut) ...\n{text[-half:]}"


# --- in the parent -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class RewardPool(RewardSource):
    """A reward function in processes, which serve all searchers.

    Starting takes no time here: a process imports the function and tries it in the background.

    Attributes:
        function: its name. A module may lie in the working directory.
        timeout_s: seconds that a call may take.
        row: on which `check` tries the function, with the row's answer as the completion; None: no
            trial.
        num_workers: maximum number of processes; 0: the function is called in this process.
        logs: folder of the log files; None: the processes write to the output of this process.
    """

    function: str
    _: dataclasses.KW_ONLY
    timeout_s: float
    row: Row | None = None
    num_workers: int = 1
    logs: Path | None = None

    def __post_init__(self) -> None:
        options: Any = {"num_workers": self.num_workers, "logs": self.logs}
        self._workers = WorkerPool("reward", make_handler, (self.function,), **options)
        self._local = None if self.num_workers else start_loop("rewards")
        _load.cache_clear()  # a notebook may define another function of the same name
        prompt, columns = self.row or ("", {})
        answer = columns.get("answer", columns.get("reference_answer"))
        texts = [answer if isinstance(answer, str) else ""]
        listed = {name: [value] for name, value in columns.items()}
        (offered,) = _arguments(Completions([prompt], texts, listed))
        self._offered, limit_s = offered | {"completion_ids": [0]}, min(TRIAL_S, self.timeout_s)
        self._trial = self.row and self._workers.run(self._call([self._offered], limit_s))

    def check(self) -> None:
        """Wait until a worker has tried the function on the row; a late trial does not fail."""
        score = self._trial.result()[0] if self._trial else Score(0.0)
        if score.reason not in (_ERROR, _CRASH):
            return
        report = score.text.partition("\nprompt: ")[0]
        reason = report.splitlines()[-1]
        hints = [text for name, text in _HINTS.items() if f"'{name}'" in reason]
        hints += [] if isinstance(self._offered["completions"], str) else [_CHATS]
        raise ValueError(
            f"reward function {self.function!r} fails on the first row, with its answer as the "
            f"completion: {reason}. It may take {', '.join(self._offered)} and log_metric. "
            f"{' '.join(hints)}\n{report}"
        )

    async def score(self, completions: Completions) -> list[Score]:
        """Score the responses.

        Raises:
            ValueError: the function cannot be loaded, or broke its contract; or a column has
                another length.
            RewardFailure: a process did not start, or the pool was closed.
        """
        pairs = zip(completions.prompts, _arguments(completions), strict=True)
        groups = [[x for _, x in own] for _, own in itertools.groupby(pairs, lambda pair: pair[0])]
        if all(len(group) == 1 for group in groups):
            alone = [x for (x,) in groups]
            groups = [alone[i : i + _CALL_ITEMS] for i in range(0, len(alone), _CALL_ITEMS)]
        found = await asyncio.gather(*map(self._score_group, groups))
        return list(itertools.chain(*found))  # groups are neighbours

    def close(self) -> None:
        self._workers.close()
        if self._local is not None and not self._local.is_closed():
            self._local.call_soon_threadsafe(self._local.stop)

    async def _score_group(self, group: Sequence[Arguments]) -> list[Score]:
        """Score responses together; if the call fails, without those that fail alone."""
        whole = await self._call(group, self.timeout_s)
        if whole[0].reason not in _FAILED or len(group) == 1:
            return whole
        calls = (self._call([each], self.timeout_s) for each in group)
        alone = [score for (score,) in await asyncio.gather(*calls)]
        rest = [x for x, score in zip(group, alone, strict=True) if score.reason not in _FAILED]
        limit_s = self.timeout_s * len(rest)
        together = iter(await self._call(rest, limit_s) if rest else ())
        return [score if score.reason in _FAILED else next(together) for score in alone]

    async def _call(self, group: Sequence[Arguments], timeout_s: float) -> list[Score]:
        """Call the function once; raise an error if no call can succeed."""
        chosen = {name: [each[name] for each in group] for name in group[0]}
        if self._local is None:
            future = self._workers.call(chosen, timeout_s, "a call")
        else:
            future = self._workers.run(call(self.function, chosen), self._local)
        try:
            answer: Any = await asyncio.wrap_future(future)
        except WorkerFailed as error:
            text = f"reward function {self.function}: {error}"
            if (name := f"reward_{error.name}") not in _FAILED:
                raise RewardFailure(text) from None
            answer = [Score(None, name, text)] * len(group)
        if isinstance(answer, str):
            raise ValueError(f"reward function {self.function!r} {answer}")
        scores = [Score(*each) for each in answer]
        for i, own in enumerate(group):
            if scores[i].reason:
                shown = f"prompt: {own['prompts']!r:.500}\ncompletion: {own['completions']!r:.500}"
                scores[i] = scores[i]._replace(text=f"{scores[i].text}\n{shown}")
        return scores


def _arguments(completions: Completions) -> list[dict[str, Any]]:
    """Return the arguments for each response; those of chats (column `prompt`) are messages.

    As in TRL, a last message of the assistant is the beginning of the completion.
    """
    prompts, texts, columns, ids, _ = completions
    found: dict[str, Sequence[Any]] = {"prompts": prompts, "completions": texts}
    if chats := columns.get("prompt"):
        begun = [m[-1:] if m[-1]["role"] == "assistant" else [] for m in chats]
        found["prompts"] = [m[: len(m) - len(b)] for m, b in zip(chats, begun, strict=True)]
        whole = ["".join(m["content"] for m in b) + x for b, x in zip(begun, texts, strict=True)]
        found["completions"] = [[{"role": "assistant", "content": text}] for text in whole]
    if len(ids):
        found["completion_ids"] = [x.tolist() for x in ids]
    found |= {name: column for name, column in columns.items() if name != "prompt"}
    for name, column in found.items():
        if len(column) != len(texts):
            raise ValueError(f"{name} holds {len(column)} values for {len(texts)} completions")
    return [dict(zip(found, row, strict=True)) for row in zip(*found.values(), strict=True)]
