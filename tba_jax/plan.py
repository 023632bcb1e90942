# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.plan`: see `tba_jax.planning.command`."""

if __name__ == "__main__":
    from tba_jax.commands.entry_point import run

    run("plan")
