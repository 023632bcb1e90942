# SPDX-License-Identifier: Apache-2.0
"""The whole configuration, in the sections that the rooms declare.

Each room's `config.py` declares its settings by the functions of `settings`. All code receives a
frozen `Config`; `replace` changes fields by their names, as presets and `--config.FIELD=VALUE` do.
This module imports nothing heavy, so user errors are reported before any device is used.
"""

import dataclasses
import difflib
import functools
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from tba_jax.devices.config import FleetSettings, MeshSettings
from tba_jax.devices.placement import PLACEMENTS, PlacementName
from tba_jax.evaluation.config import EvalSettings
from tba_jax.models.config import LoraSettings, ModelSettings
from tba_jax.replay.config import ReplaySettings
from tba_jax.rewards.config import ClassifierSettings, RewardSettings, VictimSettings
from tba_jax.search.config import SearchSettings
from tba_jax.settings import ConfigError as ConfigError
from tba_jax.settings import Schedule, Section, check_all, declared, field, need
from tba_jax.tasks.config import TaskSettings
from tba_jax.train.config import (
    BatchSettings,
    ObjectiveSettings,
    OptimizerSettings,
    ReferenceSettings,
)
from tba_jax.train.objectives import is_objective, own_settings


@dataclass(frozen=True)
class CheckpointSettings(Section):
    """Checkpoints of the run."""

    period: int = field(
        50,
        "steps between checkpoints; 0: only at the end and on a stop",
        at_least=0,
        on_resume=True,
    )


@dataclass(frozen=True)
class LogSettings(Section):
    """Logs of a run, and detection of hangs."""

    tracker: str = field(
        "",
        "also log metrics and responses: trackio:PROJECT, wandb:PROJECT or tensorboard (extras "
        "`trackio`, `wandb`, `tensorboard`)",
        on_resume=True,
    )
    watchdog_s: float = field(
        1800.0,
        "driver=async: seconds without progress after which the run prints all stacks and ends",
        above=0,
        on_resume=True,
    )

    def check(self) -> None:
        kind, _, project = self.tracker.partition(":")
        need(
            self.tracker in ("", "tensorboard") or (kind in ("trackio", "wandb") and project != ""),
            "log.tracker",
            self.tracker,
            "must be trackio:PROJECT, wandb:PROJECT or tensorboard",
            "For example --config.log.tracker=trackio:my_project.",
        )


@dataclass(frozen=True)
class Config:
    """Configuration of a run: top-level settings, and one section of settings for each part."""

    name: str = field("default", "name of the run's folder: FILE/PRESET, set by the preset")
    seed: int = field(0, "root seed of all random numbers of the run", at_least=0)
    driver: Literal["async", "sync"] = field(
        "async", "async: searcher threads concurrent with the trainer; sync: one thread"
    )
    num_steps: int = field(100, "optimiser steps of the run", at_least=1)
    sync_period: int = field(
        1, "k: trainer steps between weight publications and buffer merges", at_least=1
    )
    num_searchers: int = field(
        1,
        "number of searchers on all hosts; placement=fleet: per process; 0: chosen for the "
        "devices, with mesh and placement",
        at_least=0,
        at_most=4096,
    )
    placement: PlacementName = field(
        "auto",
        "where trainer and searchers run: "
        + "; ".join(f"{name}: {meaning}" for name, meaning in PLACEMENTS.items()),
        on_resume=True,
    )
    mesh: MeshSettings = MeshSettings()
    task: TaskSettings = TaskSettings()
    model: ModelSettings = ModelSettings()
    lora: LoraSettings = LoraSettings()
    batch: BatchSettings = BatchSettings()
    objective: ObjectiveSettings = ObjectiveSettings()
    optimizer: OptimizerSettings = OptimizerSettings()
    reference: ReferenceSettings = ReferenceSettings()
    search: SearchSettings = SearchSettings()
    replay: ReplaySettings = ReplaySettings()
    fleet: FleetSettings = FleetSettings()
    reward: RewardSettings = RewardSettings()
    victim: VictimSettings = VictimSettings()
    classifier: ClassifierSettings = ClassifierSettings()
    checkpoint: CheckpointSettings = CheckpointSettings()
    eval: EvalSettings = EvalSettings()
    log: LogSettings = LogSettings()
    chosen: tuple[tuple[str, str], ...] = ()
    """Names of settings whose values the run chose, each with the reason. Not a setting."""

    def sections(self) -> dict[str, Section]:
        """Section name -> section."""
        found = {f.name: getattr(self, f.name) for f in dataclasses.fields(self)}
        return {name: value for name, value in found.items() if isinstance(value, Section)}


SETTINGS = {setting.name: setting for setting in declared(Config)}
# Names of the settings in other libraries.
_USUAL = {
    "optimizer.lr": "optimizer.learning_rate",
    "lr": "optimizer.learning_rate",
    "batch_size": "batch.num_prompts",
    "search.max_tokens": "search.max_new_tokens",
    "search.temperature": "search.sampling_temperature",
    "objective.kl_coef": "objective.beta",
    "model.name": "model.path",
}


def make_config(fields: Mapping[str, Any] | None = None) -> Config:
    """Return the default config with some dotted fields changed; see `replace`."""
    return replace(Config(), fields or {})


def replace(config: Config, fields: Mapping[str, Any]) -> Config:
    """Return a config with some dotted fields changed; not validated.

    Args:
        fields: dotted name -> value or its text. None resets a setting that only some objectives
            have to its default.

    Raises:
        ConfigError: no such field (with the nearest names), or a value of another type.
    """
    sections: dict[str, dict[str, Any]] = {}

    def read(name: str, value: Any) -> None:
        section, _, own = name.rpartition(".")
        if name in SETTINGS:
            value = SETTINGS[name].read(value)
        elif section != "objective":
            near = [_USUAL[name]] if name in _USUAL else []
            near = near or difflib.get_close_matches(name, SETTINGS, n=3, cutoff=0.5)
            near = near or [x for x in SETTINGS if x.endswith(name.split(".")[-1])][:3]
            hint = f"did you mean {' or '.join(near)}?" if near else "--dry_run lists all fields"
            raise ConfigError(f"config has no field {name!r}; {hint}")
        sections.setdefault(section, {})[own] = value

    check_all(*(functools.partial(read, name, value) for name, value in fields.items()))
    changed = sections.pop("", {})
    for name, values in sections.items():
        changed[name] = getattr(config, name).replaced(values)
    return dataclasses.replace(config, **changed)


def get_field(config: Config, field: str) -> Any:
    """Return the value of a dotted field, which may be one of the chosen objective."""
    value: Any = config
    if field.startswith("objective.") and field not in SETTINGS:
        return config.objective.built.value(field.removeprefix("objective."))
    for part in field.split("."):
        value = getattr(value, part)
    return value


def defaults(objective: str) -> dict[str, Any]:
    """Return dotted field name -> default, including the own settings of an objective.

    The keys are those of `flatten`. An unknown objective adds no settings. Loads JAX.
    """
    own = own_settings(objective) if is_objective(objective) else ()
    return {s.name: _as_json(s.default) for s in (*SETTINGS.values(), *own)}


def flatten(config: Config) -> dict[str, Any]:
    """Return dotted field name -> JSON-compatible value, sorted by name. Loads JAX.

    An infinity is the string "inf", and a schedule is a number or a text. The fields include the
    objective's own settings.
    """
    values = {name: get_field(config, name) for name in SETTINGS}
    values |= {f"objective.{name}": x for name, x in config.objective.built.settings}
    return {name: _as_json(values[name]) for name in sorted(values)}


def _as_json(value: Any) -> Any:
    if isinstance(value, Schedule):
        value = value.plain
    return "inf" if value == math.inf else value


def unflatten(values: Mapping[str, Any]) -> Config:
    """Return the config of flat values from `flatten`; not validated.

    Raises:
        ConfigError: see `replace`.
    """
    default = defaults(str(values.get("objective.name")))
    return make_config({n: v for n, v in values.items() if n in SETTINGS or v != default.get(n)})


def difference(old: Mapping[str, Any], new: Mapping[str, Any]) -> list[str]:
    """Return lines "field: old -> new" for changed fields that a resumed run may not change.

    Args:
        old: fields of the run on disk, from `flatten`.
        new: fields of this command, from `flatten`.
    """
    names = [n for n in sorted({*old, *new}) if n not in SETTINGS or not SETTINGS[n].on_resume]
    changes = ((name, old.get(name, "(absent)"), new.get(name, "(absent)")) for name in names)
    return [
        f"{name}: {before!r} -> {after!r}" for name, before, after in changes if before != after
    ]
