# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a compiling process, the plan gets a verdict."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tba_jax.planning import children

REQUEST = {"topology": "", "config": {}, "model": {}, "cache": "", "program": ""}


@pytest.fixture
def child(monkeypatch, tmp_path):
    """A function that makes `ask` start a program of its own."""

    def start(source, timeout_s=20.0):
        (tmp_path / "faulty_child.py").write_text(f"import os, sys\n{source}\n")
        monkeypatch.setattr(children, "_MODULE", "faulty_child")
        monkeypatch.setenv("PYTHONPATH", str(tmp_path))
        return children.ask(REQUEST, timeout_s=timeout_s)

    return start


def test_a_refusal_is_the_users_business(child):
    answer = child("""print('{"refusal": "no such chip"}')""")
    assert (answer.value, answer.failure, answer.is_user_error) == (None, "no such chip", True)


def test_an_abort_of_the_compiler_is_a_verdict(child):
    answer = child(
        "print('F0101 x.cc:1] Check failed: chips are contiguous', file=sys.stderr)\n"
        "sys.stderr.flush(); os.abort()"
    )
    assert "the compiler aborted" in answer.failure and "chips are contiguous" in answer.failure
    assert "Set other mesh sizes" in answer.failure
    assert not answer.is_user_error


def test_a_program_that_needs_too_much_memory_reports_the_size(child):
    answer = child(
        "raise RuntimeError('RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on "
        "HBM, the total memory required for HLO temporaries (25.05G) exceeds available HBM "
        "(15.75G). HLO module: jit_train_step.')"
    )
    assert answer.is_too_large
    assert answer.needed_bytes == pytest.approx(25.05 * 2**30)


def test_a_child_ends_with_the_process_that_asked_it(tmp_path):
    fifo = tmp_path / "request"
    os.mkfifo(fifo)
    held = os.open(fifo, os.O_RDWR)  # the child's standard input never ends
    module = "tba_jax.planning.compile_one"
    parent = subprocess.Popen(
        ["bash", "-c", f"{sys.executable} -m {module} $$ < {fifo} & echo $!; wait"],
        stdout=subprocess.PIPE,
        text=True,
    )
    try:
        assert parent.stdout is not None
        child = Path("/proc") / parent.stdout.readline().strip()
        parent.kill()
        parent.wait()
        parent.stdout.close()
        deadline = time.monotonic() + 20
        while child.exists() and " Z " not in (child / "stat").read_text():
            assert time.monotonic() < deadline, "the child outlived its parent"
            time.sleep(0.1)
    finally:
        os.close(held)
