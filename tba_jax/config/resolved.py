# SPDX-License-Identifier: Apache-2.0
"""Values of settings that depend on placement and task (`auto`)."""

from typing import Literal

from tba_jax.config.schema import Config
from tba_jax.flow.padding import SHORT


def writes_versions(config: Config) -> bool:
    """Return whether the trainer processes have no searchers and write weights to disk."""
    return config.placement in ("hosts", "fleet")


def allows_forks(config: Config) -> bool:
    """Return whether an episode may fork into several paths: with an environment."""
    return bool(config.task.environment)


def shares_prompts(config: Config) -> bool:
    """Return whether a row has a prompt once before several responses to it.

    Short prompts, and the one-token prompts of episodes with a renderer, are repeated for each
    response, which saves the compilation of a program.
    """
    return config.task.max_prompt_tokens > SHORT and not config.task.renderer


def remat_of(config: Config) -> Literal["none", "dots", "layers"]:
    """Return what the backward pass recomputes; "auto" means "layers" until a choice is made."""
    return "layers" if config.model.remat == "auto" else config.model.remat


def dtypes_on(config: Config, platform: str) -> dict[str, str]:
    """Return model.compute_dtype for the platform of the devices, if the config leaves it open."""
    if config.model.compute_dtype != "auto":
        return {}
    return {"model.compute_dtype": "float32" if platform == "cpu" else "bfloat16"}
