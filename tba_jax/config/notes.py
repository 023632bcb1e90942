# SPDX-License-Identifier: Apache-2.0
"""Notes on a valid config: settings without effect, and schedules that are cut short.

Schedules count steps, and `--config.num_steps` alone does not rescale them: a shortened run follows
the beginning of the long run's schedule.
"""

from collections.abc import Iterator

from tba_jax.config.schema import SETTINGS, Config, get_field
from tba_jax.settings import Schedule


def notes(config: Config) -> list[str]:
    """Return one sentence per note, each starting with the setting."""
    return list(_notes(config))


def _notes(config: Config) -> Iterator[str]:
    num_steps, o, period = config.num_steps, config.objective, config.reference.reset_period
    if config.driver == "sync" and config.replay.pace == "trainer":
        yield "replay.pace=trainer has no effect: with driver=sync the trainer never has to wait"
    for name, setting in SETTINGS.items():
        if setting.type is Schedule:
            schedule = get_field(config, name)
            end = _end(schedule, num_steps)
            if num_steps < end:
                yield f"{name}={schedule}: the run ends at step {num_steps}, the schedule at {end}"
    if not o.beta.is_always(0.0) and o.built.needs.beta == "unused":
        yield f"objective.beta={o.beta} has no effect: objective {o.name} has no KL to a reference"
    if period >= num_steps:
        yield f"reference.reset_period={period}: the run ends before the first reset"


def _end(schedule: Schedule, num_steps: int) -> int:
    """Return the step from which a schedule stays at its last value."""
    if schedule.jump is not None:
        return schedule.jump + 1
    if len(set(schedule.numbers)) == 1:
        return schedule.warmup
    return schedule.begin + (schedule.over(num_steps).steps or 0)
