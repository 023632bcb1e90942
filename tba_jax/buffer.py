# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.buffer`: see `tba_jax.commands.buffer`."""

import sys

from tba_jax.commands.buffer import main
from tba_jax.commands.edge import guarded

if __name__ == "__main__":
    sys.exit(guarded(main))
