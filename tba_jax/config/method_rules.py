# SPDX-License-Identifier: Apache-2.0
"""Rules that an objective imposes on other sections: reference, sampling and searchers."""

from tba_jax.config.schema import Config, get_field
from tba_jax.devices.placement import MODES
from tba_jax.settings import need


def check_method(config: Config) -> None:
    """Refuse settings of other sections that would change the meaning of the objective."""
    if config.objective.built.vine_tokens:
        _vine(config)


def _vine(config: Config) -> None:
    """Refuse settings that prevent estimating state values from sampled continuations."""
    mode, search = MODES[config.placement], config.search
    for ok, name, rule, remedy in (
        (
            not (mode.spans_hosts or mode.has_remote_searchers),
            "placement",
            "state values need searchers in the trainer's process",
            "auto",
        ),
        (
            not search.stop_strings,
            "search.stop_strings",
            "a continuation starts within a response and would not match a text that began before",
            "()",
        ),
    ):
        need(ok, name, get_field(config, name), rule, f"Set --config.{name}={remedy}.")
