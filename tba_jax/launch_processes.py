# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.launch_processes`: see `tba_jax.commands.launch_processes`."""

import sys

from tba_jax.commands.entry_point import run_command
from tba_jax.commands.launch_processes import main

if __name__ == "__main__":
    sys.exit(run_command(main))
