# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.sft`: see `tba_jax.commands.sft`."""

import sys

from tba_jax.commands.edge import guarded
from tba_jax.commands.sft import main

if __name__ == "__main__":
    sys.exit(guarded(main))
