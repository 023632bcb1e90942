# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.study`: see `tba_jax.studies.study`."""

import sys

from tba_jax.commands.edge import guarded
from tba_jax.studies.study import main

if __name__ == "__main__":
    sys.exit(guarded(main))
