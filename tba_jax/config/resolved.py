# SPDX-License-Identifier: Apache-2.0
"""What a config means where it leaves a choice to its placement and task (`auto`)."""

from typing import Literal

from tba_jax.config.schema import Config
from tba_jax.devices.placement import MODES
from tba_jax.tasks.registry import entry_of


def is_gang(config: Config) -> bool:
    """Whether a trainer of several processes has its searchers elsewhere, in a fleet."""
    return MODES[config.placement].searches_elsewhere and config.fleet.trainer_hosts > 1


def shares_data(config: Config) -> bool:
    """As `Mode.shares_data`: of a gang the first process keeps the buffer."""
    return MODES[config.placement].shares_data and not is_gang(config)


def transport_of(config: Config) -> Literal["memory", "checkpoint"]:
    """How published weights travel: as files where searchers are on other machines."""
    if config.sync.transport == "auto":
        mode = MODES[config.placement]
        return "checkpoint" if mode.searches_elsewhere or not mode.shares_data else "memory"
    return config.sync.transport


def ownership_of(config: Config) -> Literal["by_prompt", "any"]:
    """Who draws a prompt: any searcher, where one of them may be missing or there is one prompt."""
    if config.search.ownership == "auto":
        has_one_prompt = entry_of(config.task.name).has_one_prompt
        elsewhere = MODES[config.placement].searches_elsewhere
        return "any" if elsewhere or has_one_prompt else "by_prompt"
    return config.search.ownership
