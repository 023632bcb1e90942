# SPDX-License-Identifier: Apache-2.0
"""Policies that act in an environment, in episodes of several turns.

    python -m tba_jax.main --config=agent[:PRESET]

toy (default)
    The task is sums with a calculator, for the embedded start model. Offline on 2 CPU cores. The
    start model calls the calculator in a quarter of its episodes and guesses in the others.
    Episodes with a call have a higher mean reward.
"""

from ml_collections import ConfigDict

from tba_jax.config.presets import differing
from tba_jax.presets.math import PRESETS as MATH

_ARITHMETIC = MATH["arithmetic"]

PRESETS = {
    "toy": {
        **_ARITHMETIC,
        "num_steps": 40,
        "task": {
            **_ARITHMETIC["task"],
            "environment": "tba_jax.tasks.calculator:Calculator",
            "num_eval_prompts": 128,
        },
        "search": {
            **_ARITHMETIC["search"],
            "max_new_tokens": 24,
            "stop_strings": (":",),
            "max_turns": 4,
            "max_episodes": 64,
        },
        "checkpoint": {"period": 50},
        "eval": {"period": 20, "max_new_tokens": 24, "num_slots": 64},
    },
}


def get_config(preset: str = "toy") -> ConfigDict:
    """Return the default config with the differences of a preset."""
    return differing("agent", PRESETS, preset)
