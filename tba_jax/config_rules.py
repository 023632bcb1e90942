# SPDX-License-Identifier: Apache-2.0
"""Rules of validation that concern one part of the system, and the error that all rules raise.

`config.validate` calls them. A rule reads a config and touches nothing. Invariant: a message names
the field, its value, the rule and the remedy, in one line.
"""

from typing import Any


class ConfigError(ValueError):
    """A configuration that cannot run; the message says field, value, rule and remedy."""


def need(ok: bool, field: str, value: Any, rule: str, remedy: str) -> None:
    """Raise unless `ok`.

    Raises:
        ConfigError: "config.FIELD = VALUE: RULE. REMEDY".
    """
    if not ok:
        raise ConfigError(f"config.{field} = {value!r}: {rule}. {remedy}")


def target(config: Any) -> None:
    """The temperatures of the target, learned log Z, and the temperatures of exploration.

    Raises:
        ConfigError: see `need`.
    """
    for name in ("reference_temperature", "reward_temperature"):
        final = config.objective[f"{name}_final"]
        need(
            config.objective[f"{name}_steps"] > 0 or final == config.objective[name],
            f"objective.{name}_final",
            final,
            "a temperature that is constant does not move",
            f"Set --config.objective.{name}_steps to the number of steps.",
        )
    need(
        config.objective.log_z == "vargrad" or config.objective.name == "tb",
        "objective.log_z",
        config.objective.log_z,
        "only Trajectory Balance has a log Z to learn",
        "Set --config.objective.name=tb or --config.objective.log_z=vargrad.",
    )
    need(
        config.search.explore_max_temperature >= config.search.explore_min_temperature,
        "search.explore_max_temperature",
        config.search.explore_max_temperature,
        f"is below search.explore_min_temperature = {config.search.explore_min_temperature}",
        "Raise it.",
    )


def red_team(config: Any) -> None:
    """The sections `victim` and `classifier` of task redteam.

    Raises:
        ConfigError: see `need`.
    """
    need(
        config.search.ownership == "any",
        "search.ownership",
        config.search.ownership,
        "task redteam has a single prompt, which every searcher must draw",
        "Set --config.search.ownership=any.",
    )
    template = config.victim.template
    need(
        template == "chat" or template.count("{attack}") == 1,
        "victim.template",
        template,
        "must hold {attack} once, where the attack goes",
        "Set --config.victim.template=chat for the victim's own chat template.",
    )
    kind = config.classifier.kind
    need(
        bool(config.classifier.target),
        "classifier.target",
        config.classifier.target,
        f"classifier.kind={kind} needs to know what counts as a success",
        "Name a label (encoder), a verdict (guard) or a regular expression (pattern).",
    )
    need(
        kind == "pattern" or bool(config.classifier.path),
        "classifier.path",
        config.classifier.path,
        f"classifier.kind={kind} needs a model",
        "Give a Hugging Face folder or hub id.",
    )
