# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax COMMAND`."""

import sys

if __name__ == "__main__":
    from tba_jax.commands.overview import main

    sys.exit(main(sys.argv[1:]))
