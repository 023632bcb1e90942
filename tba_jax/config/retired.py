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


_PASS_RATE = (
    "no result needed it. Set --config.replay.equal_rewards=redraw to draw again a group whose "
    "rewards are all equal"
)

RETIRED: Mapping[str, Retired] = {
    "replay.fresh_window": Retired(
        1, "Set --config.replay.max_staleness=N to keep unused responses of older merges fresh"
    ),
    "replay.evict": Retired("oldest", "the oldest policy version is always evicted first"),
    "replay.similarity": Retired(
        0.0,
        "no result needed it. replay.deduplicate=True, the default, unites equal responses of one "
        "merge",
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
}
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
