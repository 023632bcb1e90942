# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.buffer`: see `tba_jax.commands.buffer`."""

import sys

from tba_jax.commands.buffer import main
from tba_jax.commands.entry_point import run_command

if __name__ == "__main__":
    sys.exit(run_command(main))
