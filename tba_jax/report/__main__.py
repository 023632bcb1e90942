# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.report`: see `tba_jax.commands.report`."""

import sys

from tba_jax.commands.edge import guarded
from tba_jax.commands.report import main

if __name__ == "__main__":
    sys.exit(guarded(main))
