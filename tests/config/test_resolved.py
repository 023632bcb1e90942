# SPDX-License-Identifier: Apache-2.0
"""What a config leaves to its placement and task."""

import pytest

from tba_jax.config.resolved import writes_versions
from tba_jax.config.schema import make_config


@pytest.mark.parametrize(
    ("fields", "is_written"),
    [
        ({}, False),
        ({"placement": "split"}, False),
        ({"placement": "hosts"}, True),
        ({"placement": "fleet"}, True),
    ],
)
def test_what_is_left_open_follows_the_placement(fields, is_written):
    assert writes_versions(make_config({"task.name": "arithmetic", **fields})) == is_written
