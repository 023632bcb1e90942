# SPDX-License-Identifier: Apache-2.0
"""The tool python: what it returns, and what code in the sandbox cannot do."""

import os
import subprocess
import time
from pathlib import Path

import pytest

from tba_jax.environments import sandbox
from tba_jax.environments.sandbox import run_python


def run(code):
    return run_python(code, timeout_s=1.0, max_memory_bytes=2**28)


def test_python_code_prints_its_output_and_last_value():
    assert run("import math\nprint(math.floor(2.5))\n[x**2 for x in range(3)]") == "2\n[0, 1, 4]\n"
    assert run("x = 1\nx / 0") == "line 2: ZeroDivisionError: division by zero\n"
    assert run("x = = 1").startswith("line 1: SyntaxError")
    assert run("import numpy\nint(numpy.arange(4).sum())") == "6\n"


ATTACKS = {
    "loop": ("while True: pass", "error: the code ran longer than 1 s"),
    "memory": ("x = []\nwhile True: x.append(bytearray(2**20))", "MemoryError"),
    "output": ("while True: print('x' * 1000)", "error: more than 16,384 bytes were printed"),
    "fork": ("import os\nwhile True: os.fork()", "PermissionError"),
    "threads": (
        "import threading, time\nn = 0\ntry:\n"
        "  while True: threading.Thread(target=time.sleep, args=(99,)).start(); n += 1\n"
        "except RuntimeError as error: print(n, error)",
        "0 can't start new thread",
    ),
    "program": ("import os\nos.execv('/bin/sh', ['sh'])", "PermissionError"),
    "spawn": ("import subprocess\nsubprocess.run(['ls'])", "PermissionError"),
    "network": ("import socket\nsocket.socket()", "PermissionError"),
    "local socket": ("import socket\nsocket.socketpair()", "PermissionError"),
    "write": ("open('FILE', 'w')", "PermissionError"),
    "delete": ("import os\nos.remove('FILE')", "PermissionError"),
    "mode": ("import os\nos.chmod('FILE', 0)", "PermissionError"),
    "shared memory": ("open('/dev/shm/tba_jax_attack', 'w')", "PermissionError"),
    "read": ("open('FILE').read()", "PermissionError"),
    "environment": ("import os\nopen(f'/proc/{os.getppid()}/environ').read()", "PermissionError"),
    "kill": ("import os\nos.kill(os.getppid(), 9)", "PermissionError"),
    "signal by a file": ("import fcntl, os\nfcntl.fcntl(0, 8, os.getppid())", "PermissionError"),
    "limits": (
        "import resource\nresource.setrlimit(resource.RLIMIT_CPU, (99, 99))",
        "not allowed to raise maximum limit",
    ),
    "crash": ("import ctypes\nctypes.string_at(0)", "error: the process was ended by SIGSEGV"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_code_in_the_sandbox_is_stopped_in_time_and_leaves_nothing(name, tmp_path):
    file = tmp_path / "file"
    file.write_text("secret")
    mode = file.stat().st_mode
    code, wanted = ATTACKS[name]
    start = time.monotonic()
    found = run(code.replace("FILE", str(file)))
    assert time.monotonic() - start < 30.0  # seconds of processor time, on a busy machine
    assert wanted in found and "secret" not in found
    assert (file.read_text(), file.stat().st_mode) == ("secret", mode)
    assert not os.path.exists("/dev/shm/tba_jax_attack")
    listed = subprocess.run(
        ["ps", "-o", "args", "--ppid", str(os.getpid())], capture_output=True, text=True
    )
    assert sandbox.__file__ not in listed.stdout


def test_code_that_sleeps_ends_at_the_deadline(monkeypatch):
    monkeypatch.setattr(sandbox, "_START_S", 1.0)
    start = time.monotonic()
    assert run("import time\ntime.sleep(99)") == "error: the code ran longer than 1 s"
    assert time.monotonic() - start < 10.0


def test_a_process_that_cannot_be_confined_runs_no_code(monkeypatch, tmp_path):
    script = tmp_path / "sandbox.py"
    text = Path(sandbox.__file__).read_text()
    script.write_text(text.replace("libseccomp.so.2", "libabsent.so"))
    monkeypatch.setattr(sandbox, "__file__", str(script))
    with pytest.raises(OSError, match="no libseccomp .* Install it: apt install libseccomp2"):
        run("print('ran')")
