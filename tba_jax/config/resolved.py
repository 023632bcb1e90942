# SPDX-License-Identifier: Apache-2.0
"""Values of settings that depend on placement and task (`auto`)."""

from typing import Literal

from tba_jax.config.schema import Config
from tba_jax.devices.placement import MODES
from tba_jax.flow.padding import SHORT
from tba_jax.tasks.registry import entry_of


def writes_versions(config: Config) -> bool:
    """Return whether the trainer processes have no searchers and write weights to disk."""
    return not MODES[config.placement].trainers_search


def transport_of(config: Config) -> Literal["memory", "checkpoint"]:
    """Return the transport of published weights: files if searchers are in other processes."""
    if config.sync.transport == "auto":
        return "checkpoint" if writes_versions(config) else "memory"
    return config.sync.transport


def allows_forks(config: Config) -> bool:
    """Return whether an episode may fork into several paths: with an environment, minibatches=1."""
    return bool(config.task.environment) and config.objective.built.minibatches == 1


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


def ownership_of(config: Config) -> Literal["by_prompt", "any"]:
    """Return which prompts a searcher draws.

    "by_prompt": searcher s of n draws the prompts whose ID is s modulo n. "any": searchers draw any
    prompt, because searchers may leave, or because the task has only one prompt.
    """
    has_one_prompt = entry_of(config.task.name).has_one_prompt
    elsewhere = MODES[config.placement].has_remote_searchers
    return "any" if elsewhere or has_one_prompt else "by_prompt"
