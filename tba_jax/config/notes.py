# SPDX-License-Identifier: Apache-2.0
"""What a valid config says and the run will not do: settings without effect, schedules cut short.

Schedules count steps, and `--config.num_steps` alone does not move them: a shortened run follows
the beginning of the long one's. It says so instead of guessing what was meant.
"""

from collections.abc import Iterator

from tba_jax.config.schema import Config
from tba_jax.train.config import ObjectiveSettings, OptimizerSettings
from tba_jax.train.objectives.registry import make_objective

# Rounds of a searcher in a step, above which the first step is far away.
_MANY_ROUNDS = 100


def notes(config: Config) -> list[str]:
    """One sentence each, beginning with the setting."""
    return [
        *_sync(config),
        *_rounds(config),
        *_learning_rate(config.optimizer, config.num_steps),
        *_objective(config.objective, config.num_steps),
        *_reference(config),
    ]


def _sync(config: Config) -> Iterator[str]:
    if config.driver == "sync" and config.replay.pace == "trainer":
        yield "replay.pace=trainer has no effect: with driver=sync the trainer never has to wait"


def _rounds(config: Config) -> Iterator[str]:
    prompts, each = config.batch.num_prompts, config.search.prompts_per_round
    rounds = -(-prompts // (each * config.num_searchers))
    if rounds > _MANY_ROUNDS:
        yield (
            f"batch.num_prompts={prompts}: a step takes {rounds:,} rounds of {each} prompts "
            f"(search.prompts_per_round) from each searcher, and the first comes after as many"
        )


def _learning_rate(o: OptimizerSettings, num_steps: int) -> Iterator[str]:
    name = f"optimizer.schedule={o.schedule}"
    warm_end = o.warmup_steps
    decay_start = warm_end + (o.stable_steps if o.schedule == "wsd" else 0)
    if num_steps <= warm_end:
        yield f"{name}: the run ends after {num_steps} of the {warm_end} steps of warm-up"
    elif o.schedule == "wsd" and num_steps <= decay_start:
        yield (
            f"{name}: the run ends at the peak, at step {num_steps}; the decay would begin at step "
            f"{decay_start}"
        )
    elif o.schedule != "constant" and 0 < o.decay_steps > num_steps - decay_start:
        done = num_steps - decay_start
        yield f"{name}: the run ends after {done} of the {o.decay_steps} steps of decay"


def _objective(o: ObjectiveSettings, num_steps: int) -> Iterator[str]:
    if o.beta_schedule == "linear_then_jump" and num_steps <= o.beta_jump_step:
        yield (
            f"objective.beta_schedule={o.beta_schedule}: the run ends before the jump to "
            f"{o.beta_final} at step {o.beta_jump_step}"
        )
    if o.weights == "equal" and make_objective(o).needs_behavior:
        yield (
            f"objective.weights=equal has no effect: objective {o.name} needs responses to count "
            "as often as they were drawn"
        )
    if o.beta and make_objective(o).beta_is == "unused":
        yield f"objective.beta={o.beta} has no effect: objective {o.name} has no KL to a reference"
    beta_steps = o.beta_steps if o.beta_schedule == "linear" else 0
    gamma, gamma_final = o.reference_temperature, o.reference_temperature_final
    for name, start, final, steps in (
        ("beta", o.beta, o.beta_final, beta_steps),
        ("reference_temperature", gamma, gamma_final, o.reference_temperature_steps),
        (
            "reward_temperature",
            o.reward_temperature,
            o.reward_temperature_final,
            o.reward_temperature_steps,
        ),
    ):
        if steps > num_steps and start != final:
            yield (
                f"objective.{name}_steps={steps}: the run ends after {num_steps} of them, at "
                f"{start + (final - start) * num_steps / steps:.4g} on the way from {start} to "
                f"{final}"
            )


def _reference(config: Config) -> Iterator[str]:
    period = config.reference.reset_period
    if period >= config.num_steps:
        yield f"reference.reset_period={period}: the run ends before the first reset"
