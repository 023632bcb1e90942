# SPDX-License-Identifier: Apache-2.0
"""Kinds of rewards: the constructor, checks and models of each kind.

To add a learned reward, write its source in a file of this folder, its settings in `config`, and
its record here, under the name that tasks and `task.reward` use. This module imports no jax before
a source is made. Invariant: settings that pass `check` make a source, unless its models cannot be
used.
"""

import math
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from tba_jax.rewards.config import DEFAULT_MAX_WORKERS, MAX_MEMORY_BYTES
from tba_jax.rewards.functions import part_names, split_functions
from tba_jax.settings import GIVEN, need

if TYPE_CHECKING:
    from tba_jax.devices.site import Site
    from tba_jax.models.tokenizer import Tokenizer
    from tba_jax.rewards.source import RewardSource, ScoreResult

START_MODEL = "embedded:start_model"


class Use(NamedTuple):
    """Arguments for making a reward source, besides the settings.

    Attributes:
        functions: names of text functions, as in `task.reward`, or the name of another kind of
            reward.
        weights: weight of each function, then of the reward model if there is one; empty: 1 each.
        row: prompt text and columns of one row of the data, for a trial of the functions.
        tokenizer: tokenizer of the responses.
        sites: devices of the searchers, for models.
        is_part: whether the rewards are added to those of another source. A response to which no
            function applies is then no failure.
        logs: folder of the log files of reward processes; None: their output is that of this
            process.
    """

    functions: str
    weights: Sequence[float]
    row: tuple[str, Mapping[str, Any]]
    tokenizer: "Tokenizer"
    sites: "Sequence[Site]"
    is_part: bool = False
    logs: Path | None = None


class RewardKind(NamedTuple):
    """A kind of reward; `settings` is the config of the run.

    Attributes:
        make: (settings, use) -> source, or None for rewards of an environment. Raises ValueError if
            the source cannot be used.
        check: settings -> None; checks rules across sections. Raises ConfigError.
        models: settings -> {role: folder or hub ID} of the models that the kind loads.
    """

    make: "Callable[[Any, Use], RewardSource | None]"
    check: Callable[[Any], None] = lambda settings: None
    models: Callable[[Any], Mapping[str, str]] = lambda settings: {}


def kind_of(settings: Any, named: str, own: str, task: str) -> RewardKind:
    """Return the kind of reward of a config: functions or a named kind, plus a reward model.

    Args:
        settings: config of the run.
        named: `task.reward`: names of text functions, the name of a kind, or "".
        own: the task's own reward, used if neither `named` nor a reward model is set. If it is
            also empty, an environment gives the rewards.
        task: name of the task, for the error message.

    Raises:
        ConfigError: no reward is set.
    """
    if settings.reward.model_path:
        return _plus_model(KINDS.get(named, FUNCTIONS)) if named else REWARD_MODEL
    if settings.task.environment and not (named or own):
        return ENVIRONMENT
    need(
        bool(named or own),
        "task.reward",
        named,
        f"task {task} has no reward of its own, and reward.model_path names no reward model",
        "For example --config.task.reward=my_rewards.py:length_reward.",
    )
    return KINDS.get(named or own, FUNCTIONS)


class _Sum(NamedTuple):
    """The weighted sum of reward sources."""

    names: Sequence[str]
    sources: "Sequence[RewardSource]"
    weights: Sequence[float]

    def check(self) -> None:
        for source in self.sources:
            source.check()

    def score(self, *responses: Any, **options: Any) -> "ScoreResult":
        from tba_jax.rewards.source import summed

        results = [source.score(*responses, **options) for source in self.sources]
        return summed(self.names, results, self.weights)

    def on(self, site: "Site") -> "_Sum":
        return self._replace(sources=[source.on(site) for source in self.sources])

    def close(self) -> None:
        for source in self.sources:
            source.close()


def _plus_model(kind: RewardKind) -> RewardKind:
    """Return the kind for the weighted sum of a source and a reward model."""

    def make(settings: Any, use: Use) -> "RewardSource":
        names = part_names(split_functions(use.functions)) if kind is FUNCTIONS else ()
        *own, of_model = use.weights or [1.0] * (max(1, len(names)) + 1)
        # A process pool computes the sum of several functions itself, and names their parts.
        is_sum = len(names) > 1
        first = kind.make(settings, use._replace(weights=own if is_sum else (), is_part=True))
        model = REWARD_MODEL.make(settings, use)
        assert first is not None and model is not None
        name = "" if is_sum else names[0] if names else use.functions
        of = "reward_model" if "reward_model" not in names else "reward.model_path"
        return _Sum((name, of), (first, model), (1.0 if is_sum else own[0], of_model))

    return RewardKind(make, kind.check, lambda s: {**kind.models(s), **REWARD_MODEL.models(s)})


def workers_by_cores() -> int:
    """Return the default number of reward processes: half of the cores, within limits.

    The other cores serve the threads that feed devices: an idle device costs more than a late
    reward.
    """
    # Only on Linux the cores of this process are known.
    own = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, min(own // 2, DEFAULT_MAX_WORKERS))


def _make_functions(settings: Any, use: Use) -> "RewardSource":
    from tba_jax.rewards.pool import RewardPool

    is_importable = GIVEN.keys().isdisjoint(split_functions(use.functions))
    return RewardPool(
        use.functions,
        num_workers=(settings.reward.num_workers or workers_by_cores()) if is_importable else 0,
        timeout_s=settings.reward.timeout_s,
        max_failure_rate=settings.reward.max_failure_rate,
        max_memory_bytes=MAX_MEMORY_BYTES,
        weights=use.weights,
        row=use.row,
        is_part=use.is_part,
        logs=use.logs,
    )


def _make_reward_model(settings: Any, use: Use) -> "RewardSource":
    from tba_jax.rewards.reward_models import RewardModel, judge_dtype

    reward = settings.reward
    return RewardModel.load(
        reward.model_path,
        site=use.sites[0],
        param_dtype=judge_dtype(use.sites[0]),
        policy_tokenizer=use.tokenizer,
        missing_eos=None if reward.missing_eos == math.inf else reward.missing_eos,
    )


def _make_victim(settings: Any, use: Use) -> "RewardSource":
    from tba_jax.rewards.classifiers import make_classifier
    from tba_jax.rewards.reward_models import judge_dtype
    from tba_jax.rewards.victim import LIMITS, START_MODEL_LIMITS, Victim, VictimReward

    devices = [site.mesh.devices.flat[0] for site in use.sites]
    path, template = _victim_path(settings), settings.victim.template
    dtype = judge_dtype(use.sites[0])
    limits = START_MODEL_LIMITS if path == START_MODEL else LIMITS
    victim = Victim(path, template, limits, dtype=dtype, devices=devices)
    judges = {x: make_classifier(settings.classifier, dtype, x) for x in dict.fromkeys(devices)}
    return VictimReward(victim, judges, replicas=devices, seed=settings.seed)


def _check_victim(settings: Any) -> None:
    need(
        bool(settings.classifier.target),
        "classifier.target",
        settings.classifier.target,
        "task redteam needs a target",
        "Give a label (of an encoder), a verdict (of a guard) or a regular expression.",
    )


def _victim_path(settings: Any) -> str:
    return settings.victim.path or START_MODEL


def _victim_models(settings: Any) -> Mapping[str, str]:
    path = settings.classifier.path
    judge = {"classifier": path} if path else {}
    return {"victim": _victim_path(settings), **judge}


# The environment gives the rewards.
ENVIRONMENT = RewardKind(lambda settings, use: None)
FUNCTIONS = RewardKind(_make_functions)
REWARD_MODEL = RewardKind(
    _make_reward_model, models=lambda settings: {"reward model": settings.reward.model_path}
)
KINDS = {"victim": RewardKind(_make_victim, _check_victim, _victim_models)}
"""Kinds that tasks or `task.reward` select by name."""
