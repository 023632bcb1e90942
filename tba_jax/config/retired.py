# SPDX-License-Identifier: Apache-2.0
"""Settings that were renamed or removed, and the conversion of configs saved with them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tba_jax.config.schema import defaults
from tba_jax.settings import Schedule
from tba_jax.train.config import ObjectiveSettings
from tba_jax.train.objectives.registry import is_objective, own_settings


class Retired(NamedTuple):
    """A setting that no longer exists.

    Attributes:
        neutral: value in runs that did not use it.
        advice: its replacement, or why it was removed.
        changes_results: whether values other than `neutral` changed the results of a run.
    """

    neutral: Any
    advice: str
    changes_results: bool = True


_BETA = 'Write --config.objective.beta="linear(START, FINAL, STEPS)"'
_TEMPERATURE = 'Write --config.objective.{}_temperature="linear(START, FINAL, STEPS)".'
_RATE = 'Write --config.optimizer.learning_rate="{}".'

_PASS_RATE = (
    "unused. Set --config.replay.equal_rewards=redraw to draw again a group whose "
    "rewards are all equal"
)

# Settings that `_converted` reads in a saved config, with their replacements.
_CONVERTED: Mapping[str, str] = {
    "objective.beta_schedule": f"{_BETA}; a number is a constant.",
    "objective.beta_final": f"{_BETA}.",
    "objective.beta_steps": f"{_BETA}.",
    "objective.beta_jump_step": _BETA.replace("STEPS", "STEPS, jump=STEP") + ".",
    "objective.reference_temperature_final": _TEMPERATURE.format("reference"),
    "objective.reference_temperature_steps": _TEMPERATURE.format("reference"),
    "objective.reward_temperature_final": _TEMPERATURE.format("reward"),
    "objective.reward_temperature_steps": _TEMPERATURE.format("reward"),
    "objective.linex_alpha": "The asymmetry of objective.shape=linex is 1. Leave the setting out.",
    "optimizer.schedule": _RATE.format("cosine(PEAK, 0)")
    + " The kinds are linear and cosine; a number is a constant.",
    "optimizer.warmup_steps": _RATE.format("linear(PEAK, 0, warmup=STEPS)"),
    "optimizer.stable_steps": _RATE.format("cosine(PEAK, 0, STEPS, warmup=STEPS, hold=STEPS)"),
    "optimizer.decay_steps": _RATE.format("linear(PEAK, 0, STEPS)"),
    **dict.fromkeys(("victim.dtype", "classifier.dtype"), "Set --config.reward.dtype=bfloat16"),
    "classifier.batch_rows": "Set --config.reward.batch_size=64",
    **dict.fromkeys(
        (f"search.explore_{name}" for name in ("share", "min_temperature", "max_temperature")),
        'Write --config.search.explore="SHARE,LOW,HIGH"',
    ),
    "search.vine_tokens": "Its name is objective.vine_tokens; it needs objective.name=vineppo",
    "search.vine_samples": "Its name is objective.vine_samples; it needs objective.name=vineppo",
    "xla.preset": "Set --config.xla.options=overlap",
}

_HEARTBEAT = "Set --config.remote.heartbeat_s=30"
_OF_NO_RESULT: Mapping[str, str] = {
    "pod.heartbeat_s": _HEARTBEAT,
    "fleet.silence_s": _HEARTBEAT,
    "fleet.trainer_silence_s": f"{_HEARTBEAT}; the trainer's timeout is ten times this value",
    "fleet.max_failures": "five failures of a process without progress end the run",
    "sync.keep": "the newest two published versions are kept",
    "log.period": "metrics.jsonl has a line for every step",
    "eval.num_report_samples": "the report has eight responses of an evaluation",
    "victim.num_slots": "a victim decodes 256 responses at a time",
}

RETIRED: Mapping[str, Retired] = {
    "replay.fresh_window": Retired(
        1, "Set --config.replay.max_staleness=N to keep unused responses of older merges fresh"
    ),
    "replay.evict": Retired("oldest", "the oldest policy version is always evicted first"),
    "replay.similarity": Retired(
        0.0,
        "unused. replay.deduplicate=True, the default, unites equal responses of one merge",
    ),
    "replay.max_age": Retired(
        0,
        "Set --config.replay.max_staleness=N and --config.replay.late=drop to drop unused "
        "responses, or lower --config.replay.capacity_per_prompt to keep fewer old ones",
    ),
    "replay.pass_rate_low": Retired(0.0, _PASS_RATE),
    "replay.pass_rate_high": Retired(1.0, _PASS_RATE),
    "replay.pass_rate_low_final": Retired(0.0, _PASS_RATE),
    "replay.pass_rate_high_final": Retired(1.0, _PASS_RATE),
    "replay.pass_rate_steps": Retired(0, _PASS_RATE),
    "search.ownership": Retired("auto", "it follows from placement and task"),
    "optimizer.b1": Retired(0.9, "it is 0.9"),
    "optimizer.eps": Retired(1e-8, "it is 1e-8"),
    "optimizer.max_nonfinite_steps": Retired(3, "three such steps in a row end the run"),
    **{name: Retired(None, advice) for name, advice in _CONVERTED.items()},
    **{
        name: Retired(None, advice, changes_results=False) for name, advice in _OF_NO_RESULT.items()
    },
}
"""Retired settings by name."""


def upgrade(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved flat config with the current settings.

    A missing setting gets its default: it did not exist when the run began. A retired setting is
    dropped if it changes no result or has its neutral value. Any other unknown setting stays, for
    the caller to report.

    Loads JAX.
    """
    found = _joined(_converted(saved))
    kept = {
        name: value
        for name, value in found.items()
        if name not in RETIRED or (RETIRED[name].changes_results and value != RETIRED[name].neutral)
    }
    name = str(found.get("objective.name", ObjectiveSettings().name))
    return {**defaults(name), **kept}


# Settings that all objectives shared and that now belong to some; 0 meant the default.
_ZERO_WAS_OWN = ("objective.clip_low", "objective.clip_high", "objective.importance_cap")


def _converted(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config with one value per schedule, without settings of other objectives."""
    found = dict(saved)
    if "objective.beta_schedule" not in found:
        return found
    found["objective.beta"] = _beta(found)
    for name in ("reference", "reward"):
        found[f"objective.{name}_temperature"] = _temperature(found, name)
    found["optimizer.learning_rate"] = _learning_rate(found)
    if found.get("objective.shape") != "linex" or found.get("objective.linex_alpha") == 1:
        found.pop("objective.linex_alpha", None)
    name = found.get("objective.name")
    own = {s.name for s in own_settings(str(name))} if is_objective(str(name)) else set()
    for name in _WERE_SHARED - own:
        found.pop(name, None)  # the objective does not use it
    for name in _ZERO_WAS_OWN:
        if not found.get(name, 1):
            del found[name]
    return found


def _joined(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved config after the conversion of settings that were merged or moved."""
    found = dict(saved)
    if "search.explore_share" in found:
        names = ("share", "min_temperature", "max_temperature")
        values = [found.pop(f"search.explore_{name}") for name in names]
        found["search.explore"] = values if values[0] else []
    if "search.vine_tokens" in found:
        for name in ("vine_tokens", "vine_samples"):
            value = found.pop(f"search.{name}")
            if found.get("objective.name") == "vineppo":
                found[f"objective.{name}"] = value
    if "xla.preset" in found:
        parts = (found.pop("xla.preset").replace("none", ""), found["xla.options"])
        found["xla.options"] = ",".join(filter(None, parts))
    if "victim.dtype" in found:
        dtypes = (found.pop("victim.dtype"), found.pop("classifier.dtype"))
        rows = found.pop("classifier.batch_rows")
        if found.get("task.name") == "redteam":
            found["reward.dtype"] = dtypes[0]
            found["reward.batch_size"] = rows
            if dtypes[1] != dtypes[0]:
                found["classifier.dtype"] = dtypes[1]  # one setting cannot hold both
    return found


def _beta(found: dict[str, Any]) -> float | str:
    shape, start = found.pop("objective.beta_schedule"), found["objective.beta"]
    final, steps = found.pop("objective.beta_final"), found.pop("objective.beta_steps")
    jump = found.pop("objective.beta_jump_step")
    if shape == "constant":
        return start
    jump = jump if shape == "linear_then_jump" else None
    return Schedule(start, final, steps, "linear", jump=jump).plain


def _temperature(found: dict[str, Any], name: str) -> float | str:
    start = found[f"objective.{name}_temperature"]
    final = found.pop(f"objective.{name}_temperature_final")
    steps = found.pop(f"objective.{name}_temperature_steps")
    return Schedule(start, final, steps, "linear").plain if steps else start


def _learning_rate(found: dict[str, Any]) -> float | str:
    peak, kind = found["optimizer.learning_rate"], found.pop("optimizer.schedule")
    warmup, hold, steps = (
        found.pop(f"optimizer.{name}_steps") for name in ("warmup", "stable", "decay")
    )
    if kind == "constant":
        return Schedule(peak, warmup=warmup).plain
    is_wsd = kind == "wsd"
    return Schedule(
        peak,
        0.0,
        steps or None,
        "linear" if kind == "linear" else "cosine",
        warmup=warmup,
        hold=hold if is_wsd else 0,
    ).plain


# Settings that every config had, whatever its objective.
_WERE_SHARED = {
    f"objective.{name}"
    for name in (
        "anchor baseline_shift clip_high clip_low ema_decay epochs gae_lambda importance "
        "importance_cap importance_floor kl_center kl_clamp length_normalise log_z log_z_layers "
        "log_z_rate minibatches reward_transform scale shape value_temperature"
    ).split()
}
