# SPDX-License-Identifier: Apache-2.0
"""What an objective asks of the rest of a run: who draws, when, and from what.

It reads a config and touches nothing.
"""

from tba_jax.config.schema import Config, get_field
from tba_jax.devices.placement import MODES
from tba_jax.settings import need


def check_method(config: Config) -> None:
    """Settings of other sections without which the objective would mean another thing."""
    if config.objective.built.needs_soft_value:
        _cached(config)
    _vine(config)


def _cached(config: Config) -> None:
    """Log Z by what version 0 drew: that must be the reference, and draw something first."""
    reference, search = config.reference, config.search
    why = "objective.log_z=cached takes what version 0 drew for draws of the reference"
    for ok, name, rule, remedy in (
        (not reference.reset_period, "reference.reset_period", "it is reset", "0"),
        (not reference.ema_decay, "reference.ema_decay", "it moves", "0"),
        (search.top_p == 1, "search.top_p", "some of its tokens are never drawn", "1"),
        (not config.task.start_path, "task.start_path", "given ones are not", ""),
        (search.initial_fill > 0, "search.initial_fill", "it draws before training then", "1024"),
    ):
        rule = f"{why}, and {rule}"
        need(ok, name, get_field(config, name), rule, f"Set --config.{name}={remedy}.")


def _vine(config: Config) -> None:
    """Values of states by drawing on: by whom, and for whom."""
    mode, search, o = MODES[config.placement], config.search, config.objective
    wants = o.built.needs_advantages
    for ok, name, rule, remedy in (
        (
            (search.vine_tokens > 0) == wants,
            "search.vine_tokens",
            f"objective.name={o.name} {'needs' if wants else 'has no use for'} values of states",
            8 if wants else 0,
        ),
        (
            not wants or not (mode.spans_hosts or mode.searches_elsewhere),
            "placement",
            "values of states are drawn by searchers of the trainer's own process",
            "auto",
        ),
        (
            not wants or not search.stop_strings,
            "search.stop_strings",
            "where a response is drawn on in its middle, a text that began before is not seen",
            "()",
        ),
    ):
        need(ok, name, get_field(config, name), rule, f"Set --config.{name}={remedy}.")
