# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.buffer`: see `tba_jax.commands.buffer`."""

import sys

if __name__ == "__main__":
    from tba_jax.commands.buffer import main
    from tba_jax.commands.entry_point import run_command

    sys.exit(run_command(main))
