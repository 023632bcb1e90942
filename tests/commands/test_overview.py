# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax` lists the commands of the package."""

from pathlib import Path

import pytest

import tba_jax
from tba_jax.commands.overview import COMMANDS, main


def test_every_command_is_listed():
    package = Path(tba_jax.__file__).parent
    files = {path.stem for path in package.glob("*.py")}
    folders = {path.parent.name for path in package.glob("*/__main__.py")}
    no_commands = {"__init__", "__main__", "api", "settings", "workers"}
    assert set(COMMANDS) == (files | folders) - no_commands


def test_a_command_runs_by_its_name_and_an_unknown_one_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        main(["report", "--help"])
    assert end.value.code == 0 and "tba_jax.report" in capsys.readouterr().out
    assert main(["raport"]) == 2
    assert "there is no command 'raport'; did you mean report?" in capsys.readouterr().err
    assert main([]) == 0 and "usage: python -m tba_jax COMMAND" in capsys.readouterr().out
