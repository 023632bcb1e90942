# SPDX-License-Identifier: Apache-2.0
"""The persistent compilation cache of a process: JAX's cache in the user's cache folder.

JAX separates programs by version, kind of device and instructions of the processor.
"""

import os
from pathlib import Path

import jax

MAX_BYTES = 2**30
"""Maximum size of the folder; JAX evicts the least recently used programs."""
MIN_COMPILE_S = 0.05
"""Minimum compile time of cached programs: to read a faster one from disk would take as long."""


def open_cache() -> str:
    """Enable the persistent compilation cache; return a line for the user with its folder.

    A folder in the variable JAX_COMPILATION_CACHE_DIR takes precedence and is used unchanged. Call
    the function before programs are compiled, and after the processes of a job are connected. A
    folder that cannot be written costs time, but does not end the run.

    Returns:
        The line for the user; "" if JAX_ENABLE_COMPILATION_CACHE is off.
    """
    if not jax.config.jax_enable_compilation_cache:
        return ""
    if chosen := jax.config.jax_compilation_cache_dir:
        return f"compiled programs are kept in {chosen} (JAX_COMPILATION_CACHE_DIR)"
    try:
        home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
        folder = home / "tba_jax" / "xla"
        folder.mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise PermissionError(f"{folder} is not writable")
    except (OSError, RuntimeError) as error:  # RuntimeError: no home folder
        return (
            f"compiled programs are not kept: {error}. Set JAX_COMPILATION_CACHE_DIR=DIR to keep "
            "them there"
        )
    # With a size limit JAX also locks the cache, so that no process reads partial writes.
    jax.config.update("jax_compilation_cache_max_size", MAX_BYTES)
    jax.config.update("jax_persistent_cache_min_compile_time_secs", MIN_COMPILE_S)
    jax.config.update("jax_compilation_cache_dir", str(folder))
    return f"compiled programs are kept in {folder}"
