# SPDX-License-Identifier: Apache-2.0
"""What a config leaves to its placement and task."""

import pytest

from tba_jax.config.resolved import transport_of
from tba_jax.config.schema import make_config


@pytest.mark.parametrize(
    ("fields", "transport"),
    [
        ({}, "memory"),
        ({"placement": "pod"}, "memory"),
        ({"placement": "whole_hosts"}, "checkpoint"),
        ({"placement": "fleet"}, "checkpoint"),
        ({"sync.transport": "checkpoint"}, "checkpoint"),
    ],
)
def test_what_is_left_open_follows_the_placement(fields, transport):
    assert transport_of(make_config({"task.name": "arithmetic", **fields})) == transport
