# SPDX-License-Identifier: Apache-2.0
"""Published methods as settings: the expansion of `--config.objective.preset=NAME`.

A preset is replaced by the settings that it stands for; settings on the command line override them.
A run's config.json therefore has these settings and not the preset's name. Invariant: a preset
starts from exact Trajectory Balance, whatever objective the config had before.
"""

from collections.abc import Mapping
from typing import Any

from tba_jax.config import schema
from tba_jax.config.presets import near
from tba_jax.config.schema import Config
from tba_jax.settings import ConfigError
from tba_jax.train.objectives import own_names

PRESET = "objective.preset"

# TBA' of MATH: the reference is reset to the policy, and token log-ratios are clamped.
_PRIME = {
    "objective.importance": "token_clip",
    "objective.importance_cap": 8.0,
    "objective.kl_clamp": 10.0,
    "reference.reset_period": 50,
}

METHODS: Mapping[str, Mapping[str, Any]] = {
    # arXiv:2503.18929: exact Trajectory Balance, VarGrad form.
    "tba": {"objective.importance": "none"},
    # Its section 6 with its code of November 2025: the group mean of log-ratios is the sampler's.
    "tba_prime": {**_PRIME, "objective.kl_center": "behavior"},
    # The same with the current policy's mean, as in later code: VarGrad except for the clamp.
    "tba_prime_live": {**_PRIME, "objective.kl_center": "live"},
    # One actor, synchronous and on-policy (the baseline of TBA's red-teaming).
    "gflownet_sync": {
        "objective.importance": "none",
        "driver": "sync",
        "num_searchers": 1,
        "sync_period": 1,
        "search.exact_lag": 0,
        "search.initial_fill": 0,
        "replay.recency_prob": 1.0,
        "replay.pace": "off",
    },
    # arXiv:2503.14476, with its dynamic sampling.
    "dapo": {"objective.name": "dapo", "replay.equal_rewards": "redraw"},
    # arXiv:2506.13585 with the recipe of arXiv:2510.13786, which skips groups of equal rewards.
    "cispo": {"objective.name": "cispo", "replay.equal_rewards": "skip"},
    # arXiv:1707.06347, with four updates per batch, as in TRL's PPO.
    "ppo": {"objective.name": "ppo", "objective.epochs": 4},
    # arXiv:2410.01679: two updates. There states are the lines of a response, with nine
    # continuations each; here they are pairs of tokens, with four.
    "vineppo": {"objective.name": "vineppo", "objective.epochs": 2, "objective.vine_tokens": 2},
    # arXiv:2402.03300.
    "grpo": {"objective.name": "grpo", "objective.beta": 0.04},
}


def fields_of(name: str) -> dict[str, Any]:
    """Return the dotted fields of a method; None resets a setting to its default. Loads JAX.

    Raises:
        ConfigError: unknown name.
    """
    if name not in METHODS:
        known = f"there are {', '.join(METHODS)}{near(name, METHODS)}"
        raise ConfigError(f"objective.preset has no {name!r}; {known}")
    # The scale belongs to the run, not to a method.
    reset = {f"objective.{own}": None for own in own_names() if own != "scale"}
    return {"objective.name": "tb", **reset, **METHODS[name]}


def replace(config: Config, fields: Mapping[str, Any]) -> Config:
    """Return a config with some dotted fields changed, of which one may be `objective.preset`.

    The other fields override those of the method.

    Raises:
        ConfigError: no such method, field or value.
    """
    others = {name: value for name, value in fields.items() if name != PRESET}
    own = fields_of(fields[PRESET]) if PRESET in fields else {}
    return schema.replace(config, own | others)
