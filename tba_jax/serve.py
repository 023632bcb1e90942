# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.serve`: see `tba_jax.commands.serve`."""

if __name__ == "__main__":
    from tba_jax.commands.entry_point import run

    run("serve")
