# SPDX-License-Identifier: Apache-2.0
"""Objectives that studies compare: name -> settings of the section `objective`.

A name is one of `tba_jax.train.losses`, or a preset of `tba_jax.config.methods` with further
settings.
"""

from collections.abc import Mapping
from typing import Any

from tba_jax.config.methods import fields_of
from tba_jax.config.schema import make_config
from tba_jax.train.config import ObjectiveSettings

OBJECTIVES: Mapping[str, Mapping[str, Any]] = {
    "tb": {"preset": "tba"},
    "tb, learned log Z": {"preset": "tba", "log_z": "learned"},
    "tba_prime": {"preset": "tba_prime"},
    "tba_prime_live": {"preset": "tba_prime_live"},
    "topr": {"preset": "topr"},
    "gflownet_sync": {"preset": "gflownet_sync"},
    "reinforce": {"name": "reinforce"},
    "rloo": {"name": "rloo"},
    "rloo, beta 0": {"name": "rloo", "beta": 0.0},
    "proximal_rloo": {"name": "proximal_rloo"},
    "grpo": {"preset": "grpo"},
    "grpo, beta 0": {"name": "grpo", "beta": 0.0},
    "dr_grpo": {"name": "dr_grpo"},
    "dapo": {"preset": "dapo"},
    "gspo": {"name": "gspo"},
    "cispo": {"preset": "cispo"},
    "ipo": {"name": "ipo"},
    "ppo": {"preset": "ppo"},
    "vineppo": {"preset": "vineppo"},
    "online_dpo": {"name": "online_dpo"},
}


def settings_of(name: str, beta: float) -> ObjectiveSettings:
    """Return the settings of an objective, with constant `beta` unless the objective sets beta."""
    given = dict(OBJECTIVES[name])
    preset = given.pop("preset", None)
    fields = {"objective.beta": beta} if preset is None else {}
    if preset is not None:
        of_preset = fields_of(preset)
        fields = {k: v for k, v in of_preset.items() if k.startswith("objective.")}
        fields.setdefault("objective.beta", beta)
    fields |= {f"objective.{field}": value for field, value in given.items()}
    return make_config(fields).objective
