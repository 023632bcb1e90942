# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax` lists the commands of the package."""

from pathlib import Path

import tba_jax
from tba_jax.commands.overview import COMMANDS


def test_every_command_is_listed():
    package = Path(tba_jax.__file__).parent
    files = {path.stem for path in package.glob("*.py")}
    folders = {path.parent.name for path in package.glob("*/__main__.py")}
    no_commands = {"__init__", "__main__", "api", "settings"}
    assert set(COMMANDS) == (files | folders) - no_commands
