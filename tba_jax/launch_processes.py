# SPDX-License-Identifier: Apache-2.0
"""`python -m tba_jax.launch_processes`: see `tba_jax.commands.launch_processes`."""

if __name__ == "__main__":
    from tba_jax.commands.entry_point import run

    run("launch_processes")
