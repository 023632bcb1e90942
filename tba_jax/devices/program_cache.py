# SPDX-License-Identifier: Apache-2.0
"""The persistent compilation cache of a process: JAX's cache in the user's cache folder.

Invariants: a folder holds programs for one kind of processor, so machines that share a home folder
never load each other's programs (JAX separates devices and versions itself). An unusable cache
costs time, but does not end the run.
"""

import hashlib
import os
import platform
from pathlib import Path

import jax

MAX_BYTES = 2**30
"""Maximum size of one machine's folder; JAX evicts the least recently used programs."""
MIN_COMPILE_S = 0.05
"""Minimum compile time of cached programs: to read a faster one from disk would take as long."""


def open_cache() -> str:
    """Enable the persistent compilation cache; return a line for the user with its folder.

    A folder in the variable JAX_COMPILATION_CACHE_DIR takes precedence and is used unchanged. Call
    the function before programs are compiled, and after the processes of a job are connected.

    Returns:
        The line for the user; "" if JAX_ENABLE_COMPILATION_CACHE is off.
    """
    if not jax.config.jax_enable_compilation_cache:
        return ""
    if chosen := jax.config.jax_compilation_cache_dir:
        return f"compiled programs are kept in {chosen} (JAX_COMPILATION_CACHE_DIR)"
    try:
        given = os.environ.get("XDG_CACHE_HOME", "")
        home = Path(given) if os.path.isabs(given) else Path.home() / ".cache"
        folder = home / "tba_jax" / "xla" / _machine()
        folder.mkdir(parents=True, exist_ok=True)
        probe = folder / f"written-by-{platform.node()}-{os.getpid()}"
        probe.touch()
        probe.unlink()
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


def _machine() -> str:
    path = Path("/proc/cpuinfo")
    processor = path.read_text() if path.exists() else platform.processor()
    if hasattr(os, "sched_getaffinity"):  # not on macOS
        return machine_key(processor, len(os.sched_getaffinity(0)))
    return machine_key(processor, os.cpu_count() or 1)


def machine_key(processor: str, num_cores: int) -> str:
    """Return a folder name, equal for two machines if programs of one run on the other.

    Args:
        processor: text of /proc/cpuinfo, or name of the processor. CPU programs use instructions
            of the processor that compiled them.
        num_cores: number of cores of this process, over which CPU programs are divided.
    """
    wanted = ("model name", "flags", "CPU implementer", "CPU part", "Features")
    lines = processor.splitlines()
    # Read the first core only: the order of cores may differ between equal machines.
    facts = [next((x for x in lines if x.startswith(name)), "") for name in wanted]
    facts = facts if any(facts) else [processor]
    digest = hashlib.sha256("\n".join([platform.machine(), str(num_cores), *facts]).encode())
    return f"machine-{digest.hexdigest()[:12]}"
