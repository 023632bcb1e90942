# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.buffer`: see `tba_jax.commands.buffer`."""

import sys

from tba_jax.commands.buffer import main

if __name__ == "__main__":
    sys.exit(main())
