# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax` lists commands that exist."""

import importlib.util

from tba_jax.commands.overview import COMMANDS


def test_every_listed_command_exists():
    missing = [name for name in COMMANDS if importlib.util.find_spec(f"tba_jax.{name}") is None]
    assert missing == []
