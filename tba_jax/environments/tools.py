# SPDX-License-Identifier: Apache-2.0
"""A tool for policies: Python in a sandbox.

Tools are typed functions, as in the argument `tools` of TRL's trainers. Name them in
task.environment, separated by commas, or call them from the methods of an environment.
"""

from tba_jax.environments.sandbox import run_python


def python(code: str) -> str:
    """Run Python code and return what it prints.

    The code runs alone, without files, network or earlier results.

    Args:
        code: Python code. The value of the last line is printed if it is an expression.

    Returns:
        The printed text, or an error.
    """
    return run_python(code, timeout_s=5.0, max_memory_bytes=2**30)
