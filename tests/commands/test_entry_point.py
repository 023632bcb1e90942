# SPDX-License-Identifier: Apache-2.0
"""The edge of the commands: one line whatever is wrong, dead outputs, and processes of a pod."""

import errno
import gc
import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path

import pytest

import tba_jax
from tba_jax.commands import train
from tba_jax.commands.entry_point import run_command
from tba_jax.commands.launch_processes import launch
from tba_jax.commands.overview import COMMANDS, main
from tba_jax.config.schema import Config
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
    for number, advice in ((errno.ENOSPC, "Make room"), (errno.EROFS, "Make it writable")):
        code, (line,) = told(OSError(number, reason := os.strerror(number), "/a/b"), capsys)
        assert code == 1 and f"error: /a/b cannot be used: {reason}. {advice}" in line


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
    modules = [f"tba_jax.{name}" for name in COMMANDS if name not in ("report", "launch_processes")]
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
    assert set(COMMANDS) - {"launch_processes"} == (files | folders) - no_commands


def test_a_command_runs_by_its_name_and_an_unknown_one_is_one_line(capsys):
    with pytest.raises(SystemExit) as end:
        main(["report", "--help"])
    assert end.value.code == 0 and "tba_jax report" in capsys.readouterr().out
    assert main(["raport"]) == 2
    told = capsys.readouterr().err
    assert "no command 'raport'; there are main, report, " in told and "mean report? `py" in told


PRINTING = """
import sys
from tba_jax.report.progress import ProgressDisplay
from tba_jax.commands.interruption import surviving_closed_outputs
with surviving_closed_outputs():
    display = ProgressDisplay(9)
    for i in range(3):
        display.note(f"line {i}")
        print("x" * 100_000, flush=True)
    print("errors too", file=sys.stderr)
"""


FULL = "the output cannot be written (No space left on device)"


@pytest.mark.parametrize(("outputs", "said"), [(">/dev/full", FULL), ("2>&1 | true", "")])
def test_what_is_printed_to_a_dead_output_is_dropped(outputs, said):
    script = f'set -o pipefail; "$@" {outputs}'
    done = subprocess.run(
        ["bash", "-c", script, "bash", sys.executable, "-c", PRINTING],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 0, done.stderr
    assert said in done.stderr and "Traceback" not in done.stderr
    if said:
        assert done.stderr.count("cannot be written") == 1 and "errors too" in done.stderr


CHILD = """
import os, signal, sys, time
who = int(sys.argv[-1].split("=")[1])
print("began", who, sys.argv[-2], flush=True)
{body}
"""


def run(body, capfd, **options):
    command = [sys.executable, "-c", CHILD.format(body=textwrap.dedent(body))]
    return launch(2, ["--mine=1"], command=command, **options), *capfd.readouterr()


def test_the_first_failure_is_named_and_the_others_do_not_outlive_it(capfd):
    body = "if who == 1: os.kill(os.getpid(), 9)\ntime.sleep(60)"
    got, _, err = run(body, capfd, grace_s=0.5)
    assert got == 137 and "process 1 was killed by SIGKILL, the first of 2 to fail" in err
    assert "Run the same command again" in err
    assert "process 0 did not end by itself: killed" in err


def test_an_interruption_reaches_every_process(capfd, tmp_path, monkeypatch):
    monkeypatch.setenv("READY", str(tmp_path))
    body = """
    def stop(*_):
        print("saved", flush=True)
        sys.exit(0)
    signal.signal(signal.SIGINT, stop)
    open(os.path.join(os.environ["READY"], str(who)), "w").close()
    time.sleep(60)
    """

    def interrupt():
        while len(os.listdir(tmp_path)) < 2:  # earlier, a process has no handler yet
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=interrupt, daemon=True).start()
    code, out, _ = run(body, capfd)
    assert code == 0 and "[0] saved" in out and "[1] saved" in out
    assert "[0] began 0 --num_processes=2" in out.splitlines()


def test_a_run_collects_garbage_although_imports_do_not(monkeypatch):
    found = []

    def fake_train(*_, **__):
        found.append((gc.isenabled(), gc.get_freeze_count() > 0))

    monkeypatch.setattr(train, "train", fake_train)
    gc.disable()
    try:
        assert train._run(Config(), "runs/none", lambda: False) == 0
    finally:
        gc.enable()
        gc.unfreeze()
    assert found == [(True, True)]
