# SPDX-License-Identifier: Apache-2.0
"""The list of commands: python -m tba_jax."""

import sys

from tba_jax.commands.edge import guarded
from tba_jax.commands.overview import main

if __name__ == "__main__":
    sys.exit(guarded(main))
