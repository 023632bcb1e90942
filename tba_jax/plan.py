# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.plan`: see `tba_jax.planning.command`."""

import sys

from tba_jax.commands.edge import guarded
from tba_jax.planning.command import main

if __name__ == "__main__":
    sys.exit(guarded(main))
