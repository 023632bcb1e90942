# SPDX-License-Identifier: Apache-2.0
"""What a config leaves to its placement and task."""

import pytest

from tba_jax.config.resolved import ownership_of, transport_of
from tba_jax.config.schema import make_config


@pytest.mark.parametrize(
    ("fields", "transport", "ownership"),
    [
        ({}, "memory", "by_prompt"),
        ({"placement": "pod"}, "memory", "by_prompt"),
        ({"placement": "whole_hosts"}, "checkpoint", "by_prompt"),
        ({"placement": "fleet"}, "checkpoint", "any"),
        ({"task.name": "redteam"}, "memory", "any"),
        ({"sync.transport": "checkpoint"}, "checkpoint", "by_prompt"),
    ],
)
def test_what_is_left_open_follows_placement_and_task(fields, transport, ownership):
    config = make_config({"task.name": "arithmetic", **fields})
    assert transport_of(config) == transport
    assert ownership_of(config) == ownership
