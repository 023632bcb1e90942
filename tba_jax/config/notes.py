# SPDX-License-Identifier: Apache-2.0
"""Notes on a valid config: settings without effect, and schedules that are cut short.

Schedules count steps, and `--config.num_steps` alone does not rescale them: a shortened run follows
the beginning of the long run's schedule.
"""

from collections.abc import Iterator

from tba_jax.config.schema import SETTINGS, Config, get_field
from tba_jax.settings import Schedule
from tba_jax.train.config import ObjectiveSettings


def notes(config: Config) -> list[str]:
    """Return one sentence per note, each starting with the setting."""
    return [
        *_sync(config),
        *_schedules(config),
        *_objective(config.objective),
        *_reference(config),
    ]


def _sync(config: Config) -> Iterator[str]:
    if config.driver == "sync" and config.replay.pace == "trainer":
        yield "replay.pace=trainer has no effect: with driver=sync the trainer never has to wait"


def _schedules(config: Config) -> Iterator[str]:
    for name, setting in SETTINGS.items():
        if setting.type is Schedule:
            yield from _schedule(name, get_field(config, name), config.num_steps)


def _schedule(name: str, schedule: Schedule, num_steps: int) -> Iterator[str]:
    """Yield a note on a schedule that ends after the run."""
    value, begin = f"{name}={schedule}", schedule.begin
    steps = schedule.over(num_steps).steps or 0
    if num_steps <= schedule.warmup:
        yield f"{value}: the run ends after {num_steps} of the {schedule.warmup} steps of warm-up"
    elif schedule.jump is not None:
        if num_steps <= schedule.jump:
            yield (
                f"{value}: the run ends before the jump to {schedule.final:g} at step "
                f"{schedule.jump}"
            )
    elif schedule.shape != "constant" and num_steps <= begin:
        yield (
            f"{value}: the run ends at step {num_steps}, still at {schedule.start:g}; the schedule "
            f"changes the value only from step {begin} on"
        )
    elif steps > num_steps - begin and len(set(schedule.numbers)) > 1:
        yield (
            f"{value}: the run ends after {num_steps - begin} of the {steps} steps from "
            f"{schedule.start:g} to {schedule.final:g}"
        )


def _objective(o: ObjectiveSettings) -> Iterator[str]:
    if not o.beta.is_always(0.0) and o.built.needs.beta == "unused":
        yield f"objective.beta={o.beta} has no effect: objective {o.name} has no KL to a reference"


def _reference(config: Config) -> Iterator[str]:
    period = config.reference.reset_period
    if period >= config.num_steps:
        yield f"reference.reset_period={period}: the run ends before the first reset"
