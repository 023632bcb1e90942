# SPDX-License-Identifier: Apache-2.0
"""Values of settings that depend on placement and task (`auto`)."""

from typing import Literal

from tba_jax.config.schema import Config
from tba_jax.devices.placement import MODES
from tba_jax.tasks.registry import entry_of


def has_trainer_group(config: Config) -> bool:
    """Return whether the trainer of a fleet has several processes."""
    return MODES[config.placement].searches_elsewhere and config.fleet.trainer_hosts > 1


def writes_versions(config: Config) -> bool:
    """Return whether trainer processes without searchers write weights to disk together."""
    return not MODES[config.placement].trainers_search or has_trainer_group(config)


def transport_of(config: Config) -> Literal["memory", "checkpoint"]:
    """Return the transport of published weights: files if searchers are in other processes."""
    if config.sync.transport == "auto":
        mode = MODES[config.placement]
        return "checkpoint" if mode.searches_elsewhere or not mode.trainers_search else "memory"
    return config.sync.transport


def ownership_of(config: Config) -> Literal["by_prompt", "any"]:
    """Return who may draw a prompt: any searcher if one may be missing or there is one prompt."""
    if config.search.ownership == "auto":
        has_one_prompt = entry_of(config.task.name).has_one_prompt
        elsewhere = MODES[config.placement].searches_elsewhere
        return "any" if elsewhere or has_one_prompt else "by_prompt"
    return config.search.ownership
