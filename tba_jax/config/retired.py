# SPDX-License-Identifier: Apache-2.0
"""Settings that were renamed or removed, and configs that were saved with them."""

from collections.abc import Mapping
from typing import Any, NamedTuple

from tba_jax.config.schema import SETTINGS, Config, flatten


class Retired(NamedTuple):
    """A setting that exists no more.

    Attributes:
        neutral: its value in runs that did not use it.
        advice: what to set in its place, or why it was removed.
    """

    neutral: Any
    advice: str


RETIRED: Mapping[str, Retired] = {}
"""By the former name of the setting."""


def upgrade(saved: Mapping[str, Any]) -> dict[str, Any]:
    """Return a saved flat config with today's settings.

    A setting that the config lacks gets its default: it did not exist when the run began. A
    retired setting at its neutral value is dropped. Any other unknown setting stays, for the caller
    to name.

    Args:
        saved: setting name -> value, as config.json has it.
    """
    kept = {
        name: value
        for name, value in saved.items()
        if not (name in RETIRED and name not in SETTINGS and value == RETIRED[name].neutral)
    }
    return {**flatten(Config()), **kept}
