# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept where they are found again."""

import os
import subprocess
import sys

# Prints where programs are kept, then whether one was compiled or found there.
PROGRAM = """
import jax
from tba_jax.devices.platform import open_cache

print(open_cache())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name.split("/")[-1]))
jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.eye(7))
print("found" if "cache_hits" in found else "compiled")
"""


def test_a_second_process_finds_what_the_first_one_compiled(tmp_path):
    def run(home):
        kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", PROGRAM],
            capture_output=True,
            text=True,
            timeout=120,
            env=kept | {"JAX_PLATFORMS": "cpu", "XDG_CACHE_HOME": str(home)},
        )
        assert done.returncode == 0, done.stderr
        return done.stdout.splitlines()

    note = f"compiled programs are kept in {tmp_path / 'tba_jax' / 'xla'}"
    assert run(tmp_path) == [note, "compiled"] and run(tmp_path) == [note, "found"]
    (tmp_path / "file").write_text("")
    note, result = run(tmp_path / "file")
    assert result == "compiled"
    assert note.startswith("compiled programs are not kept: [Errno 20] Not a directory: ")
