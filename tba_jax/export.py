# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.export`: see `tba_jax.commands.export`."""

if __name__ == "__main__":
    from tba_jax.commands.entry_point import run

    run("export")
