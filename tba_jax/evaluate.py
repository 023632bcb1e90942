# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.evaluate`: see `tba_jax.commands.evaluate`."""

import sys

from tba_jax.commands.edge import guarded
from tba_jax.commands.evaluate import main

if __name__ == "__main__":
    sys.exit(guarded(main))
