# SPDX-License-Identifier: Apache-2.0
"""The edge of the commands: one line whatever is wrong; the unexpected has a traceback."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

import tba_jax
from tba_jax.commands.entry_point import run_command
from tba_jax.commands.overview import COMMANDS, main
from tba_jax.run.errors import UserError


def told(error, capsys):
    """(exit code, lines) of a command that raises this error."""

    def fail():
        raise error

    code = run_command(fail)
    return code, capsys.readouterr().err.splitlines()


def test_an_unexpected_error_has_a_traceback_and_others_are_one_line(capsys):
    code, (*trace, line) = told(KeyError("event"), capsys)
    assert code == 1 and "in fail" in "".join(trace) and trace[-1] == "KeyError: 'event'"
    assert line == "error: unexpected KeyError: attach the traceback above to a bug report"
    assert told(UserError("give another"), capsys) == (2, ["error: give another"])
    code, (line,) = told(OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/a/loss.png"), capsys)
    assert code == 1 and "error: /a/loss.png cannot be used: No space left on device. Make" in line


def test_a_closed_output_ends_a_command_without_a_line():
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        command = [sys.executable, "-m", "tba_jax.report", "--help"]
        env = {**os.environ, "PYTHONUNBUFFERED": ""}
        done = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, env=env)
    assert (done.stderr, done.returncode) == (b"", 128 + signal.SIGPIPE)


def test_a_process_for_user_code_imports_nothing_of_the_command_that_started_it():
    # multiprocessing imports the main module under this name, except that of a package.
    modules = [f"tba_jax.{name}" for name in COMMANDS if name != "report"]
    program = (
        f"import runpy, sys\nfor name in {modules}:\n"
        "    runpy.run_module(name, run_name='__mp_main__', alter_sys=True)\n"
        "print([name for name in sys.modules if name.startswith('tba_jax.')])"
    )
    assert subprocess.check_output([sys.executable, "-c", program], text=True).strip() == "[]"


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
