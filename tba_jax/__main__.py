# SPDX-License-Identifier: Apache-2.0
"""The list of commands: python -m tba_jax."""

from tba_jax.commands.overview import main

if __name__ == "__main__":
    main()
