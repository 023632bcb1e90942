# SPDX-License-Identifier: Apache-2.0
"""The list of commands: python -m tba_jax."""

import sys

if __name__ == "__main__":
    from tba_jax.commands.entry_point import run_command
    from tba_jax.commands.overview import main

    sys.exit(run_command(main))
