# SPDX-License-Identifier: Apache-2.0
"""Whatever happens to a compiling process, the plan gets a verdict."""

import re

import pytest

from tba_jax.config.schema import Config
from tba_jax.planning import child
from tba_jax.planning.verdict import Program

PROGRAM = Program("publish", "trainer")
REQUEST = child.Request("", {}, {}, "", (), Config(), PROGRAM)


@pytest.mark.parametrize(
    ("source", "words", "is_too_large"),
    [
        (
            "print('F0101 x.cc:1] Check failed: chips are contiguous', file=sys.stderr)\n"
            "sys.stderr.flush(); os.abort()",
            "the compiler aborted.*chips are contiguous.*Set other mesh sizes",
            False,
        ),
        (
            "raise RuntimeError('RESOURCE_EXHAUSTED: E1000: CompileTimeHbmOom: Ran out of memory "
            "on HBM, the total memory required for HLO temporaries (25.05G) exceeds available HBM "
            "(15.75G). HLO module: jit_train_step.')",
            "25.05G",
            True,
        ),
    ],
)
def test_a_compiler_that_fails_is_a_verdict(source, words, is_too_large, monkeypatch):
    monkeypatch.setattr(child, "_CODE", f"import os, pickle, sys\n{source}")
    program = child.ask(REQUEST)
    assert re.search(words, program.failure, re.DOTALL), program.failure
    assert program.is_too_large == is_too_large
