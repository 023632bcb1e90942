# SPDX-License-Identifier: Apache-2.0
"""Compiled programs are kept where they are found again."""

import os
import subprocess
import sys

# Says the note, then whether a program that takes its time to compile was compiled or found.
PROGRAM = """
import jax
from tba_jax.devices.platform import open_cache

print(open_cache())
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)
found = []
jax.monitoring.register_event_listener(lambda name, **_: found.append(name.split("/")[-1]))
x = jax.jit(lambda x: jax.numpy.sin(x) @ x)(jax.numpy.eye(7))
print("found" if "cache_hits" in found else "compiled", float(x[1, 1]))
"""


def run(**variables):
    """The two lines of a process that opens the cache."""
    kept = {k: v for k, v in os.environ.items() if not k.startswith("JAX_")}
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", PROGRAM],
        capture_output=True,
        text=True,
        timeout=120,
        env=kept | {"JAX_PLATFORMS": "cpu", **variables},
    )
    assert done.returncode == 0, done.stderr
    note, result = done.stdout.splitlines()
    return note, result.split()[0]


def test_a_second_process_finds_what_the_first_one_compiled(tmp_path):
    note, result = run(XDG_CACHE_HOME=str(tmp_path))
    folder = tmp_path / "tba_jax" / "xla"
    assert result == "compiled"
    assert note == f"compiled programs are kept in {folder}"
    assert run(XDG_CACHE_HOME=str(tmp_path)) == (note, "found")
    # Nothing else is left there.
    assert {path.name.split("-")[0] for path in folder.iterdir()} <= {".lockfile"} | {
        path.name.split("-")[0] for path in folder.glob("jit_*")
    }


def test_a_folder_that_cannot_be_written_is_a_note(tmp_path):
    (tmp_path / "file").write_text("")
    note, result = run(XDG_CACHE_HOME=str(tmp_path / "file"))
    assert result == "compiled"
    assert note.startswith("compiled programs are not kept: [Errno 20] Not a directory: ")
    assert note.endswith("Set JAX_COMPILATION_CACHE_DIR=DIR to keep them there")
