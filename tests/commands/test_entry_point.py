# SPDX-License-Identifier: Apache-2.0
"""The edge of the commands: one line whatever is wrong; tracebacks of the unexpected are kept."""

import errno
import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from tba_jax.commands import export, report
from tba_jax.commands.entry_point import run_command
from tba_jax.commands.overview import COMMANDS
from tba_jax.run.errors import UserError
from tba_jax.storage.whole_files import write_json


def told(error, capsys):
    """(exit code, the lines) of a command that fails so."""

    def main():
        raise error

    code = run_command(main)
    return code, capsys.readouterr().err.splitlines()


def test_an_unexpected_error_is_one_line_and_a_file(capsys):
    code, (line,) = told(KeyError("event"), capsys)
    assert code == 1 and line.startswith(
        "error: KeyError: 'event' (unexpected error: the traceback is in"
    )
    path = Path(line.partition(" is in ")[2].partition(",")[0])
    text = path.read_text()
    path.unlink()
    assert "Traceback" in text and "in main" in text and "KeyError: 'event'" in text
    assert told(UserError("give another"), capsys) == (2, ["error: give another"])


def test_what_storage_refuses_is_one_line_with_the_file_and_no_traceback(capsys):
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "/runs/a/plots/loss.png")
    message = "No space left on device. Make room, then run the same command again"
    line = f"error: /runs/a/plots/loss.png cannot be used: {message}"
    assert told(error, capsys) == (1, [line])


@pytest.mark.parametrize("arguments", ["tba_jax", "tba_jax.report --help"])
def test_a_closed_output_ends_a_command_without_a_line(arguments):
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as output:
        done = subprocess.run(
            [sys.executable, "-m", *arguments.split()],
            stdout=output,
            stderr=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONUNBUFFERED": ""},
        )
    assert done.stderr == ""
    assert done.returncode == 128 + signal.SIGPIPE


@pytest.mark.parametrize("content", [b"\xff\xfe", b'{"config": [1]}'])
def test_a_damaged_config_is_one_line_from_every_command(content, tmp_path, capsys):
    (tmp_path / "config.json").write_bytes(content)
    (tmp_path / "metrics.jsonl").write_text("")
    argv = [f"--workdir={tmp_path}", f"--out={tmp_path / 'out'}"]
    for main in (lambda: export.main(argv), lambda: report.main([str(tmp_path)])):
        assert run_command(main) == 2
        (line,) = capsys.readouterr().err.splitlines()
        assert f"{tmp_path}/config.json is not readable as the config of a run" in line


def test_a_config_of_another_version_says_what_differs(tmp_path, capsys):
    write_json(tmp_path / "config.json", {"config": {"seed": 1, "search.speed": 2}, "run_id": "a"})
    argv = [f"--workdir={tmp_path}", f"--out={tmp_path / 'out'}"]
    assert run_command(lambda: export.main(argv)) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert (
        "was written by another version of tba_jax: this version does not know search.speed" in line
    )


def test_a_process_for_user_code_imports_nothing_of_the_command_that_started_it():
    # multiprocessing imports the main module under this name, except that of a package.
    modules = [f"tba_jax.{name}" for name in COMMANDS if name != "report"]
    program = (
        f"import runpy, sys\nfor name in {modules}:\n"
        "    runpy.run_module(name, run_name='__mp_main__', alter_sys=True)\n"
        "print([name for name in sys.modules if name.startswith('tba_jax.')])"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.stdout.strip() == "[]", done.stderr
