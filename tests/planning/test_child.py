# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a compiling process, the plan gets a verdict."""

import pytest

from tba_jax.config.schema import Config
from tba_jax.planning import child
from tba_jax.planning.verdict import Program

PROGRAM = Program("publish", "trainer")
REQUEST = child.Request("", {}, {}, "", (), Config(), PROGRAM)


@pytest.fixture
def ask(monkeypatch):
    """A function that makes `ask` run a program of its own."""

    def start(source):
        monkeypatch.setattr(child, "_CODE", f"import os, pickle, sys\n{source}")
        return child.ask(REQUEST)

    return start


def test_an_abort_of_the_compiler_is_a_verdict(ask):
    failure = ask(
        "print('F0101 x.cc:1] Check failed: chips are contiguous', file=sys.stderr)\n"
        "sys.stderr.flush(); os.abort()"
    ).failure
    assert "the compiler aborted" in failure and "chips are contiguous" in failure
    assert "Set other mesh sizes" in failure


def test_a_program_that_needs_too_much_memory_reports_the_size(ask):
    program = ask(
        "raise RuntimeError('RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory on "
        "HBM, the total memory required for HLO temporaries (25.05G) exceeds available HBM "
        "(15.75G). HLO module: jit_train_step.')"
    )
    assert program.is_too_large and "25.05G" in program.failure
