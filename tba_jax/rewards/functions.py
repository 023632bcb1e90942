# SPDX-License-Identifier: Apache-2.0
"""Rewards of a config: functions of users, called as in TRL, and models that grade.

A function is named "package.module:function" or "path/to/file.py:function". It receives, as lists,
those of `prompts`, `completions`, `completion_ids` and the columns of the data that its signature
names, and TRL's `log_metric`. It returns one float or None per completion. A function that exists
only in this process, as in a notebook, is called in a thread: a call that hangs is not stopped.

A call has one whole group (all responses to a prompt) and a deadline. If it fails, each response is
tried alone to find those that fail, and the others are scored together in one more call, whose
deadline is as long as all of them may take. Groups of one response share calls.

Invariants: a failure is never a reward of 0. Results depend on no measured time, except for a
response that misses its deadline. Settings that pass `check_reward` make rewards, unless a function
or model cannot be used. This module imports neither jax nor transformers before a model is made.
"""

import asyncio
import contextlib
import dataclasses
import importlib
import inspect
import itertools
import math
import numbers
import operator
import os
import statistics
import traceback
from collections.abc import Callable, Mapping, Sequence, Set
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tba_jax.rewards.config import DEFAULT_MAX_WORKERS, START_MODEL
from tba_jax.rewards.scores import NONE, Completion, RewardFailure, RewardSource, Score, WeightedSum
from tba_jax.settings import GIVEN, import_file, need
from tba_jax.workers import Handler, Reply, WorkerFailed, WorkerPool, loop_of, most_wait_s

if TYPE_CHECKING:
    from tba_jax.devices.site import Site
    from tba_jax.models.tokenizer import Tokenizer

VICTIM = "victim"
"""The reward that is no function; tasks or `task.reward` select it by name."""
_TRIAL_S = 10.0  # for the trial on one row; the run itself shows whether a function hangs
_CALL_ITEMS = 16  # responses in a call of several prompts that have one response each
_ERROR, _CRASH = "reward_error", "reward_crash"
_FAILED = (_ERROR, _CRASH, "reward_timeout")  # reasons of all responses of a call that failed
_LARGEST = 3.4028234e38  # rewards are float32
_MOST_TEXT = 4000  # characters of a traceback: an exception may carry megabytes
_CHATS = " The completion of a chat is a list of messages: its text is completion[0]['content']"

# --- in the worker -------------------------------------------------------------------------------


def imported(name: str) -> Any:
    """Return the object package.module:NAME or path/to/file.py:NAME, or raise any exception."""
    module, _, own = name.strip().rpartition(":")
    found = import_file(module) if module.endswith(".py") else importlib.import_module(module)
    try:
        return operator.attrgetter(own)(found)
    except AttributeError:  # its message has the name under which the file was imported
        raise AttributeError(f"{module} has no attribute {own!r}") from None


def accepted(function: Callable[..., Any], offered: Mapping[str, Any]) -> dict[str, Any]:
    """Return the arguments among `offered` that a function accepts."""
    parameters = inspect.signature(function).parameters.values()
    if any(p.kind is p.VAR_KEYWORD for p in parameters):
        return dict(offered)
    names = {p.name for p in parameters if p.kind is not p.VAR_POSITIONAL}
    return {name: value for name, value in offered.items() if name in names}


def make_handler(function: str) -> Handler:
    """Return the handler of a reward worker; it imports the function's module now."""
    target, reason = None, ""
    try:
        target = GIVEN[function] if function in GIVEN else imported(function)
        target = target() if isinstance(target, type) else target  # instances are the function
        if not callable(target):
            raise TypeError(f"it is a {type(target).__name__}, not a function")
    except BaseException as error:  # users' code may even call sys.exit()
        reason = (
            f"cannot be loaded: {type(error).__name__}: {error}. Want package.module:function that "
            f"can be imported from {os.getcwd()} or the environment, or path/to/file.py:function\n"
            f"{_report(error)}"
        )

    async def handle(arguments: Mapping[str, Any], _: Reply | None = None) -> list[Score] | str:
        return reason or await call(target, arguments)

    return handle


async def call(function: Any, arguments: Mapping[str, Sequence[Any]]) -> list[Score] | str:
    """Call a function once; return scores, or the reason why no call can succeed.

    Arguments that the function does not accept are left out. The parts are the means of the values
    of `log_metric`.
    """
    n, logged = len(arguments["completions"]), dict[str, list[float]]()

    def log_metric(name: str, value: Any) -> None:
        logged.setdefault(str(name), []).append(float(value))

    try:
        takes_metrics = "log_metric" in inspect.signature(function).parameters
        metrics = {"log_metric": log_metric} if takes_metrics else {}
        result = function(**accepted(function, arguments) | metrics)
        result = await result if inspect.isawaitable(result) else result
        is_list = not isinstance(result, str | bytes | Mapping | Set)
        values = list(result) if is_list else []
    except asyncio.CancelledError:
        raise
    except BaseException as error:  # users' code may even call sys.exit()
        return [Score(None, _ERROR, _report(error))] * n
    if len(values) != n:
        got = f"{len(values)} rewards for {n} completions" if is_list else type(result).__name__
        return f"returned {got}; want a list with a number or None per completion"
    parts = {name: statistics.fmean(values) for name, values in logged.items()}
    try:
        return [_score(value)._replace(parts=parts) for value in values]
    except Exception as error:
        return f"returned {error}, as a reward; want a number"


def _score(value: Any) -> Score:
    """Return the score for a value that a function returned, or raise TypeError."""
    if isinstance(value, Score):
        return value
    reward = as_number(value)
    if reward is None:
        return Score(None, NONE, "the function returned None")
    if not abs(reward) <= _LARGEST:
        return Score(None, "reward_nan", f"the function returned {reward}")
    return Score(reward)


def as_number(value: Any) -> float | None:
    """Return a user's number (inf: too large), bool, numpy scalar or None; else raise TypeError."""
    number = value.item() if hasattr(value, "item") else value  # an array's element
    if number is not None and not issubclass(type(number), numbers.Real):
        raise TypeError(f"{value!r:.80}, a {type(value).__name__}")
    return None if number is None else float("inf" if abs(number) > 1e308 else number)


def _report(error: BaseException) -> str:
    """Return the traceback of the user's frames, shortened."""
    report = traceback.TracebackException.from_exception(error)
    ours = __file__, import_file.__code__.co_filename
    users = [f for f in report.stack if f.filename not in ours and "importlib" not in f.filename]
    report.stack = traceback.StackSummary.from_list(users)
    text, half = "".join(report.format()).rstrip(), _MOST_TEXT // 2
    return text if len(text) <= _MOST_TEXT else f"{text[:half]}\n... (cut) ...\n{text[-half:]}"


# --- in the parent -------------------------------------------------------------------------------


@dataclasses.dataclass(eq=False)
class RewardPool(RewardSource):
    """A reward function in processes, which serve all searchers.

    The constructor does not wait: a process imports and tries the function in the background.
    """

    function: str  # its name; a module may lie in the working directory
    _: dataclasses.KW_ONLY
    timeout_s: float  # seconds that a call may take
    row: tuple[str, Mapping[str, Any]] | None = None  # prompt text and columns for a trial
    num_workers: int = 1  # maximum number of processes; 0: the function is called in this process
    logs: Path | None = None  # folder of the log files; None: the output of this process

    def __post_init__(self) -> None:
        of_pool = ("reward", make_handler, (self.function,))
        self._workers = WorkerPool(*of_pool, num_workers=self.num_workers, logs=self.logs)
        self._here: Any = None if self.num_workers else make_handler(self.function)
        prompt, columns = self.row or ("", {})
        answer = columns.get("answer", columns.get("reference_answer"))
        text = answer if isinstance(answer, str) else ""
        self._offered = _arguments(Completion(prompt, text, columns)) | {"completion_ids": [0]}
        trial = [self._offered], min(_TRIAL_S, self.timeout_s)
        self._trial = self._workers.run(self._call(*trial)) if self.row else None

    def check(self) -> None:
        """Raise ValueError if the function fails on the row, or does not return for very long."""
        limit_s = most_wait_s(self.timeout_s)
        try:
            score = self._trial.result(limit_s)[0] if self._trial else Score(0.0)
        except TimeoutError:  # only a function in this process, which has no deadline
            score = Score(None, _CRASH, f"it has not returned for {limit_s:g} s")
        if score.reason in (_ERROR, _CRASH):
            about_chats = "" if isinstance(self._offered["completions"], str) else _CHATS
            raise ValueError(
                f"reward function {self.function!r} fails on the first row, with its answer as the "
                f"completion: {score.text.splitlines()[-1]}. It may take only "
                f"{', '.join(self._offered)} and log_metric.{about_chats}\n{score.text}"
            )

    async def score(self, completions: Sequence[Completion]) -> list[Score]:
        """Score the responses.

        Raises:
            ValueError: the function cannot be loaded, or broke its contract.
            RewardFailure: a process did not start, or the pool was closed.
        """
        groups = [[*own] for _, own in itertools.groupby(completions, lambda x: x.prompt)]
        if len(groups) == len(completions):  # responses that are alone
            groups = [completions[i : i + _CALL_ITEMS] for i in range(0, len(groups), _CALL_ITEMS)]
        calls = [self._workers.run(self._score_group([*map(_arguments, x)])) for x in groups]
        found = await asyncio.gather(*map(asyncio.wrap_future, calls))
        return list(itertools.chain(*found))  # groups are neighbours

    def close(self) -> None:
        self._workers.close()

    async def _score_group(self, group: Sequence[Mapping[str, Any]]) -> list[Score]:
        """Score responses in one call; if it fails, again without the responses that fail alone."""
        whole = await self._call(group, self.timeout_s)
        if whole[0].reason not in _FAILED or len(group) == 1:
            return whole
        calls = (self._call([each], self.timeout_s) for each in group)
        alone = [score for (score,) in await asyncio.gather(*calls)]
        rest = [x for x, score in zip(group, alone, strict=True) if score.reason not in _FAILED]
        together = iter(await self._call(rest, self.timeout_s * len(rest)) if rest else ())
        return [score if score.reason in _FAILED else next(together) for score in alone]

    async def _call(self, group: Sequence[Mapping[str, Any]], timeout_s: float) -> list[Score]:
        """Call the function once; raise an error if no call can succeed."""
        chosen = {name: [each[name] for each in group] for name in group[0]}
        try:
            if self._here:
                loop = loop_of(f"{self.function} {id(GIVEN.get(self.function))}")  # it may hang
                answer: Any = await asyncio.wrap_future(self._workers.run(self._here(chosen), loop))
            else:
                answer = await self._workers.ask(chosen, timeout_s, "a call")
        except WorkerFailed as error:
            text = f"reward function {self.function}: {error}"
            if (name := f"reward_{error.name}") not in _FAILED:
                raise RewardFailure(text) from None
            answer = [(None, name, text)] * len(group)
        if isinstance(answer, str):
            raise ValueError(f"reward function {self.function!r} {answer}")
        return [Score(*each) for each in answer]


def _arguments(completion: Completion) -> dict[str, Any]:
    """Return the arguments for a response; those of a chat (column `prompt`) are messages.

    As in TRL, a last message of the assistant is the beginning of the completion.
    """
    prompt, text, columns, ids, _ = completion
    found: dict[str, Any] = {"prompts": prompt, "completions": text, **columns}
    if chat := found.pop("prompt", None):
        begun = chat[-1:] if chat[-1]["role"] == "assistant" else []
        text = "".join(message["content"] for message in begun) + text
        found["prompts"] = chat[: len(chat) - len(begun)]
        found["completions"] = [{"role": "assistant", "content": text}]
    return found | ({} if ids is None else {"completion_ids": ids.tolist()})


def _named(settings: Any, own: str) -> str:
    """Return `task.reward`, else the task's own reward, which a reward model replaces."""
    return settings.task.reward or ("" if settings.reward.model_path else own)


def check_reward(settings: Any, own: str, task: str) -> None:
    """Raise ConfigError if no reward is set, or its settings do not fit together.

    Args:
        own: the task's own reward, used if neither `task.reward` nor a reward model is set.
        task: name of the task, for the error message.
    """
    reward = settings.task.reward
    need(
        bool(reward or own or settings.reward.model_path or settings.task.environment),
        "task.reward",
        reward,
        f"task {task} has no reward of its own, and reward.model_path names no reward model",
        "For example --config.task.reward=my_rewards.py:length_reward.",
    )
    need(
        _named(settings, own) != VICTIM or bool(settings.classifier.target),
        "classifier.target",
        settings.classifier.target,
        "task redteam needs a target",
        "Give a label (of an encoder), a verdict (of a guard) or a regular expression.",
    )


def reward_models(settings: Any, own: str) -> Mapping[str, str]:
    """Return role -> folder or hub ID of the models that the reward of a config loads."""
    found = {"reward model": settings.reward.model_path}
    if _named(settings, own) == VICTIM:
        victim = settings.victim.path or START_MODEL
        found |= {"victim": victim, "classifier": settings.classifier.path}
    return {role: path for role, path in found.items() if path}


def make_rewards(
    settings: Any, task: Any, tokenizer: "Tokenizer", site: "Site", logs: Path | None = None
) -> tuple[WeightedSum | None, WeightedSum | None]:
    """Make the rewards of a config, and the judge of its win rate.

    The rewards are None if the environment gives them; the judge is None without eval.gold.

    Args:
        task: the task of the config, with its own reward, and a row to try functions on.
        tokenizer: tokenizer of the responses.
        site: devices of models.
        logs: as in `WorkerPool`.

    Raises:
        ValueError: a reward cannot be used, the judge is missing, or the data of the judge has no
            reference responses.
    """
    gold, named, reward = settings.eval.gold, settings.task.name, settings.reward
    if not gold and task.metric == "win_rate":
        raise ValueError(
            f"task {named} has the metric win rate, which needs a judge; set --config.eval.gold to "
            "a reward model other than the one that trains, or to package.module:function"
        )
    if gold and "answer" not in task.first_row()[1]:
        raise ValueError(
            f"{gold} judges the win rate over reference responses, which are the column `answer` "
            f"of a prompt, and task {named} has no such column; add it to the data, or leave "
            "eval.gold empty"
        )
    trained = _named(settings, task.reward), reward.model_path, settings.task.reward_weights
    judge, made = (settings.eval.gold_reward, settings.eval.gold_model, ()), []
    for names, path, weights in (trained, judge):
        sources: dict[str, RewardSource] = {}
        if names == VICTIM:
            from tba_jax.rewards.reward_models import VictimReward

            parts = settings.victim, settings.classifier
            sources[names] = VictimReward(*parts, seed=settings.seed, site=site)
        elif names:
            sources |= _functions(settings, names, task, logs)
        if path:
            from tba_jax.rewards.reward_models import RewardModel

            missing_eos = math.inf if made else reward.missing_eos  # no penalty of the judge
            options: Any = {"policy_tokenizer": tokenizer, "missing_eos": missing_eos}
            sources["reward_model"] = RewardModel(path, site=site, **options)
        made.append(WeightedSum(sources, weights, reward.max_failure_rate) if sources else None)
    return made[0], made[1]


def try_functions(settings: Any, task: Any) -> None:
    """Load and try the functions of reward and judge of a config, in separate processes."""
    for names in (_named(settings, task.reward), settings.eval.gold_reward):
        if names not in ("", VICTIM):
            with contextlib.closing(WeightedSum(_functions(settings, names, task, None))) as source:
                source.check()


def workers_by_cores() -> int:
    """Return the default number of reward processes: half of the cores; others feed devices."""
    # Only on Linux the cores of this process are known.
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own // 2, DEFAULT_MAX_WORKERS))


def _functions(settings: Any, given: str, task: Any, logs: Path | None) -> dict[str, RewardPool]:
    """Make reward functions, whose names are separated by commas."""
    names, reward = [name.strip() for name in given.split(",")], settings.reward
    options: Any = {"timeout_s": reward.timeout_s, "row": task.first_row(), "logs": logs}
    most = max(1, (reward.num_workers or workers_by_cores()) // len(names))
    options["num_workers"] = most if GIVEN.keys().isdisjoint(names) else 0
    short = [name.rpartition(":")[2] for name in names]
    labels = [part if short.count(part) == 1 else x for part, x in zip(short, names, strict=True)]
    return {x: RewardPool(name, **options) for x, name in zip(labels, names, strict=True)}
